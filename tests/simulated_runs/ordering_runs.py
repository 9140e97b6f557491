"""Runs that come by each place of the library that orders streams: training, calls, walks, failures, measurements.

Each gives numbers that are the same in every order of the streams. Inputs and weights change from step to step, so that
stale data is wrong data.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Cuda, find
from megatrain.device import bus as buses
from megatrain.device.bus import BUFFERS, Bus
from megatrain.errors import ExecuteError
from megatrain.files import load
from megatrain.hardware import kernels_alone
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.kernels_alone import launch_s, seconds_of
from megatrain.hardware.measured import Link, compute_beside
from megatrain.runtime.streams.stream import Chaos, InjectedFailure
from megatrain.runtime.streams.stream_set import StreamSet
from tests.runtime.stepping import issue
from tests.simulated_device.adapter import SimulatedDevice
from tests.simulated_device.simulator import GIB, HardwareProfile, Simulator
from tests.simulated_device.virtual_hosts import VirtualHosts
from tests.simulated_runs.on_device import DEVICE, SLOW_HOST, Chain, compiled_copy, on_device
from tests.simulated_runs.test_virtual_time import BUS, HOST_BYTES_PER_S, made
from tests.training.parity import TASKS

Found = Sequence[torch.Tensor]
RING_BYTES = 2 * BUFFERS * 4096


# -- training steps and calls --------------------------------------------------------------------------------


def trained(mode: dict[str, Any]) -> Found:
    task = TASKS["stack"]
    model = task.build()
    compiled = megatrain.compile(model, device=DEVICE, activations="offload", block_bytes=1)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.5), loss=task.loss, **mode)
    losses = [step([on_device(task.batch(10 * number + m, 2)) for m in range(2)]) for number in range(3)]
    step.flush()
    return [*losses, *model.parameters()]


def kept() -> Found:
    """Weights, masters and moments that the device updates, while somebody looks at them now and then."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Chain(), precision="bf16", memory="1MiB", hardware=SLOW_HOST, block_bytes=1)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1), list[torch.Tensor]()
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, _: result.float().square().mean())
    for number in range(5):
        found.append(step(torch.randn(4, 32).to(DEVICE)))
        assert step.schedule.device_updates, "on this machine all fit"
        if number in (1, 2, 4):
            with torch.get_device_module(DEVICE).stream(torch.Stream(device=DEVICE) if number != 2 else None):
                found += [parameter.detach().clone() for parameter in model.parameters()]
        if number == 3:
            with torch.get_device_module(DEVICE).stream(torch.Stream(device=DEVICE)), TemporaryDirectory() as folder:
                step.save(folder)
                found += [torch.cat([p.clone() for p in each.pieces()]) for each in load(folder).weights.values()]
    step.flush()
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    return [*found, *model.parameters(), *moments, *(master.low for master in compiled.masters.values())]


def called(width: int = 32) -> Found:
    """Calls with a backward, whose gradients the host uses at once."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Chain(width=width), activations="offload", block_bytes=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses: list[torch.Tensor] = []
    for number in range(4):
        loss = compiled(torch.randn(4, width).to(DEVICE)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if number % 2:  # some gradients are added to those before
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *model.parameters()]


def evaluated() -> Found:
    """Calls without a backward on several streams, and writes of the host into weights after them."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Chain(), block_bytes=1)
    module, found = torch.get_device_module(DEVICE), list[torch.Tensor]()
    inputs = [torch.randn(4, 32).to(DEVICE) for _ in range(5)]
    torch.accelerator.synchronize()
    with torch.no_grad():
        for number, x in enumerate(inputs):
            with module.stream(torch.Stream(device=DEVICE) if number % 2 else None):
                found.append(compiled(x))
            for parameter in model.parameters() if number > 1 else ():
                parameter.mul_(-2)
    return found


