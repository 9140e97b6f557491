"""A step that fails on the device ends where it began, or at its own end; then all goes on to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, choose, host_copy, on_device
from tests.training.hazards import WIDTH
from tests.training.parity import MODES, TASKS, adamw, generator_of

TASK = TASKS["hazardous"]  # with dropout: random numbers must repeat as well


class Side:
    """A model and its steps, whose batches follow from their number."""

    def __init__(self, mode: str, kernels: str = "eager") -> None:
        self.model = TASK.build()
        self.compiled = megatrain.compile(self.model, device=DEVICE, activations="offload", kernels=kernels)
        self.optimizer = adamw(self.model)
        self.step = megatrain.TrainStep(self.compiled, self.optimizer, loss=TASK.loss, **MODES[mode])
        self.number = 0

    def batch(self) -> list[Any]:
        draw = generator_of(self.number)
        return on_device([torch.randn(size, WIDTH, generator=draw) for size in (2, 3)])

    def take(self) -> None:
        torch.manual_seed(self.number)
        self.step(self.batch())
        self.number += 1

    def fail(self) -> None:
        """Takes a step that fails, and counts it if it was completed."""
        torch.manual_seed(self.number)
        with pytest.raises(Exception, match="chaos made") as caught:
            self.step(self.batch())
        self.number += any("was completed" in note for note in getattr(caught.value, "__notes__", ()))

    def state(self) -> list[torch.Tensor]:
        self.step.flush()
        moments = [self.optimizer.state[p][name] for p in self.model.parameters() for name in ("exp_avg", "exp_avg_sq")]
        return host_copy([*self.model.parameters(), *moments])


@pytest.mark.parametrize(
    ("mode", "kernels", "is_long"),
    [
        ("deferred", "eager", False),
        *(pytest.param(mode, "eager", True, marks=pytest.mark.nightly) for mode in ("spread", "deferred")),
        pytest.param("deferred", "graphs", True, marks=pytest.mark.nightly),
    ],
)
def test_a_failure_of_any_kind_of_op_leaves_the_bits_of_an_undisturbed_run(
    sim: Simulator, mode: str, kernels: str, is_long: bool
):
    undisturbed, side = Side(mode), Side(mode, kernels)
    for one in (undisturbed, side):
        for _ in range(2):
            one.take()
    # Of each stream the last, or of each of its letters.
    ops = side.step.schedule.positions()
    kinds = {(p.stream, op.what if is_long else ""): f"{p.stream}:{op}" for p, op in ops}
    engine = side.compiled.megatrain.engine
    for seed, token in enumerate(sorted(kinds.values())):
        choose(sim, ("late", "seeded")[seed % 2], side.compiled, seed)
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        side.fail()
        engine.set_chaos(None)
        side.take()
        sim.order("early")
        while undisturbed.number < side.number:
            undisturbed.take()
        assert_same(undisturbed.state(), side.state(), token)
        for one in (undisturbed, side):
            one.take()  # so that a deferred step has updates to take
    assert sim.violations() == []


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
