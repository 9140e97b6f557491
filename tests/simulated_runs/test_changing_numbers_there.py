"""Numbers that change at each step, on the simulated device: arguments are on the host, and buffers on the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.simulated_runs.on_device import DEVICE, host_copy, on_device, step_by_hand
from tests.training.parity import sgd, square
from tests.training.test_changing_numbers import COMPUTES, Given, Normed, X


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Normed(), Given(COMPUTES["function"]), Normed(), Given(COMPUTES["arithmetic"])])

    def forward(self, x: torch.Tensor, number: float, also: float) -> torch.Tensor:
        for part in self.parts:
            x = part(x, number, also) if isinstance(part, Given) else part(x)
        return x


@pytest.mark.parametrize("kernels", ["eager", "graphs"])
@pytest.mark.filterwarnings("ignore::megatrain.EagerKernelsWarning")
def test_numbers_that_change_have_one_capture_and_eagers_bits(kernels: str):
    torch.manual_seed(0)
    eager: Any = Both()
    streamed: Any = copy.deepcopy(eager)
    reference, own = sgd(eager), sgd(streamed)
    compiled = megatrain.compile(streamed, device=DEVICE, memory="1MiB", kernels=kernels)
    step = megatrain.TrainStep(compiled, own, loss=square)
    for number in (0.1, 0.2, 0.3, 0.4, 0.5):
        batches = [(x, number, number + 1) for x in on_device(X[:2])]
        wanted = step_by_hand(eager, reference, batches, square, None)
        assert torch.equal(step(batches).cpu(), wanted.cpu())
    step.flush()
    expected, found = host_copy([*eager.parameters(), *eager.buffers()]), [*streamed.parameters(), *streamed.buffers()]
    assert all(map(torch.equal, expected, found))
    assert compiled.megatrain.variant.number == 3
