"""Results of attention that are kept or parked, on the simulated device: bits and memory, in any order of streams."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import megatrain
from tests.attention import EAGER_TO_KEEP, Stack, forwards, kernels_of_attention, text
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


def step_of(model: Any, **options: Any) -> tuple[megatrain.CompiledModule, megatrain.TrainStep]:
    compiled = megatrain.compile(model, device=DEVICE, **options)
    return compiled, megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES["overlap"])


def batches(step: int, number: int) -> list[torch.Tensor]:
    return [text(10 * step + each) for each in range(number)]


def keeping(model: Any, number: int, more: int, **options: Any) -> tuple[megatrain.CompiledModule, megatrain.TrainStep]:
    _, frugal = step_of(copy.deepcopy(model), activations="recompute", **options)
    memory = frugal.prepare([each.to(DEVICE) for each in batches(0, number)]).device_bytes + more
    return step_of(model, memory=memory, hardware=EAGER_TO_KEEP, **options)


CASES = [("grouped", 3, MORE, {}), *map(wide, [
    ("causal", 1, MORE, {}), ("mask", 2, MORE, {}), ("causal", 3, 4 * MORE, {}),
    ("grouped", 2, MORE, {"chunking": "always"}),
])]  # fmt: skip


@pytest.mark.parametrize(("kind", "number", "more", "options"), CASES)
def test_steps_have_eager_bits_and_run_in_exactly_their_memory(
    sim: Simulator, plain: int, kind: str, number: int, more: int, options: dict[str, Any]
):
    model = Stack(*[kind] * 4)
    by_hand = copy.deepcopy(model)
    optimizer = sgd(by_hand)
    compiled, step = keeping(model, number, more, **options)

    def taken(count: int) -> list[str]:
        torch.accelerator.reset_peak_memory_stats()
        with kernels_of_attention() as kernels:
            step([each.to(DEVICE) for each in batches(count, number)])
        torch.accelerator.synchronize()
        return kernels

    for count in range(2):
        taken(count)
        step_by_hand(by_hand, optimizer, [each.to(DEVICE) for each in batches(count, number)], loss_of, None)
    assert step.schedule.results
    assert_same(list(by_hand.parameters()), list(model.parameters()))
    sim.configure(capacity=plain + step.schedule.device_bytes)
    orders = ("early", *ORDERS) if is_wide() else ("early", "late", "seeded")
    for seed, order in enumerate(orders):
        choose(sim, order, compiled, seed)
        held_bytes()
        before = num_retries()
        kernels = taken(seed + 2)
        kept = {*step.schedule.results, *step.schedule.saves}
        assert forwards(kernels) == number * (4 + 4 - len(kept)), order
        assert torch.accelerator.max_memory_reserved() <= plain + step.schedule.device_bytes, order
        assert num_retries() == before, order
    sim.configure(capacity=2**40)
    sim.order("early")
    for seed in range(len(orders)):
        step_by_hand(by_hand, optimizer, [e.to(DEVICE) for e in batches(seed + 2, number)], loss_of, None)
    assert_same(list(by_hand.parameters()), list(model.parameters()))
