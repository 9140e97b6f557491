"""Rule: the allowed values of an option, as a test and in words for the error."""

from __future__ import annotations

import difflib
import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from numbers import Real
from typing import Any

from megatrain.errors import OptionError

Fault = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of an option.

    Args:
        text: Completes "precision is ...".
        way: Completes "Give ..."; `{name}` stands for the option's name.
        fault: Completes "precision='fp8' ..." for a value that breaks the rule; None for any other.
        nearest: The way for a value that is nearly right; None for any other.
    """

    text: str
    way: str
    fault: Fault
    nearest: Callable[[Any], str | None] = lambda _: None

    def check(self, name: str, value: object, *, has_default: bool = False) -> None:
        """Refuses a value that breaks the rule.

        >>> one_of("fp32", "bf16").check("precision", "bf61", has_default=True)
        Traceback (most recent call last):
        megatrain.errors.OptionError: precision='bf61' is not known.
          precision is "fp32" or "bf16".
          Give precision="bf16", or leave it out.
        """
        fault = self.fault(value)
        if fault is not None:
            given = name if fault == "is None" else f"{name}={shown(value)}"
            raise self._error(f"{given} {fault}", name, self.nearest(value) or self.way, has_default=has_default)

    def check_flag(self, flag: str, value: object, *, has_default: bool = True) -> None:
        """Refuses the value of an option of the command line, in its words: nothing is None there.

        `flag` is the option as it is written, `--lr`, or the name of an argument by position.

        >>> optional(number(above=0, example=1e-5)).check_flag("--lr", 0.0)
        Traceback (most recent call last):
        megatrain.errors.OptionError: --lr=0.0 is not above 0.
          --lr is a number above 0.
          Give --lr=1e-05, or leave it out.
        """
        fault = self.fault(value)
        if fault is not None:
            is_option = flag.startswith("--")
            way = self.nearest(value) or self.way
            way = way if is_option else way.removeprefix("{name}=")
            rule = Rule(self.text.removesuffix(_OR_NONE), way, self.fault)
            given = f"{flag}{'=' if is_option else ' '}{shown(value)}"
            raise rule._error(f"{given} {fault}", flag, way, has_default=has_default)

    def _error(self, wrong: str, name: str, way: str, *, has_default: bool) -> OptionError:
        otherwise = ", or leave it out" if has_default else ""
        return OptionError(f"{wrong}.\n  {name} is {self.text}.\n  Give {way.format(name=name)}{otherwise}.")


_OR_NONE = ", or None"


def one_of(*choices: str) -> Rule:
    """One of these words."""
    *rest, last = (f'"{choice}"' for choice in choices)

    def nearest(value: Any) -> str | None:
        found = difflib.get_close_matches(value.lower(), choices, 1) if isinstance(value, str) else []
        return f'{{name}}="{found[0]}"' if found else None

    return Rule(
        f"{', '.join(rest)} or {last}" if rest else last,
        f'{{name}}="{choices[0]}"',
        lambda value: None if isinstance(value, str) and value in choices else "is not known",
        nearest,
    )


def count(least: int = 0, most: int | None = None, example: int | None = None) -> Rule:
    """A whole number from `least` to `most`, such as `example`; a bool isn't one."""

    def fault(value: Any) -> str | None:
        if not _is_whole(value):
            return "is not a whole number"
        if value < least:
            return f"is less than {least}"
        return f"is more than {most}" if most is not None and value > most else None

    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Rule(f"a whole number {bounds}", f"{{name}}={max(least, 0) if example is None else example}", fault)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(*, least: float = -inf, above: float = -inf, below: float | None = None, example: float = 1.0) -> Rule:
    """A number within bounds; NaN and bools aren't allowed, nor is infinity with a bound `below`."""

    def fault(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, Real) or isnan(value):
            return "is not a number"
        if value < least or (above != -inf and value <= above):
            return f"is less than {least:g}" if value < least else f"is not above {above:g}"
        if below is None or value < below:
            return None
        return "is not finite" if below == inf else f"is not below {below:g}"

    bounds = [f"of at least {least:g}"] * (least != -inf) + [f"above {above:g}"] * (above != -inf)
    bounds += [] if below is None else ["finite" if below == inf else f"below {below:g}"]
    return Rule(" ".join(["a number", " and ".join(bounds)]).rstrip(), f"{{name}}={example:g}", fault)


def function(num_arguments: int | None = None) -> Rule:
    """Something to call, with so many arguments by position; None for any."""

    def fault(value: Any) -> str | None:
        if not callable(value):
            return "is no function"
        if isinstance(value, type) and any("__call__" in vars(base) for base in value.__mro__):
            return "is the class itself, not an object of it that can be called"
        if num_arguments is not None and not _takes(value, num_arguments):
            return f"can't be called with {num_arguments} argument{'s' * (num_arguments != 1)}"
        return None

    taken = "" if num_arguments is None else f" of {num_arguments} argument{'s' * (num_arguments != 1)}"
    return Rule(f"a function{taken}", "a function, such as a lambda", fault)


def _takes(called: Callable[..., Any], num_arguments: int) -> bool:
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return True  # written in C: only a call can tell
    try:
        signature.bind(*(None,) * num_arguments)
    except TypeError:
        return False
    return True


