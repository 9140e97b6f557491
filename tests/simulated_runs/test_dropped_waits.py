"""Every wait of the runtime is needed: without it, some order of the streams gives other numbers.

Waits that aren't needed in these steps are listed with the reason. A wait that is in no list must be noticed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.device import Device, DeviceEvent
from megatrain.runtime.streams.stream import Lane, Queued
from megatrain.runtime.streams.stream_set import Chaos
from tests.simulated_device import Simulator
from tests.simulated_runs.on_device import DEVICE, SLOW_HOST, Chain, on_device
from tests.training.parity import TASKS, Task, generator_of
from tests.training.test_evictions import evict

TASK = TASKS["stack"]
THERE = Task(
    lambda: Chain(depth=5, width=16),
    lambda number, size: torch.randn(size, 16, generator=generator_of(number)),
    lambda result, _: result.square().mean(),
)
"""Of tensors that the device can update."""
IN_FILE = Task(
    lambda: Chain(depth=5, width=16),
    lambda number, size: torch.randn(size, 16, generator=generator_of(number)),
    lambda result, _: result.square().mean(),
)
"""Of activations of a page."""
MODES: dict[str, dict[str, Any]] = {
    "overlap": {"spread": False},
    "spread": {},
    "deferred": {"max_grad_norm": 0.5},
    "serial": {"overlap": False},
    "there": {},
    "there, clipped": {"max_grad_norm": 1e-3},
}
FILE: dict[str, Any] = {"spread": False, "offload": Path(__file__).parent}
THERE_ON: dict[str, dict[str, Any]] = {
    "there": {"hardware": SLOW_HOST, "memory": "24KiB"},
    "there, clipped": {"hardware": replace(SLOW_HOST, host_bytes_per_s=1e7), "memory": "30KiB"},
}
"""Machines on which the device updates some blocks."""

# Waits that may go unnoticed, and why the step is right without them.
REDUNDANT = {
    r"[SU]\d+ <- G\d+|N <- S\d+": "a G, or S, blocks its thread until its bytes have arrived: then it counts as issued",
    r"B\d+\.\d <- [GS]\d+": "as U: B takes the memory of gradients that have left, but an S releases none",
}
ATTEMPTS = 5
KNOWN = 2  # of each such kind so many are tried, in every order
# Ops that fill memory which compute has taken. Whether other ops still use the very same bytes is the allocator's
# choice, so that not each of these waits is noticed, but some must be.
OF_MEMORY = r"A\d+\.\d <- [FB]\d+\.\d"
MOST_OF_MEMORY = 4


@contextmanager
def without(waiting: str, waited: str) -> Generator[None]:
    """Has one op's stream not wait for the mark of another op; that it is issued by then stays certain."""
    perform, wait = Lane.perform, Lane._wait_for_mark
    present: dict[int, Queued] = {}

    def performing(lane: Lane, op: Queued) -> None:
        present[id(lane)] = op
        perform(lane, op)

    def waiting_for(lane: Lane, mark: DeviceEvent, device: Device | None) -> None:
        op = present[id(lane)]
        if op.label != waiting or all(event.mark is not mark for event in op.waits if event.label == waited):
            wait(lane, mark, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "perform", performing)
        patch.setattr(Lane, "_wait_for_mark", waiting_for)
        yield


