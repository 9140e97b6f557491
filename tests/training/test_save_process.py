"""The memory that saving and loading take beside the model; `tests/faults` kills processes that save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.saving.test_interrupted import python

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


@pytest.mark.wide
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
