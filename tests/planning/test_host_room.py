"""More memory of the host is never slower: a plan gives way only as far as the host is short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatrain
from tests.attention import EAGER_TO_KEEP, Layers, text
from tests.draws import draws
from tests.planning.steps import planned

OPTIONS = st.fixed_dictionaries(
    {
        "device_memory": st.sampled_from(["600KiB", "800KiB", "2MiB"]),
        "micro_batches": st.sampled_from([1, 2, 4]),
        "max_grad_norm": st.sampled_from([None, 1.0]),
        "hardware": st.sampled_from(["rtx-4090", "gh200", "a100"]),
        "optimizer": st.sampled_from(["AdamW", "SGD"]),
    }
)
PARTS = st.lists(st.integers(50, 101), min_size=2, max_size=4, unique=True)


def seconds(plan: megatrain.Plan, machine: Any) -> float:
    """Of the schedule, whether or not the plan was made for that machine."""
    hardware = megatrain.Hardware.preset(machine) if isinstance(machine, str) else machine
    return plan.schedule.simulate(hardware).step_s


@given(OPTIONS, PARTS)
@draws(12, usual=2)
def test_more_host_memory_is_never_slower(options: Mapping[str, Any], parts: list[int]):
    whole = planned(**options, host_memory="1GiB").host.total_bytes
    plans = [planned(**options, host_memory=whole * part // 100) for part in sorted(parts)]
    assert [plan.fits for plan in plans] == sorted(plan.fits for plan in plans)
    taken = [seconds(plan, options["hardware"]) for plan in plans if plan.fits]
    assert taken == sorted(taken, reverse=True)


@pytest.mark.nightly
@pytest.mark.usefixtures("short_texts")
def test_more_host_memory_is_never_slower_where_results_are_parked():
    asked = {"hardware": EAGER_TO_KEEP, "optimizer": "SGD", "device": "cpu"}
    frugal = megatrain.plan(Layers(), text(), activations="recompute", **asked)
    asked["device_memory"] = frugal.schedule.device_bytes + 300_000
    enough = megatrain.plan(Layers(), text(), **asked).host.total_bytes
    taken = [
        seconds(plan, EAGER_TO_KEEP)
        for short in (200_000, 50_000, 0)
        if (plan := megatrain.plan(Layers(), text(), host_memory=enough - short, **asked)).fits
    ]
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 1
