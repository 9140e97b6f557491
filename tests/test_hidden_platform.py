"""Training where the system has less than Linux: no `fcntl`, no forks, no flags of maps, no `/proc`, no C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_model_trains_and_goes_on_without_what_windows_lacks(tmp_path: Path):
    """Bits of eager, two saves to one place, a resume; text files whose encoding isn't named fail."""
    command = [sys.executable, "-X", "warn_default_encoding", "-m", "tests.hidden_platform", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "trained\n"
