"""What a rule refuses and says, and that a decorated function keeps its signature and its meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatrain.base.checks import (
    FLAG,
    PATH,
    PATHS,
    Rule,
    checked,
    count,
    function,
    instance_of,
    mapping_of,
    number,
    one_of,
    optional,
    sequence_of,
)
from megatrain.base.sizes import SIZE
from megatrain.errors import OptionError

NAN, INF = float("nan"), float("inf")
JUNK: list[Any] = [None, object(), b"", {1: 2}, {3}, int, lambda: 0]


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (one_of("a", "b"), ["a", "b"], ["c", "", "\0", 0, *JUNK]),
        (count(), [0, 1, 10**30], [-1, True, 1.0, NAN, "1", *JUNK]),
        (count(1, 5), [1, 5], [0, 6, 10**30, False]),
        (number(), [0, -1.5, INF], [NAN, True, "1", 1j, *JUNK]),
        (number(above=0), [1e-9, INF], [0, -1, NAN]),
        (number(least=0, below=INF), [0, 10**30], [-1e-9, NAN]),
        (number(least=0, below=60), [0, 59], [60, INF]),
        (FLAG, [True, False], [0, 1, "yes", *JUNK]),
        (SIZE, [1, 2.0, "1KiB", 2**63 - 1], [0, -1, True, 1.5, NAN, INF, "", "9" * 5000, 2**63, *JUNK]),
        (function(2), [lambda a, b: 0, lambda *a: 0, print], [lambda a: 0, 3, None]),
        (function(), [lambda a: 0, int], [3, None, "f"]),
        (instance_of(Path), [Path("a")], [Path, "a", None]),
        (optional(count(1)), [None, 1], [0, "1"]),
        (sequence_of(count()), [[], (1, 2)], ["12", {1}, [-1], 3, None]),
        (sequence_of(kinds=(tuple, list)), [(), [object()]], ["", {1}, {}, 0, None]),
        (mapping_of(), [{}, {"a": object()}], [{1: 2}, [], "a", 0, None]),
        (mapping_of(count()), [{"a": 1}], [{"a": -1}, {1: 1}]),
        (PATH, ["a/b", Path("a")], ["", " ", "\0", "x" * 300, "x/" * 3000, "\ud800", 3, b"a", ["a"], None]),
        (PATHS, ["a", ["a", Path("b")], ("a",)], ["", [], ["a", 3], ["\0"], 3, {"a": "b"}, {"a"}, None]),
    ],
)
def test_a_rule_refuses_what_breaks_it_and_nothing_else(rule: Rule, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        rule.check("it", value)
    for value in wrong:
        with pytest.raises(OptionError) as caught:
            rule.check("it", value)
        what, said, way = str(caught.value).split("\n")
        assert what.startswith(("it=", "it is None"))
        assert what.endswith(".")
        assert said.startswith("  it is ")
        assert way.startswith("  Give ")


@checked(choice=one_of("a", "b"))
def called(
    model: Path,
    *args: Any,
    choice: str = "a",
    names: Sequence[str] = (),
    pairs: tuple[tuple[str, ...], ...] = (),
    by_name: Mapping[str, int] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    rate: float = 0.5,
    any_: Any = None,
    **rest: Any,
) -> tuple[Any, ...]:
    """Its own text."""
    return args


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choice": "c"}, 'choice=\'c\' is not known.\n  choice is "a" or "b".\n  Give choice="a", or leave it out.'),
        ({"names": "abc"}, "names='abc' is a str."),
        ({"pairs": (("a", 1),)}, "pairs=(('a', 1),) has item 0, ('a', 1), which has item 1, 1, which is an int."),
        ({"pairs": [("a",)]}, "pairs=[('a',)] is a list."),
        ({"names": [1]}, "names=[1] has item 0, 1, which is an int."),
        ({"by_name": {"a": "b"}}, "by_name={'a': 'b'} has at 'a' 'b', which is not a whole number."),
        ({"loss": lambda x: x}, "loss=<function "),
        ({"rate": NAN}, "rate=nan is not a number."),
        ({"rate": True}, "rate=True is not a number."),
    ],
)
def test_options_are_checked_by_their_rule_or_their_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        called(Path(), **options)
    assert message in str(caught.value)


def test_what_is_right_passes_through_unchanged() -> None:
    options: dict[str, Any] = {"choice": "b", "names": ["a"], "pairs": (("a", "b"),), "by_name": {}}
    assert called(Path(), 1, None, **options, loss=max, rate=1, any_=object(), other=3) == (1, None)
    assert called(Path(), loss=None) == ()


def test_a_decorated_function_keeps_its_signature_and_text() -> None:
    parameters = inspect.signature(called).parameters
    assert list(parameters) == [
        *("model", "args", "choice", "names", "pairs", "by_name", "loss", "rate", "any_", "rest")
    ]
    assert parameters["choice"].default == "a"
    assert called.__doc__ == "Its own text."
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        called()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@checked(size=count(1))
@dataclass(frozen=True, slots=True)
class Made:
    size: int
    later: Later | None = None


class Later:
    pass


def test_a_class_is_checked_where_it_is_made() -> None:
    assert Made(1, Later()).size == 1
    assert list(inspect.signature(Made).parameters) == ["size", "later"]
    for wrong in ((0,), (1, 2), (1, Later)):
        with pytest.raises(OptionError):
            Made(*wrong)  # pyright: ignore[reportArgumentType]


def test_what_is_nearly_right_is_named():
    rule = optional(one_of("auto", "recompute", "keep"))
    with pytest.raises(OptionError, match=r'Give activations="recompute"\.$'):
        rule.check("activations", "recompue")
    with pytest.raises(OptionError, match=r'Give activations="auto"\.$'):
        rule.check("activations", "something else")

    @checked()
    def plan(*, memory: int = 1) -> int:
        return memory

    with pytest.raises(TypeError, match=r"plan\(\) has no argument 'memroy'\.\n  Did you mean memory\?"):
        plan(memroy=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="unexpected keyword argument 'else_'"):
        plan(else_=1)  # pyright: ignore[reportCallIssue]
