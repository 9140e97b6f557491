"""A rank is killed at a random moment: the others end, nothing is left of what they shared, and nothing is lost."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatrain
from tests.comparing import assert_same
from tests.ranks.processes import SHARED, Processes
from tests.ranks.sides import OURS, Case, begin, state_of, take
from tests.simulated_device.loading import unavailable
from tests.training.parity import MODES

KILLED_IN = "overlap", "spread", "deferred", "serial_clipped"
NUM_KILLS, NUM_STEPS = 20, 60
EARLIEST_S, LATEST_S = 1.0, 8.0
"""Kills come while ranks start, meet, take steps and save; some ranks are done by then."""
WITHIN_S = 40.0


def named() -> set[str]:
    """Shared memory that has a name; the test's own queues have semaphores there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def until_killed(rank: int, case: Case, folder: str) -> int:
    """Goes on from the latest checkpoint, saves after each second step; returns how many steps were taken in all."""
    step = resumed(case, dist.group.WORLD, folder)[2]
    while (number := step.progress.count) < len(case.deal):
        take(case, rank, step, [number])
        if number % 2:
            step.save(folder)
    return step.progress.count


def to_the_end(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Takes what is left of the steps in one process; returns everything that training has changed."""
    compiled, optimizer, step = resumed(case, None, folder)
    first = step.progress.count
    take(case, None, step, range(first, len(case.deal)))
    return {"first": first, **state_of(compiled, optimizer, step)}


def resumed(case: Case, group: Any, folder: str) -> tuple[Any, Any, megatrain.TrainStep]:
    """The training of a case from its latest checkpoint, or from its beginning."""
    torch.manual_seed(6)
    compiled, optimizer, step = begin(case, group)
    if not os.path.exists(folder):
        return compiled, optimizer, step
    del step
    options = {**MODES[case.mode], **case.options}
    step = megatrain.TrainStep.load(folder, compiled, optimizer, loss=OURS[case.task].loss, **options)
    return compiled, optimizer, step


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_rank_that_is_killed_at_any_moment_leaves_nothing_and_costs_nothing(seed: int, tmp_path: Path):
    draw, folder = random.Random(seed), str(tmp_path / "run")
    mode, before = KILLED_IN[seed % len(KILLED_IN)], named()
    # LayerNorm of the simulated device has no backward in bf16.
    on_devices = seed % 3 == 2 and unavailable() is None
    options: dict[str, Any] = {"order": "seeded"} if on_devices else {"compile": {"precision": "bf16"}}
    case = Case("tied", mode, [(1, 1, 1)] * NUM_STEPS, **options)
    made = Processes(3, simulated=on_devices)
    try:
        made.begin(until_killed, case, folder)
        if seed % 2:  # while steps are taken and saved, however long the ranks took to begin
            until = time.monotonic() + LATEST_S * 10
            while not os.path.exists(folder) and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, EARLIEST_S))
        else:
            time.sleep(draw.uniform(EARLIEST_S, LATEST_S))
        victim, begun = draw.randrange(3), time.monotonic()
        made.processes[victim].kill()
        for rank in {0, 1, 2} - {victim}:
            found = made.result(rank)
            assert found == NUM_STEPS or type(found).__name__ == "RanksError", found
        assert time.monotonic() - begun < WITHIN_S
    finally:
        made.close()
    left = [Path(f"/proc/{process.pid}/maps") for process in made.processes]
    assert not any(maps.exists() and SHARED in maps.read_text() for maps in left)
    assert named() <= before
    alone = Processes(1, simulated=on_devices)
    try:
        (found,), (expected,) = (alone.run(to_the_end, case, where) for where in (folder, f"{folder}-undisturbed"))
    finally:
        alone.close()
    print(f"killed rank {victim} of {mode}, went on from step {found.pop('first')}")
    del expected["first"]
    assert_same(expected, found)
