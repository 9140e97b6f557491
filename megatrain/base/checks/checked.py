"""checked(): a decorator that refuses wrong options before a function does anything, by their rules or their types."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, get_type_hints

from megatrain.base.checks.rules import (
    FLAG,
    TEXT,
    WHOLE,
    Rule,
    either,
    function,
    instance_of,
    mapping_of,
    number,
    optional,
    sequence_of,
)

_Checked = TypeVar("_Checked", bound=Callable[..., Any])
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checked(**rules: Rule) -> Callable[[_Checked], _Checked]:
    """Checks the arguments of a function by its rules; an option without a rule is checked by its type.

    Only given arguments are checked, because defaults are right. Python itself refuses arguments that don't fit the
    signature; a name that is nearly right is named here. A dataclass is checked when an object of it is made.

    Args:
        rules: By the names of parameters, for limits that their types don't express.

    Raises:
        OptionError: From the decorated function; see `Rule.check`.

    >>> from megatrain.base.checks import count
    >>> @checked(micro_batches=count(1, 100))
    ... def plan(micro_batches: int, overlap: bool = True): ...
    >>> plan(0)
    Traceback (most recent call last):
    megatrain.errors.OptionError: micro_batches=0 is less than 1.
      micro_batches is a whole number from 1 to 100.
      Give micro_batches=1.
    """

    def decorate(target: _Checked) -> _Checked:
        if not isinstance(target, type):
            return cast(_Checked, _wrapped(target, target, rules))
        # A frozen class is still open: only its objects are closed.
        made: Any = target
        made.__init__ = _wrapped(made.__init__, made, rules)
        return made

    return decorate


def _wrapped(called: Callable[..., Any], annotated: Any, rules: Mapping[str, Rule]) -> Callable[..., Any]:
    options = _Options(called, annotated, rules)

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        options.check(args, kwargs)
        return called(*args, **kwargs)

    return call


class _Options:
    """The parameters of a function with their rules."""

    def __init__(self, called: Callable[..., Any], annotated: Any, rules: Mapping[str, Rule]):
        parameters = inspect.signature(called).parameters
        assert set(rules) <= set(parameters), f"{called.__qualname__} has no {set(rules) - set(parameters)}"
        self._annotated = annotated
        self._given = rules
        self._by_position = [name for name, p in parameters.items() if p.kind in _BY_POSITION]
        self._name = called.__qualname__.removesuffix(".__init__")
        self._is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._names = [name for name, p in parameters.items() if p.kind not in _VARIADIC]
        self._defaults = {name for name, p in parameters.items() if p.default is not p.empty}

    @functools.cached_property
    def _rules(self) -> dict[str, Rule]:
        """Made at the first call: annotations are texts, which may name what is defined further below."""
        hints = get_type_hints(self._annotated)
        found = {name: self._given.get(name) or _rule_of(hints.get(name, Any)) for name in self._names}
        return {name: rule for name, rule in found.items() if rule is not None}

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Checks the arguments of a call."""
        rules = self._rules
        unknown = next((name for name in kwargs if name not in self._names), None)
        if unknown is not None and not self._is_open and (near := difflib.get_close_matches(unknown, self._names, 2)):
            raise TypeError(f"{self._name}() has no argument {unknown!r}.\n  Did you mean {' or '.join(near)}?")
        for name, value in (*zip(self._by_position, args, strict=False), *kwargs.items()):
            rule = rules.get(name)
            # The rule's own test first: a call that is right costs little more than that.
            if rule is not None and rule.fault(value) is not None:
                rule.check(name, value, has_default=name in self._defaults)


_PLAIN: Mapping[Any, Rule] = {bool: FLAG, int: WHOLE, float: number(), str: TEXT}


def _rule_of(hint: Any) -> Rule | None:
    """The rule that follows from a type, such as `int | None`, `tuple[str, ...]` or a class; None if there is none."""
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return None
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(items)
    return instance_of(hint) if origin is None else _container(origin, items)


def _container(kind: Any, items: tuple[Any, ...]) -> Rule:
    is_exact = kind is type or (kind is tuple and items[-1] is not ...)
    assert not is_exact, f"{kind}{items} needs a rule of its own"
    if kind is collections.abc.Callable:
        return function(None if items[0] is ... else len(items[0]))
    if issubclass(kind, Mapping):
        return mapping_of(_rule_of(items[1]))
    if issubclass(kind, collections.abc.Sequence):
        return sequence_of(_rule_of(items[0]), (kind,), "a tuple" if kind is tuple else "a list")
    return instance_of(kind)


def _union(hints: tuple[Any, ...]) -> Rule | None:
    rules = [_rule_of(hint) for hint in hints if hint is not type(None)]
    if None in rules:
        return None
    known = cast(list[Rule], rules)
    rule = known[0] if len(known) == 1 else either(*known)
    return optional(rule) if type(None) in hints else rule
