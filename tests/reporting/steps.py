"""Steps for the tests of reports: small ones of known times, a long one, and names that try to break out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

import megatrain
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import TimedRun
from megatrain.tools.reporting.step_report import StepReport, step_report
from tests.scheduler.workloads import schedules, step_schedules, trained

CARD = megatrain.Hardware(25e9, 24e9, 1e11, launch_s=1e-6, host_bytes_per_s=60e9)
EVIL = "<!--<script </script><b>&amp;\"'{{data}}$title\u2028\x07"


def small(*, clip: bool = False) -> Schedule:
    updates = "deferred" if clip else "overlap"
    return schedule(trained(4), keep=1, updates=updates, clip=clip, micro_batches=2, outputs="release")


def run_of(plan: Schedule, slower: float = 1.25) -> TimedRun:
    """A run whose ops begin a microsecond late and take longer than planned, as if it had been measured."""
    spans = {t.position: (slower * t.start_s + 1e-6, slower * t.end_s) for t in plan.simulate(CARD).timeline}
    return TimedRun.of(plan, spans)


def made(plan: Schedule | None = None, *, is_measured: bool = True) -> StepReport:
    plan = plan or small()
    return step_report(plan, CARD, run_of(plan) if is_measured else None)


def long(num_blocks: int = 100, micro_batches: int = 4) -> Schedule:
    workload = trained(num_blocks)
    blocks = [replace(block, name=f"model.layers.{i}") for i, block in enumerate(workload.blocks)]
    return schedule(
        replace(workload, blocks=tuple(blocks)),
        keep=3,
        micro_batches=micro_batches,
        updates="deferred",
        clip=True,
        outputs="release",
    )


def evil() -> Schedule:
    """Each name of a block or a value would end a script, open an element or be filled in again."""
    workload = trained(3)
    blocks = tuple(replace(block, name=f"{EVIL}{i}") for i, block in enumerate(workload.blocks))
    values = tuple(replace(value, name=f"{EVIL}{value.name}") for value in workload.values)
    return schedule(replace(workload, blocks=blocks, values=values), keep=1, updates="overlap")


def drawn() -> st.SearchStrategy[Schedule]:
    """Schedules of all kinds that have ops."""
    return st.one_of(schedules(), step_schedules()).filter(lambda plan: bool(plan.ops))
