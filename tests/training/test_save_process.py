"""Checkpoints of processes that are killed, and the memory that saving and loading take beside the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.saving.test_interrupted import python

KILLED = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from torch import nn
from megatrain import TrainStep
from megatrain.saving import load
from tests.training.resuming import BF16, CLIP, Case, Run, scalar, warm_up

torch.set_num_threads(1)
base, moments = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
folder, usual = base / "run", []
build = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1)) for _ in range(4)))
batch = lambda step: torch.randn(2, 128, generator=torch.Generator().manual_seed(step))
case = Case(build, batch, scheduler=warm_up, compile=(BF16, BF16), step=(CLIP, CLIP))

run = Run(case)
states = [run.state()]
for i in range(4):
    run.train(1)
    run.save(base / f"v{i + 1}")
    states.append(run.state())

def back(place):
    run.step = TrainStep.load(place, run.compiled, run.optimizer, scheduler=run.scheduler, loss=scalar, **CLIP)

def write(version):
    back(base / f"v{version}")
    started = time.perf_counter()
    run.save(folder, shard_bytes=50_000)
    usual.append(time.perf_counter() - started)

write(1)
write(1)
found, names = [1], set()
for i in range(30):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        version = found[-1]
        while True:
            version = version % 3 + 1
            back(base / f"v{version}")
            os.write(go, bytes([version]))
            run.save(folder, shard_bytes=50_000)
    expected = {found[-1], begun := os.read(ready, 1)[0]}
    if i % 2:
        expected = {begun, os.read(ready, 1)[0]}  # the first is done, however busy the machine is
    time.sleep(moments.uniform(0, (1.2, 6)[i % 2] * usual[-1]))  # the machine may be busier than it was
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.set_blocking(ready, False)
    try:
        expected |= set(os.read(ready, 100)[-2:])  # it was done, and began the next
    except BlockingIOError:
        pass
    os.close(ready), os.close(go)
    names.add(tuple(sorted(path.name.split("-")[0] for path in base.iterdir())))
    load(folder).check()
    back(folder)
    version = run.step.progress.count
    assert version in expected
    assert run.state() == states[version]
    run.train(1)
    assert run.state() == states[version + 1]
    found.append(version)
write(3)
assert sorted(path.name for path in base.iterdir()) == ["run", "v1", "v2", "v3", "v4"]
print("changes", sum(a != b for a, b in zip(found, found[1:])), "cut", len(names) - 1)
"""


def test_thirty_kills_while_a_step_is_saved_leave_the_previous_or_the_new_one(tmp_path: Path):
    out = python(KILLED, tmp_path, torch.seed() % 2**32).split()
    assert int(out[1]) > 0, "no save was ever completed"
    assert int(out[3]) > 0, "no save was ever cut short"


MEMORY = """
import sys, threading, time
from pathlib import Path
import psutil, torch
from torch import nn
import megatrain

torch.set_num_threads(1)
this, base, precision = psutil.Process(), Path(sys.argv[1]), sys.argv[2]

def made(width, depth):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    compiled = megatrain.compile(model, device="cpu", precision=precision)
    return compiled, torch.optim.AdamW(model.parameters(), fused=True)

loss = dict(loss=lambda result, batch: result.float().square().mean(), max_grad_norm=1.0)

def peak(action):
    top, done = [0], threading.Event()
    def watch():
        while not done.is_set():
            top[0] = max(top[0], this.memory_info().rss)
            time.sleep(0.001)
    before = this.memory_info().rss
    thread = threading.Thread(target=watch)
    thread.start()
    action()
    done.set()
    thread.join()
    return (top[0] - before) / 2**20

small = made(1500, 2)  # what all of this takes once
step = megatrain.TrainStep(*small, **loss)
step(torch.ones(1, 1500))
step.save(base / "small")
megatrain.TrainStep.load(base / "small", *small, **loss)

compiled, optimizer = made(2048, 12)
step = megatrain.TrainStep(compiled, optimizer, **loss)
step(torch.ones(1, 2048))
step.flush()
saved = peak(lambda: step.save(base / "run"))
again = peak(lambda: step.save(base / "run"))
loaded = peak(lambda: megatrain.TrainStep.load(base / "run", compiled, optimizer, **loss))
fresh = torch.optim.AdamW(compiled.parameters(), fused=True)
moments = 2 * sum(4 * p.numel() for p in compiled.parameters()) / 2**20
first = peak(lambda: megatrain.TrainStep.load(base / "run", compiled, fresh, **loss)) - moments
print(saved, again, loaded, first)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_neither_saving_nor_loading_takes_a_second_copy(tmp_path: Path, precision: str):
    """Of 192 MiB of weights, or as much of masters, with 384 MiB of moments: less than a twentieth of the weights."""
    found = dict(
        zip(
            ("save", "save again", "load", "load anew"),
            map(float, python(MEMORY, tmp_path, precision).split()),
            strict=True,
        )
    )
    assert {name: mib for name, mib in found.items() if mib > 192 / 20} == {}
