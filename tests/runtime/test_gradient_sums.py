"""Sums of the gradients that several blocks have for one parameter: each once, in place, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatrain.device import HOST
from megatrain.runtime.gradients.sink import GradientSink
from megatrain.scheduler.instructions import Bytes


class Taker:
    """Takes whole gradients, and refuses the first ones."""

    def __init__(self, refusals: int = 0):
        self.refusals = refusals
        self.taken: list[tuple[str, torch.Tensor]] = []

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise RuntimeError("a hook fails")
        self.taken.append((key, gradient))


# Where gradients land; those without are adopted where they are.
COPIED = Bytes(0, 64)


def sink(take: Any) -> GradientSink:
    made = GradientSink(lambda _: nn.Parameter(torch.zeros(3)), HOST)
    made.begin(take)
    return made


def test_a_block_that_comes_again_is_not_added_again() -> None:
    take = Taker(refusals=2)
    sums = sink(take)
    sums.receive(1, ["tied", "other"], [(torch.ones(3), False), (torch.full((3,), 5.0), False)], [], COPIED)
    last = ([(torch.full((3,), 2.0), False), (torch.ones(3), False)], ["tied", "other"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a hook fails"):
            sums.receive(0, ["tied", "other"], *last, COPIED)
    sums.receive(0, ["tied", "other"], *last, COPIED)
    sums.receive(0, ["tied", "other"], *last, COPIED)  # and what was taken isn't taken again
    assert [(key, gradient.tolist()) for key, gradient in take.taken] == [("tied", [3.0] * 3), ("other", [6.0] * 3)]


def test_a_sum_takes_the_memory_of_its_first_term_and_leaves_what_others_hold() -> None:
    take = Taker()
    sums = sink(take)
    own, shared, added = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 4.0)
    sums.receive(1, ["own", "shared"], [(own, False), (shared, True)], [], None)
    sums.receive(0, ["own", "shared"], [(added, True), (added, True)], ["own", "shared"], None)
    (_, total), (_, other) = take.taken
    assert total.data_ptr() == own.data_ptr()
    assert (total.tolist(), other.tolist()) == ([5.0] * 3, [6.0] * 3)
    assert (shared.tolist(), added.tolist()) == ([2.0] * 3, [4.0] * 3)


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_sparse_and_dense_terms(first: str) -> None:
    take = Taker()
    sums = sink(take)
    terms = [torch.tensor([1.0, 0, 2]).to_sparse(), torch.ones(3)]
    for block, term in zip((1, 0), terms if first == "sparse" else terms[::-1], strict=True):
        sums.receive(block, ["w"], [(term, False)], ["w"] if block == 0 else [], COPIED)
    assert take.taken[0][1].tolist() == [2.0, 1.0, 3.0]
    assert terms[1].tolist() == [1.0] * 3


def test_a_new_backward_begins_without_what_a_failed_one_left() -> None:
    take = Taker()
    sums = sink(take)
    sums.receive(1, ["w"], [(torch.ones(3), False)], [], COPIED)
    sums.begin(take)
    for block in (1, 0):
        sums.receive(block, ["w"], [(torch.ones(3), False)], ["w"] if block == 0 else [], COPIED)
    assert take.taken[0][1].tolist() == [2.0] * 3
