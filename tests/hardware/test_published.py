"""The simulator says of steps that were measured elsewhere what was measured there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import megatrain
from benchmarks.llamas import SIZES
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.from_program import schedule
from megatrain.scheduler.workload import Workload
from tests.hardware.published import LENGTH, PUBLISHED, Row, seconds_of


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.machine}, {row.model}, {row.system.name}")
def test_a_published_step_takes_what_the_simulator_says_within_15_percent(row: Row):
    """Ours and others' are simulated alike, and each machine has one set of rates for all of its rows."""
    tokens = row.sequences * row.count * LENGTH
    seconds = seconds_of(row, Hardware.preset(row.machine))
    assert tokens / seconds == pytest.approx(row.tokens_per_s, rel=0.15), row.source


class Own(NamedTuple):
    """A step of a Llama of 1.5 billion parameters on an H100, as docs/benchmarks.md has it.

    Attributes:
        sequences: In a micro-batch.
        length: Of each.
        count: Micro-batches.
        options: Of the schedule.
        is_recorded: Whether kernels are launched by CUDA graphs.
        seconds: The middle of the measured ones.
    """

    sequences: int
    length: int
    count: int
    options: dict[str, Any]
    is_recorded: bool
    seconds: float


SPREAD, CLIPPED = {"updates": "spread"}, {"updates": "deferred", "clip": True}
OWN = (
    Own(1, 2048, 4, SPREAD, False, 1.13),
    Own(1, 2048, 4, SPREAD, True, 0.58),
    Own(8, 1024, 1, SPREAD, False, 0.59),
    Own(8, 1024, 1, SPREAD, True, 0.54),
    Own(8, 1024, 1, CLIPPED, False, 0.715),
)


def workload_of(sequences: int, length: int) -> Workload:
    model: Any = SIZES["1.5B"].model().to("meta")
    model.tie_weights()
    ids = torch.zeros(sequences, length, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    planned = megatrain.plan(model, example_kwargs=inputs, precision="bf16", optimizer="AdamW")
    works = planned.schedule.known_workload()
    # The host made all updates then.
    blocks = (replace(block, optimizer_bytes=0, update_workspace_bytes=0) for block in works.blocks)
    return replace(works, blocks=tuple(blocks))


@pytest.mark.nightly
def test_our_own_steps_on_an_h100_took_what_the_simulator_says_within_10_percent():
    # Updates weren't prepared then: Python took ten times as long for each parameter.
    machine = replace(Hardware.preset("h100-sxm"), update_s=500e-6)
    works = {sizes: workload_of(*sizes) for sizes in {(row.sequences, row.length) for row in OWN}}
    said: dict[str, float] = {}
    for row in OWN:
        plan = schedule(
            works[row.sequences, row.length],
            memory="72GiB",
            micro_batches=row.count,
            outputs="release",
            activations="recompute" if row.is_recorded else "auto",
            **row.options,
        )
        # As `kernels="graphs"` plans.
        rates = replace(machine, issue_s=0.0) if row.is_recorded else machine
        said[str(row)] = plan.simulate(rates).step_s
    assert said == {str(row): pytest.approx(row.seconds, rel=0.1) for row in OWN}
