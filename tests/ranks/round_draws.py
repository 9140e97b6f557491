"""What ranks do whose devices have dealt blocks of models that draw: functions that processes run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megatrain
from megatrain.runtime.drawing.draws import Draws
from megatrain.runtime.drawing.rank_draws import BlockDraws
from tests.ranks.failing import refused
from tests.ranks.rounds import ROUND
from tests.ranks.sides import Case, begin, state_of, take, train
from tests.training.parity import square, stack_batch

CASE = Case("dropping", "overlap", [(1, 1, 1), (2, 1, 3), (1, 2, 1)], compile=ROUND, draws=True)


def interrupted_steps(rank: int | None, group: Any) -> dict[str, Any]:
    """Between steps the user draws, calls the model in training mode, and evaluates it; a step is skipped."""
    torch.manual_seed(6 + (rank or 0))
    compiled, optimizer, step = begin(CASE, group, on_nonfinite="skip")
    found: dict[str, Any] = {"calls": [], "losses": []}
    for number in range(2):
        taken = take(CASE, rank, step, [number])
        found["losses"] += taken["losses"]
        with torch.no_grad():
            found["calls"].append(compiled(stack_batch(number, 2)))
            compiled.eval()
            found["calls"].append(compiled(stack_batch(number, 2)))
            compiled.train()
        found["calls"].append(torch.rand(3))
        bad = [stack_batch(number + place, 2) * (float("inf") if place == 1 else 1.0) for place in range(3)]
        step(bad if rank is None else bad[rank])
    assert step.progress.skipped == 2
    found |= state_of(compiled, optimizer, step)
    if rank:  # the numbers of its own generator
        for name in ("generator", "calls"):
            del found[name]
    return found


def interrupted_round(rank: int) -> dict[str, Any]:
    return interrupted_steps(rank, dist.group.WORLD)


# -- disturbed -----------------------------------------------------------------------------------------------


@contextmanager
def replaced(holder: type, name: str, other: Callable[..., Any]) -> Generator[None]:
    before = getattr(holder, name)
    setattr(holder, name, other)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _of_another_micro_batch(own: Callable[..., Any]) -> Callable[..., Any]:
    """The blocks of micro-batch 0 draw what those of micro-batch 2 draw: as many numbers, but others."""

    def generators(self: BlockDraws, device: Any) -> Any:
        return own(replace(self, blocks=[self.blocks[2], *self.blocks[1:]]), device)

    return generators


def _of_the_block_before(own: Callable[..., Any]) -> Callable[..., Any]:
    """Each block begins where the one before it on this device does."""

    def generators(self: BlockDraws, device: Any) -> Any:
        blocks = [
            {block: (each[max(0, block - 1)][0], ends) for block, (_, ends) in each.items()} for each in self.blocks
        ]
        return own(replace(self, blocks=blocks), device)

    return generators


WRONG = {"another micro-batch": _of_another_micro_batch, "the block before": _of_the_block_before}
SAME = Case("dropping", "overlap", [(2, 2, 2)], compile=ROUND, draws=True)


def wrong_round(rank: int, what: str) -> Any:
    """Blocks of all ranks begin at other states than those of one process."""
    with replaced(BlockDraws, "generators", WRONG[what](BlockDraws.generators)):
        try:
            return train(SAME, dist.group.WORLD, rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def differing_round(rank: int) -> tuple[list[str], int, list[torch.Tensor]]:
    """In the second step rank 1 draws ahead one number more than the others; another step follows."""
    torch.manual_seed(6 + rank)
    _, _, step = begin(CASE, dist.group.WORLD)
    own, texts, losses = Draws.ends, list[str](), list[torch.Tensor]()

    def with_one_more(self: Draws, device: Any) -> Any:
        torch.rand(())
        return own(self, device)

    for number, is_odd in ((0, False), (1, True), (1, False)):
        is_disturbed = replaced(Draws, "ends", with_one_more) if is_odd and rank == 1 else nullcontext()
        with is_disturbed:
            texts.append(refused(lambda number=number: losses.extend(take(CASE, rank, step, [number])["losses"])))
    return texts, step.progress.count, losses


class Counting(nn.Module):
    """How many numbers a layer of it draws depends on values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x = x + torch.poisson(20 * x.detach().square())
        return x


def counting_round(rank: int) -> list[str]:
    """A step of a model whose draws nobody knows ahead; then another."""
    torch.manual_seed(0)
    model = Counting()
    compiled = megatrain.compile(model, device="cpu", process_group=dist.group.WORLD, **ROUND)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square)
    return [refused(lambda: step(stack_batch(rank, 2))) for _ in range(2)]
