"""A small part of the campaign, in a process of its own; `make faults` is the whole of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_a_small_part_of_the_campaign_holds() -> None:
    number = 0 if os.environ.get("CI") else random.randrange(1000)
    command = [sys.executable, "-m", "tests.faults", "--small", "--seed", str(number), "--first", str(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.nightly
def test_the_campaign_says_what_did_not_hold(tmp_path: Path) -> None:
    """A megatrain whose checkpoints lose the scheduler's state, say, is found out."""
    code = (
        "import sys; from megatrain.files import disk, replace; disk.rename = lambda source, target: None\n"
        "sys.argv = ['faults', '--only', 'kills', '--count', '2', '--seed', '1']\n"
        "from tests.faults.__main__ import main; sys.exit(main())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "NOT HELD" in done.stdout
    assert done.stdout.splitlines()[-1].split()[0] == "all"
