"""Signs of life end with the process that gives them."""

from __future__ import annotations

import subprocess
import sys

_ENDS = """
import time
import torch.distributed as dist
from megatrain.ranks import signs_of_life

signs_of_life.BEAT_S = 0.0  # nearly always within the store
signs = signs_of_life.SignsOfLife(dist.TCPStore("127.0.0.1", 0, 1, True), 0, 2)
time.sleep(0.2)
"""


def test_a_process_ends_well_while_a_sign_is_given():
    """Python ends a thread that comes back from C++ then; without the join the process aborts."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
