"""The demo in two processes, one of which is killed in mid-step: torchrun starts both again; the bits are as of one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatrain.demo.course import Course
from megatrain.demo.demo_processes import DemoProcesses
from megatrain.demo.recipe import Recipe
from megatrain.errors import OptionError
from tests.saving.training import same
from tests.test_demo_resume import ROOT, TINY, run_to_the_end, tensor_files

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="torchrun finds its own host by name elsewhere"),
]


@pytest.mark.wide
def test_two_processes_of_which_one_is_killed_train_what_one_does(tmp_path: Path):
    recipe = replace(TINY, warmup_steps=Recipe().warmup_steps)  # which is no option of the command
    others = {"learning_rate", "warmup_steps", "max_grad_norm"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(recipe).items() if name not in others]
    folder = tmp_path / "ranks"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    demo = ["-m", "megatrain", "demo", "--interrupt-at=0.5", f"--folder={folder}", *options]
    ran = subprocess.run(
        [sys.executable, *torchrun, *demo],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    # It learns too little in so few steps, and says so by its status.
    assert "exitcode: -9" in ran.stderr, ran.stderr[-3000:]
    assert f"resume  from `{folder}`: step 4 of 8" in ran.stdout, ran.stdout[-3000:]
    assert ran.stdout.count("held-out loss, nats per byte") == 1
    alone = tmp_path / "alone"
    run_to_the_end(Course.begin(recipe, alone))
    for mine, theirs in zip(tensor_files(folder), tensor_files(alone), strict=True):
        assert same(load_file(mine), load_file(theirs))


def test_too_few_micro_batches_are_refused():
    class Group:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 3

    several = DemoProcesses(Group())
    assert [several.part("abcde"), DemoProcesses().part("ab")] == [["b", "c"], ["a", "b"]]
    with pytest.raises(OptionError, match="--micro-batches 2 is less than the 3 processes"):
        several.check(2)
