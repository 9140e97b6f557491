"""Heads are chunked where a step doesn't fit otherwise, in plans and in steps alike; the memory is as planned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.base.sizes import parse_bytes
from megatrain.errors import TooSmallError
from megatrain.passes.rewrites.head_loss import HeadLoss
from megatrain.planning import plan_step
from megatrain.scheduler.step_kind import StepKind

WORDS, WIDTH = 1000, 16


class Model(nn.Module):
    """A small language model whose logits are its largest tensor."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        logits = self.head(hidden).float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.view(-1)), "logits": logits}


def batch(step: int, length: int = 400, words: int = WORDS) -> dict[str, torch.Tensor]:
    ids = torch.randint(words, (2, length), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids.roll(-1)}


def rows_of(program: Any) -> list[int]:
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    return [node.target.head.rows for node in nodes if isinstance(node.target, HeadLoss)]


def step_of(model: nn.Module, *, clip: float | None = None, spread: bool = False, **options: Any) -> Any:
    compiled = megatrain.compile(model, device="cpu", **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    return megatrain.TrainStep(compiled, optimizer, max_grad_norm=clip, spread=spread)


# Plain logits take 3.2 MB a time; 256 rows of them 1 MB, 64 rows 0.26 MB.
BUDGETS = {"20MiB": [], "5MiB": [256], "1MiB": [64]}
FEW = 64
"""Words, for what is tried with blocks of any size: in the smallest of them each row of a table is a part."""


@pytest.mark.parametrize("memory", BUDGETS)
def test_as_little_is_chunked_as_fits(memory: str):
    """In a step as in its plan."""
    step = step_of(Model(), memory=memory, spread=True)
    schedule = step.prepare(batch(0))
    assert rows_of(step.program) == BUDGETS[memory]
    plan = megatrain.plan(Model(), example_kwargs=batch(0), device_memory=memory, optimizer="AdamW")
    assert plan.fits
    assert str(schedule) == str(plan.schedule)
    line = f"chunked: logits of {BUDGETS[memory][0]} of 800 rows at a time" if BUDGETS[memory] else "chunked"
    assert (line in str(plan)) == bool(BUDGETS[memory])
    assert step.program.blocks[-1].name == "head"
    for number in range(2):
        step(batch(number))
    step.flush()
    meter = step._compiled.peak_bytes
    assert meter <= schedule.device_bytes <= parse_bytes(memory)


@pytest.mark.parametrize(
    ("memory", "clip", "spread"), [("5MiB", None, False), ("1200KiB", 0.1, False), ("1200KiB", None, True)]
)
def test_chunked_steps_train_as_the_loop_does(memory: str, clip: float | None, spread: bool):
    """The first loss has the loop's bits; later ones follow weights whose gradients were sums in another order."""
    model = Model()
    loop = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(loop.parameters(), lr=0.01)
    step = step_of(model, memory=memory, clip=clip, spread=spread)
    for number in range(4):
        batches = [batch(number), batch(number + 10)]
        losses = [loop(**each)["loss"] / 2 for each in batches]
        for loss in losses:
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(loop.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found = step(batches)
        # The sum of 800 rows in another order: 800 eps at most, and Adam's quotient of near-zero gradients.
        torch.testing.assert_close(
            found, sum(loss.detach() for loss in losses), rtol=0 if number == 0 else 1e-5, atol=0
        )
    step.flush()
    for one, other in zip(loop.parameters(), model.parameters(), strict=True):
        assert (one - other).detach().abs().mean() < 1e-6


@pytest.mark.usefixtures("no_smaller_blocks")
def test_never_is_refused_and_always_needs_no_budget():
    with pytest.raises(TooSmallError, match="block 4"):
        step_of(Model(), memory="5MiB", chunking="never").prepare(batch(0))
    step = step_of(Model(), chunking="always")
    step.prepare(batch(0))
    assert rows_of(step.program) == [256]
    step = step_of(Model(), memory="1MiB", chunking="always")
    step.prepare(batch(0))
    assert rows_of(step.program) == [64]


def test_an_error_names_the_least_that_would_do(monkeypatch: pytest.MonkeyPatch):
    """Sums over chunks in fp32 may take more than the logits that they save: another level needs the least then."""
    compiled = step_of(Model(FEW))._compiled
    variant = compiled.prepare(**batch(0, words=FEW))
    _, programs = variant.for_step(is_own_loss=True)
    assert len(programs.in_own_blocks) == 4
    needs = iter([300, 100, 200, 400, 500])  # the last of the smallest blocks

    def refuse(*_: Any, **options: Any) -> Any:
        raise TooSmallError("too small", next(needs), ("a larger memory", "a smaller batch"))

    monkeypatch.setattr(plan_step, "scheduled", refuse)
    with pytest.raises(TooSmallError) as error:
        plan_step.plan_step([programs, programs], StepKind(micro_batches=2), compiled.options)
    assert error.value.least_bytes == 100
    assert next(needs, None) is None
