"""Random numbers from a state that torch doesn't show: no second run repeats them, so none takes place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.tracer.recording import effect_watch


@pytest.fixture(autouse=True)
def _hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes dropout's kernel on the CPU for one of a library with a generator of its own."""
    monkeypatch.setattr(effect_watch, "_RNNS", ("aten::native_dropout",))
    monkeypatch.setattr(effect_watch, "_has_dropout", lambda func, args: True)


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.native_dropout(layer(x), 0.5, True)[0]
        return x.sum()


def compiled(activations: str) -> megatrain.CompiledModule:
    return megatrain.compile(Random(), device="cpu", transfer="copy", activations=activations)


def test_a_block_that_would_be_recomputed_is_refused_ahead():
    with pytest.raises(megatrain.ExecuteError, match=r"block 0 layers\.0\S*, which is recomputed, has an RNN with dro"):
        compiled("recompute")(torch.ones(2, 4))


def test_a_kept_graph_trains():
    model = compiled("keep")
    model(torch.ones(2, 4)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_forward_alone_runs():
    with torch.no_grad():
        compiled("recompute")(torch.ones(2, 4))


def test_several_micro_batches_are_refused():
    model = compiled("keep")
    step = megatrain.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda result, batch: result)
    step([torch.ones(2, 4)])
    with pytest.raises(megatrain.DrawsError, match="an RNN with dropout, whose random numbers come from a state insi"):
        step([torch.ones(2, 4), torch.ones(2, 4)])


def taken(step: megatrain.TrainStep, number: int) -> None:
    torch.manual_seed(number)
    step([torch.full((2, 4), 1.0 + number)])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_that_fails_before_it_has_begun_leaves_a_step_boundary(overlap: bool):
    """Undone; or completed from the graphs that are still there, where an update had begun. Never recomputed."""
    torch.manual_seed(0)
    start = Random().state_dict()
    sides: list[tuple[megatrain.CompiledModule, megatrain.TrainStep]] = []
    for _ in range(2):
        model = compiled("keep")
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sides.append((model, megatrain.TrainStep(model, optimizer, loss=lambda result, batch: result, overlap=overlap)))
    (model, step), (undisturbed, other) = sides
    for each in (step, other):
        taken(each, 1)
    op = next(op for op in step.schedule.ops if op.what == "B" and op.block == 1)
    model.megatrain.engine.set_chaos(Chaos(fail=f"compute:{op}", max_delay_s=0))
    with pytest.raises(RuntimeError, match="chaos made"):
        taken(step, 2)
    model.megatrain.engine.set_chaos(None)
    step.flush()
    assert step.progress.count in ((1, 2) if overlap else (1,))
    if step.progress.count == 1:
        taken(step, 2)
    taken(other, 2)
    for one, two in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(one, two)
