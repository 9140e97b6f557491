"""Segments: which memory torch's allocator is given, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Cpu
from megatrain.runtime.stores.segment_sizes import LEAST_BYTES, fitting, held_sizes, segment_sizes
from megatrain.runtime.stores.segments import Segments
from megatrain.scheduler.lifetimes.peak import find_peak
from megatrain.scheduler.schedule import Schedule

MIB = 1 << 20


class Card(Cpu):
    """Notes what is asked of it."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        super().__init__()
        self.capacity = capacity
        self.taken: list[int] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        if sum(self.taken) + nbytes > self.capacity:
            raise torch.OutOfMemoryError("full")
        self.taken.append(nbytes)
        return torch.empty(1, dtype=torch.uint8)

    def empty_cache(self) -> None:
        self.num_emptied += 1
        self.taken.clear()


def test_segments_are_made_once_and_stay_for_smaller_steps():
    card = Card()
    segments = Segments(card)
    segments.make([5, 4])
    segments.make([5, 4])
    segments.make([8])
    assert (card.num_emptied, card.taken) == (1, [5, 4])
    segments.make([8, 2])
    assert (card.num_emptied, card.taken) == (2, [8, 2])


def test_segments_are_made_again_after_the_cache_was_emptied():
    card = Card()
    segments = Segments(card)
    segments.make([5, 4])
    card.empty_cache()  # as after a step that ran out of memory
    segments.make([3])
    assert card.taken == [3]


def test_a_card_with_too_little_memory_gets_as_many_as_fit():
    card = Card(capacity=8)
    Segments(card).make([5, 4, 1])
    assert card.taken == [5]


def test_an_error_of_another_kind_passes():
    card = Card()
    card.allocate = lambda nbytes: [][nbytes]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(IndexError):
        Segments(card).make([5])


class Layers(nn.Module):
    """Values of 2 MiB, graphs with 8 MiB more, weights of 4 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)) for _ in "123")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_what_is_held_at_the_peak_is_listed_tensor_by_tensor(activations: str):
    model = Layers()
    compiled = megatrain.compile(model, activations=activations, transfer="copy")
    x = torch.randn(1024, 512)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = step.prepare([x, x])
    assert isinstance(schedule, Schedule)
    assert step.program is not None
    found = held_sizes(schedule, [step.program] * 2, find_peak(schedule).moment)
    assert found == sorted(found, reverse=True)
    assert min(found) > LEAST_BYTES
    assert 2 * MIB in found
    assert (8 * MIB in found) == (activations == "keep")
    # All that the schedule counts at its peak, but slots, small tensors, the caller's inputs and workspaces.
    assert sum(found) < schedule.device_bytes - schedule.arena_bytes
    every = segment_sizes(schedule, [step.program] * 2)
    # The hidden values of the layer at the peak and its gradient, beyond a retained graph.
    assert sum(every) >= sum(found) + 16 * MIB
    # Slots aren't among them; small temporary tensors of other ops are less.
    assert sum(every) < schedule.device_bytes


def test_equal_tensors_share_segments_without_a_rest():
    assert fitting([6 * MIB] * 5) == [12 * MIB, 12 * MIB, 6 * MIB]
    assert fitting([7 * MIB, 6 * MIB, 7 * MIB]) == [14 * MIB, 6 * MIB]
    assert fitting([12 * MIB] * 3) == [12 * MIB] * 3
    # Three of them are 20.1 MiB, of which a segment takes 22.
    assert fitting([int(6.7 * MIB)] * 5)[0] > 30 * MIB
    assert fitting([1187 * MIB] * 2) == [1187 * MIB] * 2
