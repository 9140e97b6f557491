"""Steps of several ranks for the tests of reports, on paper and as if they had been measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from megatrain.hardware.hardware import Hardware
from megatrain.reporting.ranks_figures import RanksFigures, figures_of_run
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.timing.ranks_run import RanksRun
from megatrain.scheduler.timing.shared import Timing
from megatrain.scheduler.timing.simulate_devices import DevicesSimulation, simulate_devices
from tests.scheduler.workloads import trained

HOST = Hardware(25e9, 24e9, 1e12, launch_s=1e-6, host_bytes_per_s=2e11)


@cache
def table(where: str, num_blocks: int, prefix: str, micro_batches: int, **options: Any) -> Schedule:
    workload = trained(num_blocks)
    blocks = tuple(replace(block, name=f"{prefix}{i}") for i, block in enumerate(workload.blocks))
    kind = {"updates": "overlap", "outputs": "release", "store": "shared", **options}
    return build(
        replace(workload, blocks=blocks),
        StepKind(ranks=where, micro_batches=micro_batches, **kind),
        num_slots=3,
        keep=1,
    )


def tables(
    number: int, num_blocks: int = 3, prefix: str = "layers.", micro_batches: int | Sequence[int] = 1, **options: Any
) -> list[Schedule]:
    """The tables of so many ranks, with micro-batches of each."""
    counts = [micro_batches] * number if isinstance(micro_batches, int) else micro_batches
    names = ["first", *["middle"] * (number - 2), "last"]
    return [table(name, num_blocks, prefix, n, **options) for name, n in zip(names, counts, strict=True)]


def run_of_ranks(found: Sequence[Schedule], hosts: Sequence[str] | None = None, slower: float = 1.25) -> RanksRun:
    """A run whose ops take longer than planned, as if it had been measured by clocks of hosts that differ."""
    simulation = simulate_devices(found, HOST)
    names = hosts or ["one"] * len(found)
    zeros = {name: 1000.0 * number for number, name in enumerate(dict.fromkeys(names))}
    timelines = [
        [Timing(t.position, slower * t.start_s, slower * t.end_s) for t in timeline]
        for timeline in simulation.timelines
    ]
    met = [zeros[name] + slower * simulation.step_s for name in names]
    return RanksRun.of(found, timelines, [zeros[name] for name in names], met, names)


def figures(found: Sequence[Schedule] | None = None) -> RanksFigures:
    """A planned and a measured step of three ranks."""
    found = found or tables(3)
    return figures_of_run("Model", (), run_of_ranks(found), HOST)


def simulated(found: Sequence[Schedule], machine: Hardware = HOST) -> DevicesSimulation:
    return simulate_devices(found, machine)
