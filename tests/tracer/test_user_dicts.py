"""Batches of classes derived from `UserDict`, such as a tokenizer's: containers like a dict, with eager's numbers."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import TraceError
from tests.comparing import assert_same


class Encodings:
    """What a tokenizer keeps of its texts."""


class Batch(UserDict[str, Any]):
    """As a tokenizer's: its entries are attributes as well, and it holds more than a dictionary does."""

    def __init__(self, data: Any = None, *, sequences: int | None = 1, encodings: Any = None) -> None:
        super().__init__(data)
        self._sequences = sequences
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def sequences(self) -> int | None:
        return self._sequences

    @property
    def encodings(self) -> Any:
        return self._encodings


class Pipeline(nn.Module):
    """A model of one argument, with a body that a test gives it."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.body = body

    def forward(self, batch: Any) -> Any:
        return self.body(self, batch)


def hidden(model: Any, batch: Any) -> torch.Tensor:
    return model.second(model.first(batch["x"]).relu() * batch.scale)


def changes(model: Any, batch: Any) -> Any:
    """As modules in a pipeline do."""
    batch["hidden"] = hidden(model, batch)
    batch.update({"sum": batch["hidden"].sum()})
    del batch["unused"]
    return batch


def new(model: Any, batch: Any) -> Any:
    return Batch({"hidden": hidden(model, batch)}, sequences=7)


def counts(model: Any, batch: Any) -> Any:
    return hidden(model, batch) * (3 if batch.sequences is None else batch.sequences)


def given(seed: int, **more: Any) -> Batch:
    made = {
        "x": torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)),
        "scale": 0.5,
        "unused": torch.ones(1),
    }
    return Batch(made, encodings=Encodings(), **more)


def sides(body: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = Pipeline(body)
    return eager, megatrain.compile(copy.deepcopy(eager), device="cpu", transfer="copy")


def gradients(model: Any, result: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    result.square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("body", "nested"), [(counts, True), (changes, False), (new, True)])
def test_a_user_dict_is_a_container_like_a_dict(body: Any, nested: bool) -> None:
    def outer(model: Any, batch: Any) -> Any:
        return body(model, batch["inner"][0])

    eager, compiled = sides(outer if nested else body)
    for seed in range(3):
        found: list[Any] = []
        for model in (eager, compiled):
            batch = given(seed)
            of = Batch({"inner": [batch]}) if nested else batch
            result = model(of)
            assert (result is batch) == (body is changes)
            value = result if isinstance(result, torch.Tensor) else result["hidden"]
            grads = gradients(model, value)
            keys = [] if isinstance(result, torch.Tensor) else list(result.data)
            kind = None if isinstance(result, torch.Tensor) else (type(result), result.sequences)
            same = batch.encodings if body is not new else None
            assert body is new or isinstance(same, Encodings)
            found.append((value.detach(), grads, keys, kind, list(batch.data)))
        assert_same(found[1], found[0])


def test_attributes_and_entries_that_never_change_are_compared() -> None:
    eager, compiled = sides(counts)
    for batch in (given(0), given(1, sequences=2), given(2, sequences=None), given(3), given(4) | {"scale": 2.0}):
        assert_same(compiled(batch).detach(), eager(batch).detach())


def reads_length(model: Any, batch: Any) -> Any:
    return hidden(model, batch) * len(batch.encodings)


def reads_item(model: Any, batch: Any) -> Any:
    return hidden(model, batch) * batch.encodings[0]


def asks_truth(model: Any, batch: Any) -> Any:
    return hidden(model, batch) if batch.encodings else batch["x"]


@pytest.mark.parametrize("body", [reads_length, reads_item, asks_truth])
def test_what_isnt_compared_between_calls_cant_be_read(body: Any) -> None:
    _, compiled = sides(body)
    with pytest.raises(TraceError, match=r"reads `Batch\._encodings` of its argument, which may change"):
        compiled(given(0))


def keeps_apart(model: Any, batch: Any) -> Any:
    batch["hidden"] = hidden(model, batch)
    return batch["hidden"]


def changes_an_attribute(model: Any, batch: Any) -> Any:
    batch._sequences = 5
    return changes(model, batch)


def sets_an_attribute(model: Any, batch: Any) -> Any:
    batch._encodings = Encodings()
    return changes(model, batch)


@pytest.mark.parametrize("body", [keeps_apart, changes_an_attribute, sets_an_attribute])
def test_other_changes_of_the_callers_object_are_refused(body: Any) -> None:
    _, compiled = sides(body)
    batch = given(0)
    with pytest.raises(TraceError, match="the model changes its argument"):
        compiled(batch)
    assert list(batch.data) == ["x", "scale", "unused"]
