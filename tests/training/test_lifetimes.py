"""A compiled model and a step end with their last user; a forked process is refused what it has no threads for."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import megatrain


def living(before: set[threading.Thread]) -> list[str]:
    """Names of the streams' threads that have come since and don't end."""
    new = [t for t in threading.enumerate() if t not in before and t.name.startswith("megatrain")]
    for thread in new:
        thread.join(timeout=300)  # on a loaded machine; one that is kept alive never ends
    return [thread.name for thread in new if thread.is_alive()]


ROOT = Path(__file__).parent.parent.parent


def test_a_compiled_model_ends_without_the_collector_before_its_optimizer() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    threads, ends = set(threading.enumerate()), []
    gc.disable()
    try:
        for clipping in (None, 1.0):
            compiled = megatrain.compile(model, device="cpu", transfer="copy")
            step = megatrain.TrainStep(compiled, optimizer, loss=lambda r, _: r.square().mean(), max_grad_norm=clipping)
            for _ in range(3):
                step(torch.randn(4, 8))
            ends += [weakref.ref(thing) for thing in (compiled, compiled.megatrain.engine, step, step._setup.updates)]
            del compiled, step
        assert [end() for end in ends] == [None] * len(ends)
        assert not living(threads)
    finally:
        gc.enable()
    assert not optimizer._optimizer_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert type(optimizer) is torch.optim.AdamW


def test_nothing_holds_the_callers_batch_or_what_came_of_it() -> None:
    """On a device it would take memory that no schedule counts."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters()), loss=lambda r, _: r.square().mean())
    given: list[weakref.ref[torch.Tensor]] = []

    def batch() -> list[torch.Tensor]:
        made = [torch.randn(rows, 8) for rows in (2, 3)]
        given.extend(map(weakref.ref, made))
        return made

    def called() -> None:
        (result,) = (compiled(*batch()[:1]),)
        given.append(weakref.ref(result))
        result.sum().backward()

    gc.disable()
    try:
        for act in (lambda: step.prepare(batch()), lambda: step(batch()), lambda: step(batch()), called, called):
            act()
            assert [end() for end in given] == [None] * len(given)
            assert step.host_plan.total_bytes > 0
    finally:
        gc.enable()


FORKS = """
import os, sys, torch, megatrain
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
compiled = megatrain.compile(model, device="cpu", transfer="copy")
step = megatrain.TrainStep(compiled, optimizer, loss=lambda r, _: r.square().mean(), max_grad_norm=1.0)
x = torch.randn(4, 8)
for _ in range(3):
    step(x)

def load():
    megatrain.TrainStep.load("nowhere", compiled, optimizer)

uses = dict(
    step=lambda: step(x), call=lambda: compiled(x), prepare=lambda: step.prepare(torch.randn(3, 8)), load=load,
    read=lambda: model[0].weight.norm(), eager=lambda: model(x), state=lambda: compiled.state_dict(),
    optimizer=lambda: optimizer.state_dict(), flush=lambda: step.flush(), nothing=lambda: None,
)
for name, use in uses.items():
    if os.fork() == 0:
        try:
            use()
            print(name, "works", flush=True)
        except megatrain.ExecuteError as error:
            print(name, str(error).splitlines()[0], flush=True)
        os._exit(0) if name != "nothing" else sys.exit(0)
    os.wait()
step(x)
print("parent works")
"""


@pytest.mark.nightly
def test_a_forked_process_is_refused_runs_and_may_look() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "step the step was called in a forked process.",
        "call the model was called in a forked process.",
        "prepare prepare() was called in a forked process.",
        "load load() was called in a forked process.",
        *(f"{name} works" for name in ("read", "eager", "state", "optimizer", "flush", "nothing")),
        "parent works",
    ]