class Trial:
    """Steps of a small model from one start, in every order that may show a missing wait."""

    def __init__(self, sim: Simulator, mode: str) -> None:
        torch.manual_seed(0)
        own = THERE_ON.get(mode)
        in_file = mode == "file"
        task = IN_FILE if in_file else TASK if own is None else THERE
        self.sim, self.model = sim, task.build()
        self.start = [p.detach().clone() for p in self.model.parameters()]
        compiled = megatrain.compile(
            self.model,
            device=DEVICE,
            activations="offload",
            block_bytes=1,
            chaos=Chaos(max_delay_s=0),
            **(own or {}),
        )
        self.streams = compiled.megatrain.engine.streams
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.5)
        if own is not None or in_file:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.step = megatrain.TrainStep(compiled, self.optimizer, loss=task.loss, **(FILE if in_file else MODES[mode]))
        if in_file:
            evict(self.step)
        size = 64 if in_file else 2
        self.batches = [[on_device(task.batch(10 * n + m, size)) for m in range(2)] for n in range(2)]
        self.expected = self.run()

    def run(self) -> list[torch.Tensor]:
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(start)
        losses = [self.step(batches) for batches in self.batches]
        self.step.flush()
        torch.accelerator.synchronize()
        self.sim.order("early")
        return [*(loss.cpu() for loss in losses), *(p.detach().clone() for p in self.model.parameters())]

    def orders(self, suspect: str = "compute") -> Iterator[None]:
        """First the order in which `suspect` alone is late: a missing wait for that stream most often shows there."""
        h2d, d2h = self.streams.h2d.device_stream, self.streams.d2h.device_stream
        compute = torch.accelerator.current_stream()
        assert isinstance(h2d, torch.Stream)
        assert isinstance(d2h, torch.Stream)
        first = {"h2d": h2d, "d2h": d2h, "compute": compute}[suspect]
        orders = [(compute,), (h2d,), (d2h,), (h2d, d2h, compute), (h2d, compute), (d2h, compute)]
        for late in sorted(orders, key=lambda late: late != (first,)):
            self.sim.order("early")
            self.sim.order("late", *late)
            yield

    def is_right(self, suspect: str = "compute") -> bool:
        return all(
            all(torch.equal(left, right) for left, right in zip(self.expected, self.run(), strict=True))
            for _ in self.orders(suspect)
        )


def test_an_op_of_the_disk_without_one_of_its_waits_is_noticed(sim: Simulator):
    """Those of copies for the disk are for what is done when it counts as issued.

    What is evicted last returns through the same buffer, where a copy that comes too late leaves the right bytes.
    """
    trial = Trial(sim, "file")
    assert trial.is_right()
    last = max(trial.step.schedule.evicted)
    names = [
        (f"{one.op} <- {trial.step.schedule.ticks[wait.tick][wait.stream]}", wait.stream)
        for one in trial.step.schedule.instructions.all
        if one.op.what == "L" or (one.op.what == "E" and one.op.block != last)
        for wait in one.waits
    ]
    assert len(names) > 4
    for name, stream in names:
        with without(*name.split(" <- ")):
            assert not all(trial.is_right(stream) for _ in range(ATTEMPTS)), name


# On the device, the other modes wait as overlap does, or for the host.
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[pytest.mark.nightly] * (mode in ("spread", "deferred", "serial"))) for mode in MODES],
)
def test_a_step_without_one_of_its_waits_is_noticed(sim: Simulator, mode: str):
    trial = Trial(sim, mode)
    assert trial.is_right()
    there = trial.step.schedule.device_updates
    assert (0 < len(there) < 5) == (mode in THERE_ON), there
    known = [*REDUNDANT, OF_MEMORY]
    noticed, unnoticed, tried = list[str](), list[str](), Counter[str | None]()
    for one in trial.step.schedule.instructions.all:
        for wait in one.waits:
            if wait.stream == "host":
                continue  # what the host does is done when it counts as issued: there is nothing else to wait for
            other = trial.step.schedule.ticks[wait.tick][wait.stream]
            name = f"{one.op} <- {other}"
            if mode != "overlap" and any(re.fullmatch(pattern, name) for pattern in REDUNDANT):
                continue  # overlap has seen that it may go
            pattern = next((pattern for pattern in known if re.fullmatch(pattern, name)), None)
            tried[pattern] += 1
            if pattern is not None and tried[pattern] > (MOST_OF_MEMORY if pattern == OF_MEMORY else KNOWN):
                continue
            with without(*name.split(" <- ")):
                # Another thread may force the device's work first, so that a wait isn't missed in each run.
                is_right = all(trial.is_right(wait.stream) for _ in range(1 if pattern is not None else ATTEMPTS))
            (unnoticed if is_right else noticed).append(name)
    assert [name for name in unnoticed if not any(re.fullmatch(pattern, name) for pattern in known)] == []
    if mode == "overlap":
        assert all(any(re.fullmatch(pattern, name) for name in unnoticed) for pattern in REDUNDANT), "take it off"
    assert any(re.fullmatch(OF_MEMORY, name) for name in noticed)