def instance_of(kind: type, what: str | None = None, way: str | None = None) -> Rule:
    """An object of a class."""
    words = what or _with_article(kind.__qualname__)

    def fault(value: Any) -> str | None:
        if isinstance(value, kind):
            return None
        is_class = isinstance(value, type) and issubclass(value, kind)
        return "is the class itself, not an object of it" if is_class else f"is {named(value)}"

    return Rule(words, way or f"{{name}} {words}", fault)


def optional(rule: Rule) -> Rule:
    """A value that obeys a rule, or None."""
    return replace(
        rule, text=f"{rule.text}{_OR_NONE}", fault=lambda value: None if value is None else rule.fault(value)
    )


def either(*rules: Rule) -> Rule:
    """A value that obeys one of several rules. The fault is the one that says more than the class, if there is one."""

    def fault(value: Any) -> str | None:
        faults = {rule.fault(value) for rule in rules}
        telling = faults - {f"is {named(value)}"}
        return None if None in faults else telling.pop() if len(telling) == 1 else f"is {named(value)}"

    def nearest(value: Any) -> str | None:
        return next(filter(None, (rule.nearest(value) for rule in rules)), None)

    return Rule(", or ".join(rule.text for rule in rules), rules[0].way, fault, nearest)


def sequence_of(rule: Rule | None = None, kinds: tuple[type, ...] = (Sequence,), what: str = "a list") -> Rule:
    """A list or tuple of values that obey a rule; a text isn't allowed."""

    def fault(value: Any) -> str | None:
        if not isinstance(value, kinds) or isinstance(value, str | bytes | bytearray):
            return f"is {named(value)}"
        if rule is None:
            return None
        faults = ((f"item {i},", item, rule.fault(item)) for i, item in enumerate(value))
        return _first(faults)  # pyright: ignore[reportUnknownArgumentType]

    items = "" if rule is None else f", each of them {rule.text}"
    return Rule(f"{what}{items}", f"{{name}} {what}", fault)


def _first(faults: Iterable[tuple[str, object, str | None]]) -> str | None:
    """Words for the first part of a value that has a fault: what it is, it, and the fault."""
    return next((f"has {part} {shown(item)}, which {fault}" for part, item, fault in faults if fault is not None), None)


def mapping_of(value_rule: Rule | None = None, key_rule: Rule | None = None) -> Rule:
    """A dict of values that obey a rule, by names."""
    keys = key_rule or TEXT

    def fault(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"is {named(value)}"
        items: Mapping[Any, Any] = value
        wrong = _first(("the key", key, keys.fault(key)) for key in items)
        if wrong is not None or value_rule is None:
            return wrong
        return _first((f"at {shown(key)}", found, value_rule.fault(found)) for key, found in items.items())

    values = "" if value_rule is None else f", each value {value_rule.text}"
    return Rule(f"a dict whose keys are each {keys.text}{values}", "{name} a dict", fault)


WHOLE = Rule("a whole number", "{name}=1", lambda value: None if _is_whole(value) else "is not a whole number")
FLAG = Rule(
    "True or False", "{name}=True", lambda value: None if isinstance(value, bool) else "is neither True nor False"
)
TEXT = Rule("a text", "{name} a text", lambda value: None if isinstance(value, str) else f"is {named(value)}")

# Of the file systems in use; the system itself answers a longer one with an error that names no option.
_MOST_PART_BYTES = 255
_MOST_BYTES = 4095


def _path_fault(value: Any) -> str | None:
    """Completes "folder=... " for a value that can't be a path; None for a path, whether or not it exists."""
    if not isinstance(value, str | os.PathLike):
        return f"is not a path but {named(value)}"
    text: Any = os.fspath(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if not isinstance(text, str):
        return "is not a path in text"
    if not text.strip() or "\0" in text:
        return "is not a path: it has a NUL character" if "\0" in text else "is not a path: it is empty"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        return "is not a path: it has characters that no file name has"
    if len(encoded) > _MOST_BYTES or max(map(len, encoded.split(b"/"))) > _MOST_PART_BYTES:
        return "is not a path: it is too long"
    return None


def _paths_fault(value: Any) -> str | None:
    if isinstance(value, str | os.PathLike) or not isinstance(value, Sequence):
        return _path_fault(value)  # pyright: ignore[reportUnknownArgumentType]
    return sequence_of(PATH).fault(value) if value else "is not a path: it is an empty list"


PATH = Rule("the path of a file or a folder", '{name}="runs/first"', _path_fault)
PATHS = Rule(
    "a safetensors file, a folder with such files, or a list of them", '{name}="model.safetensors"', _paths_fault
)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 4


def shown(value: object) -> str:
    """Any value in one short line."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # its class may raise anything, and a message about another fault must not fail by it
        text = "\n"
    return text if "\n" not in text else f"<{type(value).__qualname__}>"


def named(value: object) -> str:
    """What a value is, with an article."""
    if value is None:
        return "None"
    return f"the class {value.__qualname__}" if isinstance(value, type) else _with_article(type(value).__qualname__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiouAEIO' else 'a'} {name}"
