"""Totals stay in memory that ranks share, and each rank changes them in a view of its own."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from megatrain.ranks.channels import LandingChannel
from megatrain.ranks.host import HostFile, can_tell_copies
from megatrain.tracer.spec import TensorSpec

pytestmark = pytest.mark.skipif(not can_tell_copies(), reason="the system has no such memory")
TRANSPOSED = TensorSpec.of(torch.empty(3, 5).T)
BLOCKS = [[TensorSpec((3,), torch.float32), TRANSPOSED], [], [TensorSpec((2, 2), torch.bfloat16)]]
OTHERS = [[TensorSpec((3000,), torch.float32)], [TensorSpec((2, 2), torch.bfloat16)]]


def nothing() -> None:
    """Nobody fails."""


class Ends:
    """One that gives and one that takes, as two processes would."""

    def __init__(self) -> None:
        file = HostFile.made()
        self.giver = LandingChannel(file, 0, 1, None, nothing)
        self.taker = LandingChannel(HostFile.opened(file.address), 0, 1, 0, nothing)

    def pass_on(self, block: int, value: float, blocks: list[list[TensorSpec]]) -> tuple[list[torch.Tensor], ...]:
        """Passes the tensors of a block, filled with a value; returns those that stay, on each side."""
        for end in (self.giver, self.taker):
            end.expect(blocks)
        kept: list[list[torch.Tensor]] = []
        with self.giver.give(block, nothing) as room:
            for tensor in room.tensors:
                tensor.fill_(value)
            room.present = [True] * len(room.tensors)
        with self.taker.take(block, nothing) as other:
            other.wait_for_all()
        for each in (room, other):
            assert each.kept is not None
            assert [*map(TensorSpec.of, each.kept)] == blocks[block]
            kept.append([*each.kept])
        return tuple(kept)


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [float(tensor.flatten()[0]) for tensor in tensors]


def test_totals_of_a_block_stay_while_those_of_others_come():
    ends = Ends()
    first = ends.pass_on(2, 1.0, BLOCKS)
    second = ends.pass_on(0, 2.0, BLOCKS)
    assert [values(each) for each in (*first, *second)] == [[1.0], [1.0], [2.0, 2.0], [2.0, 2.0]]
    assert [*map(values, ends.pass_on(2, 3.0, BLOCKS))] == [[3.0], [3.0]]
    assert [*map(values, second)] == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("side", [0, 1])
def test_what_one_rank_writes_is_its_own_until_the_next_total(side: int):
    ends = Ends()
    found = ends.pass_on(0, 1.0, BLOCKS)
    found[side][0].mul_(5)
    found[side][1].mul_(7)
    assert [values(found[side]), values(found[1 - side])] == [[5.0, 7.0], [1.0, 1.0]]
    again = ends.pass_on(0, 2.0, BLOCKS)
    assert [*map(values, again)] == [[2.0, 2.0], [2.0, 2.0]]


def test_a_model_that_is_cut_otherwise_has_rooms_of_its_own():
    ends = Ends()
    first = ends.pass_on(0, 1.0, BLOCKS)
    other = ends.pass_on(0, 2.0, OTHERS)
    assert [*map(values, first)] == [[1.0, 1.0], [1.0, 1.0]]
    back = ends.pass_on(0, 3.0, [*map(list, BLOCKS)])
    assert [*map(values, back), *map(values, first), *map(values, other)] == 2 * [[3.0, 3.0]] * 2 + [[2.0], [2.0]]


def test_who_takes_waits_for_who_gives():
    ends = Ends()
    for end in (ends.giver, ends.taker):
        end.expect(BLOCKS)
    found: list[float] = []

    def take() -> None:
        with ends.taker.take(0, nothing) as room:
            room.wait_for_all()
            assert room.kept is not None
            found.extend(values([*room.kept]))

    thread = Thread(target=take)
    thread.start()
    with ends.giver.give(0, nothing) as room:
        thread.join(0.05)
        assert thread.is_alive()
        for tensor in room.tensors:
            tensor.fill_(4.0)
        room.present = [True, True]
    thread.join()
    assert found == [4.0, 4.0]
