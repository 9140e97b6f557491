"""Ranks that time a step: functions that processes run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatrain
from megatrain.ranks import host
from tests.ranks.failing import refused
from tests.ranks.sides import Case, begin, moved, state_of, take
from tests.simulated_device.loading import load

CARD = megatrain.Hardware(1e9, 1e9, 1e9, launch_s=1e-5, host_bytes_per_s=1e10)


def timed(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """The last step of a case is timed; each rank draws what it got."""
    host.NAME = None if case.hosts is None else case.hosts[rank]
    try:
        torch.manual_seed(5)
        compiled, optimizer, step = begin(case, dist.group.WORLD)
        torch.manual_seed(6 + rank)
        last = len(case.deal) - 1
        take(case, rank, step, range(last))
        run = step.time(moved(case.batches(last)[rank], case.device(rank)))
    finally:
        host.NAME = None
    found = run.ranks
    assert found is not None
    assert found.schedules[rank] == run.schedule
    lasts = [(t.end_s - t.start_s) for t in found.timelines[rank]]
    assert lasts == pytest.approx([t.end_s - t.start_s for t in run.timeline], abs=1e-9)
    path = Path(folder) / f"rank {rank}.html"
    alone = megatrain.report(step, path, measured=run)  # of this rank
    drawn = megatrain.report(step, path, measured=found, costs=CARD if case.hosts is None else None)
    return {
        "run": found,
        "bands": [[band.name for band in each.figures.bands] for each in (alone, drawn)],
        "name": drawn.figures.name,
        "after": state_of(compiled, optimizer, step),
    }


def timed_there(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """The same on simulated devices."""
    load().reset()
    return timed(rank, case, folder)


def timing_alone(rank: int, case: Case) -> Sequence[str]:
    """Rank 0 times a step that the others take; then all take one."""
    _, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(1))
    batches = case.batches(1)[rank]
    text = refused(lambda: step.time(batches) if rank == 0 else step(batches))
    count = step.progress.count
    return [text, str(count), refused(lambda: step(batches)), str(step.progress.count)]
