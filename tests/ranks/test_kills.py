"""A rank is killed at a random moment: the others end, nothing is left of what they shared, and nothing is lost."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch

from tests.comparing import assert_same
from tests.ranks.processes import Processes
from tests.ranks.sharing import SHARED, resumed, until_killed
from tests.ranks.sides import Case, begin, state_of, take

MODES = "overlap", "spread", "deferred", "serial_clipped"
NUM_KILLS, NUM_STEPS = 20, 60
EARLIEST_S, LATEST_S = 1.0, 8.0
"""Kills come while ranks start, meet, take steps and save; some ranks are done by then."""
WITHIN_S = 40.0


def named() -> set[str]:
    """Shared memory that has a name; the test's own queues have semaphores there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_rank_that_is_killed_at_any_moment_leaves_nothing_and_costs_nothing(seed: int, tmp_path: Path):
    draw, folder = random.Random(seed), str(tmp_path / "run")
    mode, before = MODES[seed % len(MODES)], named()
    case = Case("tied", mode, [(1, 2, 1)] * NUM_STEPS, compile={"precision": "bf16"}, draws=True)
    made = Processes(3)
    try:
        for inbox in made.inboxes:
            inbox.put((until_killed, (case, folder)))
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
    mine, moments, step = resumed(case, None, folder)
    print(f"killed rank {victim} of {mode}, goes on from step {step.progress.count}")
    take(case, None, step, range(step.progress.count, NUM_STEPS))
    found = state_of(mine, moments, step)
    torch.manual_seed(6)
    compiled, optimizer, undisturbed = begin(case)
    take(case, None, undisturbed, range(NUM_STEPS))
    assert_same(state_of(compiled, optimizer, undisturbed), found)
