"""Rules that follow from types: `int | None`, `tuple[str, ...]`, `Callable[[Any], Tensor]`, or a class."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatrain.checks.rules import (
    FLAG,
    TEXT,
    Rule,
    either,
    function,
    instance_of,
    mapping_of,
    named,
    number,
    optional,
    sequence_of,
)

_WHOLE = Rule(
    "a whole number",
    "{name}=1",
    lambda value: None if isinstance(value, int) and not isinstance(value, bool) else "is not a whole number",
)
_PLAIN: Mapping[Any, Rule] = {
    bool: FLAG,
    int: _WHOLE,
    float: number(),
    str: TEXT,
    type(None): Rule("None", "{name}=None", lambda value: None if value is None else f"is {named(value)}"),
}
_UNIONS = (typing.Union, types.UnionType)


def rule_of(hint: Any) -> Rule | None:
    """Returns the rule that follows from a type; None if there is none."""
    if hint in (Any, object) or isinstance(hint, typing.TypeVar):
        return None
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return _union(items)
    return instance_of(hint) if origin is None else _container(origin, items, hint)


def _container(kind: Any, items: tuple[Any, ...], hint: Any) -> Rule:
    if kind is type:
        return _class_of(items[0])
    if kind is tuple:
        return _tuple(items)
    if kind is collections.abc.Callable:
        return function(None if items[0] is ... else len(items[0]))
    assert isinstance(kind, type), f"{hint} needs a rule of its own"
    if issubclass(kind, collections.abc.Mapping):
        return mapping_of(rule_of(items[1]), rule_of(items[0]))
    return sequence_of(rule_of(items[0]), (kind,)) if issubclass(kind, collections.abc.Sequence) else instance_of(kind)


def _union(hints: tuple[Any, ...]) -> Rule | None:
    rules = [rule_of(hint) for hint in hints if hint is not type(None)]
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None
    rule = known[0] if len(known) == 1 else either(*known)
    return optional(rule) if type(None) in hints else rule


def _class_of(base: type) -> Rule:
    def fault(value: Any) -> str | None:
        return None if isinstance(value, type) and issubclass(value, base) else f"is {named(value)}"

    return Rule(f"a subclass of {base.__qualname__}", f"{{name}}={base.__qualname__}", fault)


def _tuple(hints: tuple[Any, ...]) -> Rule:
    if len(hints) == 2 and hints[1] is ...:
        return sequence_of(rule_of(hints[0]), (tuple,), "a tuple")
    rules = [rule_of(hint) for hint in hints]

    def fault(value: Any) -> str | None:
        if not isinstance(value, tuple) or len(value) != len(rules):  # pyright: ignore[reportUnknownArgumentType]
            return f"is {named(value)}"  # pyright: ignore[reportUnknownArgumentType]
        parts = zip(rules, value, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return next((found for rule, part in parts if rule is not None and (found := rule.fault(part))), None)

    texts = ["anything" if rule is None else rule.text for rule in rules]
    return Rule(f"a tuple of {', '.join(texts)}", "{name} such a tuple", fault)
