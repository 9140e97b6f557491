"""Results of attention that are kept or parked, on the simulated device: bits and memory, in any order of streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.scheduler.lifetimes.peak import find_peak
from tests.attention import EAGER_TO_KEEP, WIDTH, Stack, forwards, kernels_of_attention, text
from tests.comparing import assert_same
from tests.draws import is_wide
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, ORDERS, choose, step_by_hand
from tests.simulated_runs.test_capacity_there import held_bytes, loss_of, num_retries, plain
from tests.tiers import wide
from tests.training.parity import MODES, sgd

__all__ = ["plain"]
pytestmark = pytest.mark.usefixtures("short_texts")

MORE = 300_000


class Headed(Stack):
    """With a small last block, so that the memory is full at one that keeps results."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(*kinds)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


def step_of(model: Any, **options: Any) -> tuple[megatrain.CompiledModule, megatrain.TrainStep]:
    compiled = megatrain.compile(model, device=DEVICE, **options)
    return compiled, megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES["overlap"])


def batches(step: int, number: int) -> list[torch.Tensor]:
    return [text(10 * step + each) for each in range(number)]


def keeping(model: Any, number: int, more: int, **options: Any) -> tuple[megatrain.CompiledModule, megatrain.TrainStep]:
    _, frugal = step_of(copy.deepcopy(model), activations="recompute", **options)
    memory = frugal.prepare([each.to(DEVICE) for each in batches(0, number)]).device_bytes + more
    return step_of(model, memory=memory, hardware=EAGER_TO_KEEP, **options)


@dataclass
class Reference:
    """A model, and how it takes a step."""

    model: Headed
    take: Callable[[list[torch.Tensor]], object]


def reference_of(model: Headed, options: dict[str, Any]) -> Reference:
    """Eager PyTorch; of steps in tiles those that recompute all, for sums over tiles are others than eager's."""
    if options:
        return Reference(model, step_of(model, activations="recompute", **options)[1])
    optimizer = sgd(model)
    return Reference(model, lambda found: step_by_hand(model, optimizer, found, loss_of, None))


CASES = [("grouped", 3, MORE, {}), *map(wide, [
    ("causal", 1, MORE, {}), ("mask", 2, MORE, {}), ("causal", 3, 4 * MORE, {}),
    ("grouped", 2, MORE, {"chunking": "always"}),
])]  # fmt: skip


@pytest.mark.parametrize(("kind", "number", "more", "options"), CASES)
def test_steps_have_eager_bits_and_run_in_exactly_their_memory(
    sim: Simulator, plain: int, kind: str, number: int, more: int, options: dict[str, Any]
):
    model = Headed(*[kind] * 4)
    reference = reference_of(copy.deepcopy(model), options)
    compiled, step = keeping(model, number, more, **options)

    def taken(count: int) -> list[str]:
        torch.accelerator.reset_peak_memory_stats()
        with kernels_of_attention() as kernels:
            step([each.to(DEVICE) for each in batches(count, number)])
        torch.accelerator.synchronize()
        return kernels

    taken(0)
    taken(1)
    assert step.schedule.results
    peak = find_peak(step.schedule).op
    assert peak is not None
    assert peak.block in step.schedule.results
    sim.configure(capacity=plain + step.schedule.device_bytes)
    orders = ("early", *ORDERS) if is_wide() else ("early", "late", "seeded")
    recomputed = {0, 1, 2, 3}.difference(step.schedule.results, step.schedule.saves)
    for seed, order in enumerate(orders, start=2):
        choose(sim, order, compiled, seed)
        held_bytes()
        before = num_retries()
        assert forwards(taken(seed)) == number * (4 + len(recomputed)), order
        assert torch.accelerator.max_memory_reserved() <= plain + step.schedule.device_bytes, order
        assert num_retries() == before, order
    sim.configure(capacity=2**40)
    sim.order("early")
    for count in range(2 + len(orders)):
        reference.take([each.to(DEVICE) for each in batches(count, number)])
    assert_same(list(reference.model.parameters()), list(model.parameters()))
