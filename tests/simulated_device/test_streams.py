"""Streams run in the order that a test chooses, within what waits allow; kernels have the CPU's numbers."""

from __future__ import annotations

import pytest
import torch

from megatrain.device import LaunchGraphs, find
from tests.simulated_device.simulator import Simulator


def new_stream() -> torch.Stream:
    return torch.Stream(device="sim")


def default_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


def locked(value: float, size: int = 10) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def copied_on(stream: torch.Stream, out: torch.Tensor, source: torch.Tensor) -> None:
    with torch.get_device_module("sim").stream(stream):
        out.copy_(source, non_blocking=True)


def sum_after_copy(*, waits: bool, synchronizes: bool = False) -> float:
    """Copies on a side stream and sums on the default one."""
    side, out = new_stream(), torch.zeros(10, device="sim")
    torch.accelerator.synchronize()
    copied_on(side, out, locked(1))
    if waits:
        default_stream().wait_event(side.record_event())
    if synchronizes:
        side.synchronize()
    return out.sum().item()


def test_waits_give_the_right_numbers_in_any_order_and_a_missing_one_wrong_ones_late(sim: Simulator):
    assert sum_after_copy(waits=False) == 10
    for order in ("early", "late", "seeded"):
        sim.order(order, seed=3)
        assert sum_after_copy(waits=True) == sum_after_copy(waits=False, synchronizes=True) == 10
    sim.order("late")
    assert sum_after_copy(waits=False) == 0


def test_a_dropped_wait_is_a_missing_wait(sim: Simulator):
    sim.order("late")
    sim.drop("wait", 0)
    assert sum_after_copy(waits=True) == 0
    assert sum_after_copy(waits=True) == 10
    assert sim.count("wait") == 2
    sim.drop("stream", 0)
    assert sum_after_copy(waits=False, synchronizes=True) == 0
    sim.reset()
    sim.order("late")
    sim.drop_where("wait", lambda stack: any(frame.name == "sum_after_copy" for frame in stack))
    assert sum_after_copy(waits=True) == 0


# -- recordings, as CUDA graphs ----------------------------------------------------------------------------------


DEVICE = "sim"


@pytest.fixture
def graphs(sim: Simulator) -> LaunchGraphs:
    del sim
    return find(DEVICE).launch_graphs()
