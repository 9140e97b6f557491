"""Training steps of the real runtime on a simulated device, in modelled time: for cards that aren't here.

The simulated device computes nothing: each copy, each kernel and each update takes the time that a card's rates say.
So the threads, streams, waits and slots are real, and the seconds are modelled, never measured. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

import megatrain
from benchmarks.llamas import CONTEXT, SIZES, LlamaShape
from benchmarks.steps import OF_UPDATES
from megatrain.base.sizes import format_bytes
from megatrain.device.host_pages import HostPages
from megatrain.errors import MegatrainError
from megatrain.hardware.hardware import Hardware
from megatrain.optim.block_update import MasterStep
from megatrain.optim.fast.adamw import native_reason
from megatrain.optim.masters.halves import SplitMaster
from megatrain.optim.norm import GradientNorm
from megatrain.planning import host_plan
from megatrain.runtime.stores import host_store as moving
from megatrain.scheduler.items import Stream
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.simulate import op_durations
from tests.simulated_device.loading import load, unavailable
from tests.simulated_device.simulator import HardwareProfile, Simulator, Span
from tests.simulated_device.virtual_hosts import VirtualHosts

_PLENTY = 1 << 50
_CARDS = ("rtx-3080", "rtx-3090", "rtx-4090", "h100-sxm", "h200", "gh200")


# -- a host with any amount of memory ----------------------------------------------------------------------------

_FOLD = 64 << 20
_SHARED_FIXED = mmap.MAP_SHARED | 0x10  # MAP_FIXED
_MAP_NORESERVE = 0x4000  # which Python 3.11 doesn't name


class Folded:
    """Makes host memory of any size from few pages, which lie at many addresses: what is written is lost."""

    def __init__(self) -> None:
        self._file = os.memfd_create("folded")
        os.truncate(self._file, _FOLD)
        self._map = ctypes.CDLL(None, use_errno=True).mmap
        self._map.restype = ctypes.c_void_p
        number = ctypes.c_int
        self._map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]

    def pages(self, nbytes: int) -> HostPages:
        """Takes the place of `HostPages.of`."""
        whole = HostPages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        for offset in range(0, nbytes, _FOLD):
            part = min(_FOLD, nbytes - offset)
            found = self._map(start + offset, part, mmap.PROT_READ | mmap.PROT_WRITE, _SHARED_FIXED, self._file, 0)
            if found != start + offset:
                raise OSError(ctypes.get_errno(), "host memory can't be folded")
        return whole


@contextmanager
def host_of_any_size() -> Generator[None]:
    """During the body the host has memory for any model, holds no values in it, and computes no update or norm."""
    native_reason()  # which looks at the bits of an update, and is asked whether updates are sure
    folded = Folded()
    with ExitStack() as stack:
        for owner, name, made in (
            (HostPages, "of", staticmethod(folded.pages)),
            (moving, "available_bytes", lambda: _PLENTY),
            (host_plan, "available_now", lambda: _PLENTY),
            (SplitMaster, "store", lambda self, values, spare: None),
            (MasterStep, "__call__", lambda self, optimizer: None),
            (MasterStep, "prepare", lambda self, parameters, groups, states: None),
            (GradientNorm, "_norm_of", lambda self, gradient, dtype: torch.ones(())),
            (GradientNorm, "total", lambda self: torch.ones(())),
        ):
            stack.enter_context(patch.object(owner, name, made))
        yield


# -- steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelledStep:
    """One training step in modelled time, in seconds.

    Args:
        step_s: From an idle device to an idle device.
        predicted_s: By the simulator of schedules, from the times of its ops in another step.
        by_rates_s: By the simulator of schedules, from the machine's rates alone.
        holes: Bytes of torch's allocator beyond those that the schedule counts.
        spans: The device's work.
        host_s: The work of the host.
        updates_s: The updates alone; squares of gradients are summed beside the backward.
        backward_s: The backward's longest part: computing it, or copying its gradients.
        schedule: What ran.
    """

    step_s: float
    predicted_s: float
    by_rates_s: float
    holes: int
    spans: Sequence[Span]
    host_s: float
    updates_s: float
    backward_s: float
    schedule: Schedule

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds that each part of the machine works."""
        found = {"compute": 0.0, "h2d": 0.0, "d2h": 0.0}
        for span in self.spans:
            found[span.name if span.name in found else "compute"] += span.end - span.begin
        return {**found, "host": self.host_s}

    @property
    def bound_s(self) -> float:
        """No step of these ops is shorter: one part works so long.

        Serial updates begin when the device is done. Updates of clipped steps begin when all gradients are there, and
        all are done before the next backward begins.
        """
        device = max(seconds for name, seconds in self.busy.items() if name != "host")
        if self.schedule.kind.updates == "serial":
            return device + self.updates_s
        apart = self.backward_s + self.updates_s if self.schedule.kind.clip else 0.0
        return max(device, self.host_s, apart)

    @property
    def held_up_by(self) -> str:
        """The part that works longest."""
        return max(self.busy, key=self.busy.__getitem__)


