"""TrainStep.time: a step as ever, with the moments at which its operations began and ended."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Cpu
from megatrain.errors import ExecuteError
from tests.training.parity import MODES, TELLING_MODES


def stepping(mode: str, model: nn.Module) -> megatrain.TrainStep:
    compiled = megatrain.compile(model, device="cpu", transfer="copy", activations="offload")
    optimizer = torch.optim.AdamW(model.parameters())
    return megatrain.TrainStep(compiled, optimizer, loss=lambda y, x: (y - x).square().mean(), **MODES[mode])


@pytest.mark.parametrize("mode", TELLING_MODES)
def test_a_timed_step_has_the_bits_of_a_step_and_the_order_of_its_table(mode: str):
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))
    timed = copy.deepcopy(plain)
    steps = stepping(mode, plain), stepping(mode, timed)
    for number in range(3):
        batch = list(torch.randn(2, 4, 8))
        torch.manual_seed(number)
        steps[0](batch)
        torch.manual_seed(number)
        run = steps[1].time(batch)
        assert run.schedule == steps[1].schedule
        ends = {timing.position: timing.end_s for timing in run.timeline}
        begins = {timing.position: timing.start_s for timing in run.timeline}
        assert min(begins.values()) == 0
        for position, waits in steps[1].schedule.waits().items():
            assert all(ends[wait] <= begins[position] for wait in waits), position
        assert steps[1].schedule.simulate(run.measured()).step_s > 0
    for step in steps:
        step.flush()
    for (name, one), (_, other) in zip(plain.named_parameters(), timed.named_parameters(), strict=True):
        assert torch.equal(one, other), name


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = self.more(x)
        return self.last(x)


def test_an_attempt_that_failed_leaves_no_times():
    """The branch is known in the middle of the step, which then begins anew with another table."""
    model = Branch()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(8))
    compiled = megatrain.compile(model, device="cpu", transfer="copy", block_bytes=1)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda y, _: y.sum())
    step(torch.ones(2, 8) * 9)
    tables = [step.schedule]
    run = step.time(-9 * torch.ones(2, 8))
    tables.append(step.schedule)
    assert tables[0].num_blocks == tables[1].num_blocks + 1
    assert run.schedule == tables[1]
    measured = step.measure(9 * torch.ones(2, 8))
    assert measured.num_blocks == tables[0].num_blocks


def test_a_device_whose_events_tell_no_time_is_refused_before_the_step():
    class Timeless(Cpu):
        def moment(self) -> Any:
            raise RuntimeError("no clock")

    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    compiled = megatrain.compile(model, device=Timeless())
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=1.0), loss=lambda y, _: y.sum())
    with pytest.raises(ExecuteError, match=r"^events of cpu don't measure time: no clock\n.*\n  Use step.measure"):
        step.time(torch.ones(2, 4))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert step.progress.count == 0
