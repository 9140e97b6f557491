"""A rank is killed at a random moment: the others end, nothing is left of what they shared, and nothing is lost."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.comparing import assert_same
from tests.ranks.processes import Processes
from tests.ranks.sharing import SHARED, to_the_end, until_killed
from tests.ranks.sides import Case
from tests.simulated_device.loading import unavailable

MODES = "overlap", "spread", "deferred", "serial_clipped"
NUM_KILLS, NUM_STEPS = 20, 60
EARLIEST_S, LATEST_S = 1.0, 8.0
"""Kills come while ranks start, meet, take steps and save; some ranks are done by then."""
WITHIN_S = 40.0


def named() -> set[str]:
    """Shared memory that has a name; the test's own queues have semaphores there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_rank_that_is_killed_at_any_moment_leaves_nothing_and_costs_nothing(seed: int, tmp_path: Path):
    draw, folder = random.Random(seed), str(tmp_path / "run")
    mode, before = MODES[seed % len(MODES)], named()
    # LayerNorm of the simulated device has no backward in bf16.
    on_devices = seed % 3 == 2 and unavailable() is None
    options: dict[str, Any] = {"order": "seeded"} if on_devices else {"compile": {"precision": "bf16"}}
    case = Case("tied", mode, [(1, 1, 1)] * NUM_STEPS, **options)
    made = Processes(3, simulated=on_devices)
    try:
        for inbox in made.inboxes:
            inbox.put((until_killed, (case, folder)))
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