def steps_of(
    simulator: Simulator, card: Hardware, size: LlamaShape, counts: Sequence[int], ways: Sequence[str]
) -> Generator[tuple[int, str, ModelledStep | str]]:
    """Takes steps of so many micro-batches in each way; yields a step in modelled time, or why there is none."""
    assert card.memory_bytes is not None, "each preset has a size"
    torch.accelerator.empty_cache()  # what the allocator keeps of a larger card would look free
    simulator.configure(capacity=card.memory_bytes)
    compiled = megatrain.compile(size.model(), device="sim", precision="bf16")
    ids = torch.zeros(1, CONTEXT, dtype=torch.long, device="sim")
    for count in counts:
        for way in ways:
            step = OF_UPDATES[way].step(compiled)
            try:
                yield count, way, _step_of(simulator, card, step, [{"input_ids": ids, "labels": ids}] * count)
            except MegatrainError as error:
                yield count, way, str(error).splitlines()[0]


def _step_of(simulator: Simulator, card: Hardware, step: megatrain.TrainStep, batch: Any) -> ModelledStep:
    step(batch)  # captures, allocates, and leaves updates for the next step
    torch.accelerator.reset_peak_memory_stats()
    hosts = VirtualHosts(simulator, card.host_bytes_per_s, card.op_s, card.update_s)
    simulator.set_profile(HardwareProfile.of(card))
    try:
        with simulator.spans() as spans:
            seconds = hosts.take(step, batch)
        predicted = hosts.predicted(step, batch)
    finally:
        simulator.set_profile(None)
    host_s, updates_s = (hosts.moved_bytes(Stream.HOST, what) / card.host_bytes_per_s for what in (None, "U"))
    return ModelledStep(
        step_s=seconds,
        predicted_s=predicted,
        by_rates_s=step.schedule.simulate(card).step_s,
        holes=torch.accelerator.max_memory_reserved() - step.schedule.device_bytes,
        spans=spans,
        host_s=host_s,
        updates_s=updates_s,
        backward_s=_backward_s(step.schedule, card),
        schedule=step.schedule,
    )


def _backward_s(schedule: Schedule, card: Hardware) -> float:
    """Seconds that the backwards of a step take on a card, or the copies of its gradients if these take longer."""
    found = {"B": 0.0, "G": 0.0}
    ops = dict(schedule.positions())
    for position, seconds in op_durations(schedule, card).items():
        if ops[position].what in found:
            found[ops[position].what] += seconds
    return max(found.values())


def rows(simulator: Simulator, options: argparse.Namespace) -> Generator[str]:
    """Yields the lines of the table, as they are known."""
    yield (
        "| card | model | tokens | way | step (modelled) | of bound | held up by | predicted | of rates | "
        "memory | holes |"
    )
    yield f"|{' --- |' * 11}"
    cases = [(card, size) for card in options.cards for size in options.sizes]
    for card, size in tqdm(cases, unit="case", disable=None):
        for count, way, found in steps_of(
            simulator, Hardware.preset(card), SIZES[size], options.micro_batches, options.ways
        ):
            head = f"| {card} | {size} | {count * CONTEXT} |"
            if isinstance(found, str):
                yield f"{head} {way} | {found} | | | | | | | |"
                continue
            ratios = [seconds / found.step_s for seconds in (found.predicted_s, found.by_rates_s)]
            yield (
                f"{head} {way} | {found.step_s:.3f} s | {found.step_s / found.bound_s:.3f} | "
                f"{found.held_up_by} | "
                f"{ratios[0]:.3f} | {ratios[1]:.3f} | {format_bytes(found.schedule.device_bytes)} | "
                f"{format_bytes(found.holes)} |"
            )
        gc.collect()  # the model's memory goes before the next one's comes


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=Hardware.presets(), default=_CARDS)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1.5B", "3B", "8B", "14B"])
    parser.add_argument("--ways", nargs="+", choices=list(OF_UPDATES), default=list(OF_UPDATES))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 8], help=f"each of {CONTEXT} tokens")
    options = parser.parse_args()
    if (reason := unavailable()) is not None:
        sys.exit(reason)
    simulator = load()
    simulator.configure(compute=False, poison=False)
    warnings.simplefilter("ignore")
    with host_of_any_size():
        for line in rows(simulator, options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
