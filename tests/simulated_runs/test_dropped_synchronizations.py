"""Each place where the runtime orders streams, or waits for the device, is needed; or a list says why it isn't.

The place is a line of megatrain that records an event, has a stream wait for one, or has the host wait. A run without
what this line does must give other numbers in some order of the streams.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megatrain
from tests.draws import is_wide
from tests.simulated_device.simulator import CallName, Simulator
from tests.simulated_runs.on_device import DEVICE, choose, compiled_copy, on_device
from tests.simulated_runs.test_after_calls import Chain
from tests.training.parity import TASKS

LIBRARY = str(Path(megatrain.__file__).parent)
KINDS: tuple[CallName, ...] = ("wait", "record", "event", "stream", "device")
TRIED = "orders nothing: it tries whether the device has events at all"
LAST = "each transfer is waited for by an op of compute, or blocks its own thread; it is for ops that a program adds"
REDUNDANT = {
    "device: accelerator.settle: torch.accelerator.synchronize(self.torch_device)": (
        "a run ends when nothing uses the host's memory; test_host_memory_there drops memory earlier"
    ),
    "event: accelerator._try_event: event.synchronize()": TRIED,
    "record: accelerator._try_event: event = self.new_stream().record_event()": TRIED,
    "wait: accelerator._try_event: stream.wait_event(event)": TRIED,
    "event: stream._wait_for_mark: mark.synchronize()": "a G blocks its own thread until its bytes have arrived",
    "record: stream_set.finish: compute.wait_event(stream.record_event())": LAST,
    "wait: stream_set.finish: compute.wait_event(stream.record_event())": LAST,
}


def place_of(kind: str, stack: traceback.StackSummary) -> str:
    """The innermost line of megatrain; empty if the test's own code made the call."""
    for frame in reversed(stack):
        if frame.filename.startswith(LIBRARY):
            return f"{kind}: {Path(frame.filename).stem}.{frame.name}: {frame.line}"
        if frame.filename == __file__:
            break
    return ""


def trained(mode: dict[str, Any]) -> list[torch.Tensor]:
    task = TASKS["stack"]
    model = task.build()
    compiled = megatrain.compile(model, device=DEVICE, activations="offload", block_bytes=1)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.5), loss=task.loss, **mode)
    losses = [step([on_device(task.batch(10 * number + m, 2)) for m in range(2)]) for number in range(3)]
    step.flush()
    return [*losses, *model.parameters()]


def called() -> list[torch.Tensor]:
    """Calls with a backward, whose gradients the host uses at once."""
    torch.manual_seed(0)
    compiled, model = compiled_copy(Chain(), activations="offload", block_bytes=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses: list[torch.Tensor] = []
    for number in range(4):
        loss = compiled(torch.randn(4, 32).to(DEVICE)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if number % 2:  # some gradients are added to those before
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *model.parameters()]


def evaluated() -> list[torch.Tensor]:
    """Calls without a backward on several streams, and writes of the host into weights behind them."""
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


RUNS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "overlap": lambda: trained({"spread": False}),
    "spread": lambda: trained({}),
    "deferred": lambda: trained({"max_grad_norm": 0.5}),
    "called": called,
    "evaluated": evaluated,
}


def results(sim: Simulator, run: Callable[[], list[torch.Tensor]]) -> Iterator[list[torch.Tensor] | None]:
    """What a run gives in several orders; None if it failed."""
    for order in ("late", "late but compute", "late compute"):
        choose(sim, order)
        try:
            found = [tensor.detach() for tensor in run()]
            torch.accelerator.synchronize()
            sim.order("early")
            yield [tensor.cpu().clone() for tensor in found]
        except Exception:  # a run without one of its waits may end in any way; that is noticed too
            sim.order("early")
            torch.accelerator.synchronize()
            yield None


def places(sim: Simulator) -> list[tuple[CallName, str]]:
    """All places that the runs come by."""
    found: dict[tuple[CallName, str], None] = {}

    def noted(kind: CallName) -> Callable[[traceback.StackSummary], bool]:
        def note(stack: traceback.StackSummary) -> bool:
            if place := place_of(kind, stack):
                found[kind, place] = None
            return False

        return note

    for kind in KINDS:
        sim.drop_where(kind, noted(kind))
    for run in RUNS.values():
        run()
    sim.reset()
    return sorted(found)


def test_each_place_that_orders_streams_is_noticed_or_listed_with_a_reason(sim: Simulator):
    expected = {name: next(results(sim, run)) for name, run in RUNS.items()}
    for name, run in RUNS.items():
        for found in results(sim, run):
            assert same(expected[name], found), name
    found = places(sim)
    assert set(REDUNDANT) <= {place for _, place in found}, "these are there no more: take them off the list"
    tried: list[tuple[CallName, str]] = [(kind, place) for kind, place in found if is_wide() or place not in REDUNDANT]
    unnoticed: set[str] = set()
    for kind, place in tried:
        # Another thread may force the device's work first, so that a place isn't missed in each run.
        attempts = 1 if place in REDUNDANT else 3
        if not any(is_noticed(sim, kind, place, expected) for _ in range(attempts)):
            unnoticed.add(place)
    assert unnoticed - set(REDUNDANT) == set()
    assert not is_wide() or unnoticed == set(REDUNDANT), "these are noticed: take them off the list"


def is_noticed(sim: Simulator, kind: CallName, place: str, expected: dict[str, list[torch.Tensor] | None]) -> bool:
    for name, run in RUNS.items():
        sim.reset()
        sim.drop_where(kind, lambda stack: place_of(kind, stack) == place)
        noticed = any(not same(expected[name], found) for found in results(sim, run))
        gc.collect()
        noticed = bool(sim.violations()) or noticed
        sim.reset()
        if noticed:
            return True
    return False


def same(left: list[torch.Tensor] | None, right: list[torch.Tensor] | None) -> bool:
    return left is not None and right is not None and all(map(torch.equal, left, right))
