"""Plans that keep results of attention: they say so, fit the host, and are taken by a training step as they are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ScheduleError
from megatrain.planning.planned_step import SavedPlan
from tests.attention import EAGER_TO_KEEP, Layers, forwards, kernels_of_attention, text

pytestmark = pytest.mark.usefixtures("short_texts")

MORE = 300_000
ASKED: dict[str, Any] = {"hardware": EAGER_TO_KEEP, "optimizer": "SGD", "device": "cpu"}


def planned(**options: Any) -> megatrain.Plan:
    return megatrain.plan(Layers(), text(), **{**ASKED, **options})


@functools.cache
def frugal() -> megatrain.Plan:
    return planned(activations="recompute")


@functools.cache
def keeping() -> megatrain.Plan:
    return planned(device_memory=frugal().schedule.device_bytes + MORE)


def test_a_plan_says_what_is_kept_with_its_bytes_and_seconds():
    plan = keeping()
    (line,) = [line.strip() for line in str(plan).splitlines() if line.startswith("  results: ")]
    # Of three blocks 136 KiB each; two products of a causal triangle, at 10**9 FLOP/s.
    assert line == (
        "results: of attention in blocks 0-2 kept instead of computed again, 408.00 KiB, of which 136.00 KiB parked, "
        "202 ms of compute less"
    )
    assert (
        "Of 3 blocks the results of attention are kept (408.00 KiB, of which 136.00 KiB are parked on the host), so "
        "that attention isn't recomputed: that spares 202 ms of compute a step, and they cross in "
    ) in plan.why()
    assert "results: " not in str(frugal())


def test_a_plan_with_results_is_shorter_than_the_one_that_recomputes():
    assert keeping().schedule.results == (0, 1, 2)
    assert keeping().simulation is not None
    assert frugal().simulation is not None
    spared = frugal().simulation.step_s - keeping().simulation.step_s  # pyright: ignore[reportOptionalMemberAccess]
    assert spared == pytest.approx(0.2, rel=0.05)


def test_results_are_not_parked_where_the_host_has_no_room():
    device_memory, host_memory = (b + MORE for b in (frugal().schedule.device_bytes, frugal().host.total_bytes))
    plan = planned(device_memory=device_memory, host_memory=host_memory)
    assert plan.fits
    assert plan.schedule.park_bytes == 0


def test_a_training_step_takes_a_plan_with_results():
    plan = keeping()
    saved = SavedPlan.from_json(plan.saved().to_json())
    assert saved == plan.saved()
    assert "results kept: 0-2 -> none" in plan.diff(planned(device_memory="1GiB", activations="recompute"))
    model = Layers()
    compiled = megatrain.compile(model, device="cpu", memory="1GiB")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), plan=saved)
    step(text())
    with kernels_of_attention() as kernels:
        step(text(1))
    assert step.schedule.results == (0, 1, 2)
    assert forwards(kernels) == 4


def test_compiled_kernels_refuse_a_plan_with_results():
    model = Layers()
    compiled = megatrain.compile(model, device="cpu", memory="1GiB", kernels="inductor")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), plan=keeping())
    with pytest.raises(
        ScheduleError, match="results of attention that are kept: compiled and recorded kernels return none"
    ):
        step.prepare(text())