class Normed(nn.Module):
    """Its forward writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


def normed() -> Found:
    """Buffers that calls write, and the host as well; a second backward repeats the forward."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Normed(), block_bytes=1)
    found: list[torch.Tensor] = []
    for number in range(4):
        x = torch.randn(4, 8).to(DEVICE).requires_grad_()
        with torch.set_grad_enabled(number != 2):
            y = compiled(x)
        found += [y.detach(), *(buffer.clone() for buffer in model.buffers())]
        for buffer in model.buffers():
            buffer.mul_(2)
        for _ in range(2 if number != 2 else 0):
            y.sum().backward(retain_graph=True)
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def failed() -> Found:
    """Backwards that fail while values and weights are on their way; the caller uses the memory that is free again."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Chain(), activations="offload", block_bytes=1)
    engine, found = compiled.megatrain.engine, list[torch.Tensor]()
    inputs = [torch.randn(4, 32).to(DEVICE) for _ in range(5)]
    compiled(inputs[0]).sum().backward()
    torch.accelerator.synchronize()
    for x, op in zip(inputs[1:], ("compute:B3", "compute:F4", "d2h:G2", "compute:B1"), strict=True):
        engine.set_chaos(Chaos(fail=op, max_delay_s=0))
        with pytest.raises((InjectedFailure, ExecuteError), match="chaos made"):
            compiled(x).sum().backward()
        found += [torch.full((4, 32), float(number), device=DEVICE) for number in range(16)]
        engine.set_chaos(None)
        with torch.no_grad(), torch.get_device_module(DEVICE).stream(torch.Stream(device=DEVICE)):
            found.append(compiled(x))
        torch.accelerator.synchronize()  # other streams come next, which know nothing of this call
        for parameter in model.parameters():
            parameter.grad = None
    return found


def grown() -> Found:
    """Memory of slots that grows while another stream than that of its allocation still uses it."""
    torch.manual_seed(0)
    compiled, _ = compiled_copy(Chain(), block_bytes=1)
    first, engine = torch.randn(4, 32).to(DEVICE), compiled.megatrain.engine
    with torch.no_grad():
        compiled(first)
        torch.accelerator.synchronize()
        with torch.get_device_module(DEVICE).stream(torch.Stream(device=DEVICE)):
            one = compiled(first)
        nbytes = engine.arena.nbytes
        engine.reserve_slots(2 * nbytes, 2 * nbytes)
    return [one, *(torch.full((nbytes // 4,), 7.0, device=DEVICE) for _ in range(4))]


def dropped() -> Found:
    """A model that goes while its weights, which are page-locked, are on their way to where the caller wants them."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Chain(), activations="offload", block_bytes=1)
    compiled(torch.randn(4, 32).to(DEVICE))
    found = [parameter.detach().to(DEVICE, non_blocking=True) for parameter in model.parameters()]
    del compiled, model
    gc.collect()
    return found


@torch.no_grad()
def walked() -> Found:
    """Walks after a call on another stream, whose slots make room; one brings weights that nobody reads."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    compiled: Any = megatrain.compile(model, device=DEVICE, memory="128KiB")
    inputs, found = [torch.randn(2, 64).to(DEVICE) for _ in range(4)], list[torch.Tensor]()
    compiled(inputs[0])
    torch.accelerator.synchronize()
    with torch.get_device_module(DEVICE).stream(torch.Stream(device=DEVICE)):
        found.append(compiled(inputs[0]))
    for x in inputs[1:]:
        with compiled.megatrain.walk():
            found += [torch.full((64, 64), 5.0, device=DEVICE), compiled(x)]
        model[1].weight.mul_(-1.5)
    with compiled.megatrain.walk():
        found.append(compiled[0](inputs[0]))
        found.append(torch.zeros(18, 1024, device=DEVICE))  # leaves no room for those that came before
        found += [torch.full((64, 64), 7.0, device=DEVICE) for _ in range(3)]
    return found


def bare() -> Found:
    """Streams alone, with ops as a program may add them: transfers that no compute waits for, and work of the host."""
    device, found = find(DEVICE), list[torch.Tensor]()
    streams, memory = StreamSet(device), [Bus(device).arena(4096) for _ in range(2)]
    there, back = (arena.tensor.view(torch.float32) for arena in memory)
    for number in range(3):
        x = torch.full((1024,), float(number), device=DEVICE)
        y = torch.empty_like(x)
        there.fill_(number + 10)
        with streams.step(waits_for=()):
            doubled = issue(streams, "compute", "F", lambda x=x: x.mul_(2))
            arrived = issue(streams, "d2h", "G", lambda x=x: device.copy(back, x), (doubled,))
            issue(streams, "host", "U", lambda: found.append(back.clone()), (arrived,))
            issue(streams, "h2d", "W", lambda y=y: device.copy(y, there))
        found.append(y + 1)
        with streams.step():
            issue(streams, "d2h", "G", lambda y=y: device.copy(back, y))
        found.append(back.clone())
    streams.close()
    return found


# -- other ways of host memory -------------------------------------------------------------------------------


@contextmanager
def small_rings() -> Generator[None]:
    with (
        patch.object(buses, "MOST_BYTES", RING_BYTES),
        patch.object(buses, "LEAST_BYTES", RING_BYTES),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", megatrain.PageLockWarning)
        yield


def ringed(sim: Simulator) -> Found:
    """All through rings of a few pages."""
    gc.collect()
    sim.fail_lock(0)
    sim.configure(lock_limit=sim.locked_bytes + RING_BYTES)
    try:
        with small_rings():
            return [*called(width=80), *evaluated()]  # a weight is more than a ring has room for
    finally:
        sim.fail_lock(None)
        sim.configure(lock_limit=1 << 60)


def waited_for_as_cuda() -> Found:
    """With the waits of CUDA's own kind of events."""
    with (
        patch.object(SimulatedDevice, "synchronize", Cuda.synchronize),
        patch.object(SimulatedDevice, "wait_for", Cuda.wait_for),
        patch.object(torch.cuda, "Stream", lambda device: torch.Stream(device=device)),
        patch.object(torch.cuda, "Event", lambda blocking: torch.Event(device=DEVICE)),
        patch.object(torch.cuda, "current_stream", torch.accelerator.current_stream),
    ):
        return [*called(), *bare()]


