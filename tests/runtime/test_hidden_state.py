"""Where Python state hides: slots, tuples, arrays, functions. A change there is seen, and a counter counts."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import UnwatchedWarning

SETTINGS = {"scale": 1.0}


class Slotted:
    __slots__ = ("__hidden", "held")

    def __init__(self, held: Any) -> None:
        self.held = held
        self.__hidden = 1.0

    def hidden(self) -> float:
        return self.__hidden

    def raise_hidden(self) -> None:
        self.__hidden += 1.0


class Table(collections.OrderedDict[str, float]):
    """A dictionary that has attributes too."""


class Scaler:
    def __init__(self) -> None:
        self.held = 1.0

    def scale(self) -> float:
        return self.held

    def count(self) -> float:
        self.held += 1.0
        return self.held

    def by_settings(self) -> float:
        return SETTINGS["scale"]


class Scaled(nn.Module):
    """Multiplies by what `read` finds in `held`."""

    def __init__(self, make: Callable[[], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))
        self.held = make()
        self._read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * float(self._read(self.held))


def _function() -> Any:
    def make() -> float:
        return scale.held

    scale: Any = make
    scale.held = 1.0
    return scale


def _with_default() -> Any:
    def scale(held: list[float] = [1.0]) -> float:  # noqa: B006  # that it is kept from call to call is the point
        return held[0]

    return scale


def _add(container: Any, label: Any) -> None:
    container[label] = container[label] + 1


def _raise(value: Any, name: str = "held") -> None:
    setattr(value, name, getattr(value, name) + 1.0)


def _table() -> Any:
    table: Any = Table()
    table.held = 1.0
    return table


# What is held, how the forward reads it, how it is changed between two calls.
READS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]] = {
    "a slot": (lambda: Slotted(1.0), lambda h: h.held, _raise),
    "a private slot": (lambda: Slotted(1.0), lambda h: h.hidden(), lambda h: h.raise_hidden()),
    "an attribute of a dictionary": (_table, lambda h: h.held, _raise),
    "an array of objects": (lambda: np.array([1.0, "x"], dtype=object), lambda h: h[0], lambda h: _add(h, 0)),
    "an attribute of a function": (_function, lambda h: h(), _raise),
    "a default": (_with_default, lambda h: h(), lambda h: _add(h.__defaults__[0], 0)),
    "a bound argument": (
        lambda: functools.partial(lambda held: held["k"], held={"k": 1.0}), lambda h: h(),
        lambda h: _add(h.keywords["held"], "k"),
    ),
    "the object of a method": (lambda: Scaler().scale, lambda h: h(), lambda h: _raise(h.__self__)),
    "a global of a function in a list": (
        lambda: [lambda: SETTINGS["scale"]], lambda h: h[0](), lambda _: _add(SETTINGS, "scale")
    ),
    "a global of an object in a list": (
        lambda: {"k": [Scaler()]}, lambda h: h["k"][0].by_settings(), lambda _: _add(SETTINGS, "scale")
    ),
}  # fmt: skip

# What is held, and how the forward counts in it.
COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a slot": (lambda: Slotted(1.0), lambda h: _counted(h)),
    "a list in a tuple": (lambda: ([1.0],), lambda h: _add(h[0], 0) or h[0][0]),
    "an attribute of a dictionary": (_table, lambda h: _counted(h)),
    "an array": (lambda: np.zeros(2), lambda h: _add(h, 0) or h[0]),
    "an attribute of a function": (_function, lambda h: _counted(h)),
    "a default": (_with_default, lambda h: _add(h.__defaults__[0], 0) or h()),
    "the object of a method": (lambda: Scaler().count, lambda h: h()),
}


def _counted(value: Any) -> float:
    _raise(value)
    return value.held


def _assert_same_calls(model: nn.Module, eager: nn.Module, edit: Callable[[Any], None]) -> None:
    """Compares two calls before an edit, after which the quick comparison is in place, with two after it."""
    compiled, x = megatrain.compile(model, device="cpu", opaque="allow"), torch.linspace(-1, 1, 4)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(compiled(x), eager(x))
        edit(model)
        edit(eager)
    assert torch.equal(compiled(x), eager(x))


@pytest.mark.parametrize("what", READS)
def test_a_change_of_hidden_state_is_seen(what: str, monkeypatch: pytest.MonkeyPatch):
    make, read, change = READS[what]
    monkeypatch.setitem(SETTINGS, "scale", 1.0)
    _assert_same_calls(Scaled(make, read), Scaled(make, read), lambda model: change(model.held))


@pytest.mark.filterwarnings("ignore::megatrain.errors.ManyCapturesWarning")
@pytest.mark.parametrize("what", COUNTERS)
def test_a_counter_in_hidden_state_counts(what: str):
    make, count = COUNTERS[what]
    _assert_same_calls(Scaled(make, count), Scaled(make, count), lambda _: None)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def _exchange_names(model: nn.Module) -> None:
    first, last = model.first, model.last
    del model.first, model.last
    model.last, model.first = first, last  # the registry holds the same modules in the same order


def _exchange_registry(model: nn.Module) -> None:
    vars(model)["_modules"] = {"first": model.last, "last": model.first}


def test_modules_that_exchange_their_names_are_seen():
    for edit in (_exchange_names, _exchange_registry):
        model, eager = Chain(), Chain()
        eager.load_state_dict(model.state_dict())
        _assert_same_calls(model, eager, edit)


def test_what_is_not_watched_is_listed():
    model = Scaled(lambda: {"many": [1.0] * 5000, "counts": itertools.count(1)}, lambda h: h["many"][0])
    compiled = megatrain.compile(model, device="cpu")
    with pytest.warns(UnwatchedWarning, match=r"an iterator, `model\.held\['counts'\]`"):
        compiled(torch.ones(4))
    last = compiled.megatrain.guards.splitlines()[-1]
    assert last == "not watched inside: model.held['many'] (a list of 5000), model.held['counts'] (a count)"
