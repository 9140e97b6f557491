"""Costs: what a machine needs for each op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.errors import OptionError
from megatrain.scheduler.memory import op_bytes
from megatrain.scheduler.op import Op, Stream
from megatrain.scheduler.table import Position, Schedule
from megatrain.scheduler.workload import Workload


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a machine, measured or given.

    Args:
        h2d_bytes_per_s: Copies to the device.
        d2h_bytes_per_s: Copies to the host.
        flops_per_s: Floating-point operations that blocks achieve.
        launch_s: Fixed time of every op.
        host_bytes_per_s: What an update or a norm reads and writes in host memory; without a figure they take no
            time.

    Raises:
        OptionError: If a rate isn't positive, or the fixed time is negative.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    flops_per_s: float
    launch_s: float = 0.0
    host_bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        rates = (self.h2d_bytes_per_s, self.d2h_bytes_per_s, self.flops_per_s, self.host_bytes_per_s)
        if min(rates) <= 0 or self.launch_s < 0:
            raise OptionError(f"{self} isn't a machine: rates are positive, times not negative.")


def op_durations(schedule: Schedule, hardware: Hardware) -> dict[Position, float]:
    """Seconds of each op, in table order.

    A backward is taken as twice the forward's work, and one forward more where it recomputes.
    """
    parked = schedule.parked()
    return {
        position: hardware.launch_s + _work_s(schedule, op, parked, hardware) for position, op in schedule.positions()
    }


def _work_s(schedule: Schedule, op: Op, parked: Mapping[int, Sequence[int]], hardware: Hardware) -> float:
    workload = schedule.known_workload()
    if op.stream == Stream.COMPUTE:
        forwards = 1 if op.what == "F" else 2 if op.block in schedule.saves else 3
        return forwards * workload.blocks[op.block].forward_flops / hardware.flops_per_s
    if op.stream == Stream.HOST:
        return _host_work_bytes(workload, op) / hardware.host_bytes_per_s
    rate = hardware.h2d_bytes_per_s if op.stream == Stream.H2D else hardware.d2h_bytes_per_s
    return op_bytes(workload, op, parked, schedule.transfer) / rate


def _host_work_bytes(workload: Workload, op: Op) -> int:
    """What an update touches, or all gradients, which the norm reads once."""
    if op.what == "U":
        return workload.blocks[op.block].update_bytes
    return sum(workload.blocks[block].gradient_bytes for block in workload.gradient_blocks())
