"""Each value that the forward's Python code reads is read once per micro-batch: on an accelerator a read waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.tracer.expectations import Expectation
from megatrain.tracer.guards import Guard
from tests.models import Stack
from tests.tiers import diagonal
from tests.training.parity import MODES, adamw, square


class Reader(Stack):
    """Reads its input, and with `is_gated` a hidden state as well."""

    def __init__(self, is_gated: bool) -> None:
        super().__init__(3)
        self.is_gated = is_gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 100:
            return x
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if self.is_gated and x.isnan().any():
                return x
        return self.head(x)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> list[Any]:
    calls: list[Any] = []
    original: Callable[..., Any] = getattr(owner, method)

    def counting(self: Any, *args: Any) -> Any:
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(owner, method, counting)
    return calls


@pytest.mark.parametrize(("mode", "count"), diagonal(MODES, [1, 3]))
def test_guards_are_read_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch, mode: str, count: int) -> None:
    model = Reader(is_gated=False)
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    step = megatrain.TrainStep(compiled, adamw(model), loss=square, **MODES[mode])
    step([torch.ones(2, 3)] * count)
    reads = counted(monkeypatch, Guard, "holds")
    step([torch.ones(2, 3)] * count)
    assert len(reads) == count


def test_checks_in_the_graph_are_not_repeated_where_a_block_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reader(is_gated=True)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", activations="recompute", block_bytes=64)
    step = megatrain.TrainStep(compiled, adamw(model), loss=square)
    step(torch.ones(2, 3))
    assert str(compiled.program).count("check ") >= 1
    assert len(compiled.program.blocks) > 2
    checks = counted(monkeypatch, Expectation, "__call__")
    step(torch.ones(2, 3))
    assert len(checks) == 3


def test_a_capture_comes_after_the_updates_that_are_due() -> None:
    """The guards are read before these updates run."""

    class Chooses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.weight.sum() < 0 else 2 * super().forward(x)

    model = Chooses(2, 2)
    with torch.no_grad():
        model.weight.fill_(0.1)
    compiled = megatrain.compile(model, device="cpu")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=1.0), loss=square, max_grad_norm=1e9)
    step(torch.ones(2, 2))
    step(torch.ones(3, 2))
    assert step.schedule.kind.updates == "none", "they ran before the step, not in it"
    assert compiled.megatrain.recompiled_because == ()