# -- measurements, in virtual time ---------------------------------------------------------------------------


@contextmanager
def virtual_time(sim: Simulator, machine: Hardware) -> Generator[None]:
    sim.configure(compute=False, poison=False, capacity=64 * GIB)
    sim.set_profile(HardwareProfile.of(machine))
    try:
        yield
    finally:
        sim.set_profile(None)
        sim.configure(compute=True, poison=True, capacity=2 * GIB)


def near(found: float, expected: float) -> torch.Tensor:
    return torch.tensor(abs(found - expected) <= 0.05 * expected)


def timed(sim: Simulator) -> Found:
    """Times of a step's operations: held up after each, and as they run."""
    with virtual_time(sim, BUS):
        hosts, (step, batch) = VirtualHosts(sim, HOST_BYTES_PER_S), made("overlap")
        hosts.take(step, batch)
        held_up = hosts.measured(step, batch).seconds
        run = step.time(batch)
        works = run.schedule.known_workload().blocks
        whole = {block: work.state_bytes / BUS.h2d_bytes_per_s for block, work in enumerate(works)}
        blocks = {position: op.block for position, op in run.schedule.positions() if op.what == "W"}
        found = [near(held_up[position], whole[block]) for position, block in blocks.items()]
        timings = [timing for timing in run.timeline if timing.position in blocks]
        return [*found, *(near(t.end_s - t.start_s, whole[blocks[t.position]]) for t in timings)]


def measured(sim: Simulator) -> Found:
    """Rates of a machine."""
    machine = Hardware.preset("rtx-4090")
    device, waiting = find(DEVICE), list[int]()
    with virtual_time(sim, machine):
        with patch.object(kernels_alone, "op_s", lambda: 0.0):  # Python's real time for an op, which is taken off
            launched, issued = launch_s(device)
        link = Link(device)
        try:
            x = torch.empty(1 << 28, device=DEVICE)
            for _ in range(16):
                x.add_(1)  # the device isn't idle
            both = sum(link.both())
            wanted = machine.h2d_beside * machine.h2d_bytes_per_s + machine.d2h_beside * machine.d2h_bytes_per_s
            compute_beside(device, link)
            waiting.append(sim.pending(torch.accelerator.current_stream()))
        finally:
            link.close()
    x = torch.zeros(8, device=DEVICE)

    def work() -> None:
        waiting.append(sim.pending(torch.accelerator.current_stream()))
        x.add_(1)

    seconds_of(device, work, least_s=0.02)
    few = torch.tensor(max(waiting) < 8)
    return [near(launched, machine.launch_s), near(issued, machine.issue_s), near(both, wanted), few]


RUNS: dict[str, Callable[[Simulator], Found]] = {
    "overlap": lambda _: trained({"spread": False}),
    "spread": lambda _: trained({}),
    "kept": lambda _: kept(),
    "called": lambda _: called(),
    "evaluated": lambda _: evaluated(),
    "bare": lambda _: bare(),
    "normed": lambda _: normed(),
    "grown": lambda _: grown(),
    "dropped": lambda _: dropped(),
    "walked": lambda _: walked(),
    "failed": lambda _: failed(),
    "waited for as CUDA": lambda _: waited_for_as_cuda(),
    "ringed": ringed,
    "timed": timed,
    "measured": measured,
}
