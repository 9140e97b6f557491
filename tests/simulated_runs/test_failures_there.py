"""A backward of the model itself that reads what its forward did not save is refused. Failures: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE
from tests.training.hazards import WIDTH


class Reversed(torch.autograd.Function):
    """Keeps a module for its backward, instead of the parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: torch.nn.Linear) -> torch.Tensor:
        ctx.module = module
        return module(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.nn.functional.linear(gradient, ctx.module.weight.t()), None


class Reversible(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.kept = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reversed.apply(self.stem(x), self.kept).sum()


@pytest.mark.filterwarnings("ignore:.*runs its own code:megatrain.OpaqueModelWarning")
def test_a_backward_that_reads_parameters_which_its_forward_did_not_save_is_refused(sim: Simulator):
    compiled = megatrain.compile(Reversible(), device=DEVICE, opaque="allow")
    loss = compiled(torch.ones(2, WIDTH, device=DEVICE))
    with pytest.raises(megatrain.ExecuteError, match="a backward that the model defines itself reads tensors of ano"):
        loss.backward()
