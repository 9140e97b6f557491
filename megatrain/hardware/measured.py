"""measured_figures(): the figures of a machine, measured now or read from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.base.checks import PATH, checked, optional
from megatrain.base.host_limits import available_bytes, cache_bytes, update_threads
from megatrain.base.native.native_kernel import ADAMW, LANES
from megatrain.device import Device, DeviceStream
from megatrain.device.bus import rings
from megatrain.device.host_arena import HostArena
from megatrain.device.kinds import HOST, usable
from megatrain.errors import ExecuteError, MegatrainError
from megatrain.hardware.kernels_alone import (
    Beside,
    attention_rates,
    launch_s,
    memory_rate,
    op_s,
    product_rates,
    seconds_of,
    wake_s,
)
from megatrain.tracer.spec import DEVICE

# Copies within the host have to be larger than its caches.
_BYTES, _HOST_BYTES = 32 << 20, 96 << 20
_COPIES = 8
_LEAST_HELD, _MOST_HELD = 256 << 20, 4 << 30
_BEYOND_CACHES = 4
# Parameter, gradient and two moments, in fp32.
_HELD = 4 * 4
# AdamW reads them, and writes three of them.
_TOUCHED = 7 * 4
# Parameters of a layer.
_OF_A_BLOCK = 9
# Those of a step with a small learning rate; see `adamw.c`.
_SCALARS = (1.0, 1.0 - 1e-6, 0.1, 0.999, 1e-3, 0.05, 1e-8, -1e-3)
_FORMAT = 6  # one more whenever a figure means something else than before


@checked(device=optional(DEVICE), cache=optional(PATH))
def measured_figures(
    device: Device | torch.device | str | None,
    cache: str | os.PathLike[str] | None,
    fresh: bool,
    *,
    accept: Callable[..., object],
) -> dict[str, Any]:
    """The figures of a machine, as `accept` takes them; see `Hardware.measure`."""
    place = usable(device)
    facts = [place.described(), f"torch {torch.__version__}", f"{torch.get_num_threads()} threads"]
    folder = Path.home() / ".cache" / "megatrain" if cache is None else Path(cache)
    measure: Callable[[], Mapping[str, Any]] = partial(_measured, place)
    figures = dict(cached(folder, "; ".join(facts), measure, accept=accept, fresh=fresh))
    names = [name for name, value in figures.items() if value is not None and name != "name"]
    return {**figures, "origins": dict.fromkeys(names, "measured")}


def _measured(device: Device) -> dict[str, Any]:
    # As many as a training step gives its updates; where the host computes, blocks and updates have torch's.
    threads = torch.get_num_threads() if device.is_host else update_threads(device.launching_threads)
    update = Update(threads)
    with ThreadPoolExecutor(1) as host_stream:
        # As in a training step: with more threads than processors, OpenMP lets those that wait sleep at once.
        host_stream.submit(update).result()
        figures = _of_kernels(device)
    figures |= {"host_bytes_per_s": update.rate(0.15), "update_s": update_s()}
    link = Link(device)
    try:
        figures |= _of_link(device, link)
        if device.is_host:
            figures["compute_beside"] = compute_beside(device, link)
        else:
            figures |= link.staged()
    finally:
        link.close()
        device.empty_cache()  # segments that are larger than a model's tensors would hold these
    return figures


def _of_kernels(device: Device) -> dict[str, Any]:
    woken = wake_s() if device.is_host else 0.0
    rates = product_rates(device, woken)
    launched, issued = launch_s(device)
    return {
        "name": str(device),
        "flops_per_s": {**rates, **attention_rates(device, rates)},
        "memory_bytes_per_s": memory_rate(device, launched + woken),
        "memory_bytes": device.memory().total,
        "launch_s": launched,
        "issue_s": issued,
        "op_s": op_s(),
        "wake_s": woken,
    }


def _of_link(device: Device, link: Link) -> dict[str, Any]:
    h2d, d2h = link.alone()
    h2d_both, d2h_both = link.both()
    return {
        "h2d_bytes_per_s": h2d,
        "d2h_bytes_per_s": d2h,
        "h2d_beside": min(1.0, h2d_both / h2d),
        "d2h_beside": min(1.0, d2h_both / d2h),
    }


def compute_beside(device: Device, link: Link) -> float:
    """The share that compute keeps during copies, where the host computes."""

    def copies() -> None:
        link.to_device()
        link.to_host()
        device.synchronize()

    x = torch.ones(512, 512)
    product_s = seconds_of(device, lambda: x @ x, least_s=0.1)
    with Beside(copies):
        slowed_s = seconds_of(device, lambda: x @ x, least_s=0.2)
    return min(1.0, product_s / slowed_s)


class Link:
    """Memory of both sides, and the copies between."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nbytes = _HOST_BYTES if device.is_host else _BYTES
        self._arenas = [HostArena(self._nbytes) for _ in range(2)]
        self._there = [device.allocate(self._nbytes) for _ in range(2)]
        # Copies with memory that can't be page-locked are what a step has then, too.
        with contextlib.suppress(ExecuteError):
            for arena in self._arenas:
                arena.lock(device)

    def close(self) -> None:
        """Gives all of it back."""
        for arena in self._arenas:
            arena.unlock()
            arena.close()
        self._there.clear()

    def to_device(self) -> None:
        """One copy to the device."""
        self._device.copy(self._there[0], self._arenas[0].tensor)

    def to_host(self) -> None:
        """One copy to the host."""
        self._device.copy(self._arenas[1].tensor, self._there[1])

    def alone(self) -> tuple[float, float]:
        """Bytes per second each way."""
        taken = [seconds_of(self._device, copy, least_s=0.1) for copy in (self.to_device, self.to_host)]
        return self._nbytes / taken[0], self._nbytes / taken[1]

    def staged(self) -> dict[str, float]:
        """Bytes per second to the device through a ring; nothing if no memory can be locked for one."""
        found = rings(self._device)
        if found is None:
            return {}
        source = torch.zeros(self._nbytes, dtype=torch.uint8)
        taken = seconds_of(self._device, lambda: found[0].to_device(self._there[0], source), least_s=0.1)
        return {"staged_bytes_per_s": self._nbytes / taken}

    def both(self) -> tuple[float, float]:
        """Bytes per second each way while both ways are under way."""
        streams = [self._device.new_stream() for _ in range(2)]
        if streams[0] is None or streams[1] is None:
            return self._both_by_threads()
        return self._both_by_streams(streams[0], streams[1])

    def _both_by_streams(self, up: DeviceStream, down: DeviceStream) -> tuple[float, float]:
        device, before = self._device, self._device.current_stream()
        assert before is not None
        base = device.moment()
        start, moments = before.record_event(), [[], []]
        for stream in (up, down):
            stream.wait_event(start)
        for _ in range(_COPIES):
            for stream, copy, found in ((up, self.to_device, moments[0]), (down, self.to_host, moments[1])):
                device.enter(stream)
                copy()
                found.append(device.moment())
        device.enter(before)
        ends = [[0.0, *(moment.seconds_since(base) for moment in found)] for found in moments]
        one, other = rates_together(ends, self._nbytes)
        return one, other

    def _both_by_threads(self) -> tuple[float, float]:
        ends: list[list[float]] = [[], []]
        barrier = threading.Barrier(2)

        def run(copy: Callable[[], None], found: list[float]) -> None:
            barrier.wait()
            found.append(time.perf_counter())
            # Until both have copied: a busy machine may start one long after the other.
            while len(found) <= 2 * _COPIES or min(map(len, ends)) <= 2 * _COPIES:
                copy()
                found.append(time.perf_counter())

        copies = (self.to_device, self.to_host)
        threads = [threading.Thread(target=run, args=pair) for pair in zip(copies, ends, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one, other = rates_together(ends, self._nbytes)
        return one, other


def rates_together(ends: Sequence[Sequence[float]], nbytes: int) -> tuple[float, ...]:
    """Bytes per second of several queues, by when each began and each of its copies ended, while all of them worked."""
    begin, end = max(times[0] for times in ends), min(times[-1] for times in ends)
    return tuple(nbytes * (_copies_until(times, end) - _copies_until(times, begin)) / (end - begin) for times in ends)


def _copies_until(times: Sequence[float], moment: float) -> float:
    """How many copies were done then; of one under way, the part."""
    done = max(number for number, time_s in enumerate(times) if time_s <= moment)
    if done == len(times) - 1:
        return float(done)
    return done + (moment - times[done]) / (times[done + 1] - times[done])


def elements_beyond(caches: int, available: int) -> int:
    """How many parameters an update has so that their memory is far larger than the caches, as a model's is.

    A server's caches hold 300 MiB and more, and are three times as fast as its memory. At most an eighth of what is
    free is taken.
    """
    nbytes = min(max(_LEAST_HELD, _BEYOND_CACHES * caches), _MOST_HELD, max(_LEAST_HELD, available // 8))
    return nbytes // (_HELD * LANES) * LANES


class Update:
    """An update of the host: megatrain's own AdamW, or torch's where there is no C compiler."""

    def __init__(self, threads: int) -> None:
        number = elements_beyond(cache_bytes(), available_bytes())
        values, gradient, *moments = (torch.full((number,), 1e-3) for _ in range(4))
        self._nbytes = _TOUCHED * number
        self._run = _torchs(values, gradient, moments)
        if ADAMW.fault() is None:
            self._held = values, gradient, *moments  # the kernel gets addresses alone
            at, of, *both = (tensor.data_ptr() for tensor in self._held)
            self._run = lambda: ADAMW((at, 0, of, 0, *both, number), _SCALARS, 1, threads)

    def __call__(self) -> None:
        """One update."""
        self._run()

    def rate(self, least_s: float) -> float:
        """Bytes per second that it reads and writes."""
        return self._nbytes / seconds_of(HOST, self._run, least_s=least_s)


def update_s() -> float:
    """Seconds of an update for each parameter, beyond the bytes: of torch's AdamW, one parameter after the other."""
    parameters = [torch.nn.Parameter(torch.ones(LANES)) for _ in range(_OF_A_BLOCK)]
    for parameter in parameters:
        parameter.grad = torch.ones(LANES)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=False)
    return seconds_of(HOST, optimizer.step, least_s=0.02) / _OF_A_BLOCK


def _torchs(values: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor]) -> Callable[[], None]:
    parameter = torch.nn.Parameter(values)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    names = ("exp_avg", "exp_avg_sq")
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **dict(zip(names, moments, strict=True))}

    def run() -> None:
        optimizer.step()

    return run


def cached(
    folder: Path,
    facts: str,
    measure: Callable[[], Mapping[str, Any]],
    *,
    accept: Callable[..., object],
    fresh: bool = False,
) -> Mapping[str, Any]:
    """What `measure` found under the same facts before, or finds now.

    A file that can't be read, is of other facts or isn't whole counts as none. One that can't be written is none of the
    caller's concern: the next process measures again. `accept` raises an error unless figures are whole and right.
    """
    file = folder / f"hardware-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    found = None if fresh else _read(file, facts, accept)
    if found is None:
        found = measure()
        with contextlib.suppress(OSError):
            _write(file, {"format": _FORMAT, "facts": facts, "figures": found})
    return found


def _read(file: Path, facts: str, accept: Callable[..., object]) -> dict[str, Any] | None:
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT or data["facts"] != facts:
            return None
        accept(**data["figures"])
        return data["figures"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MegatrainError):
        return None


def _write(file: Path, data: Mapping[str, Any]) -> None:
    """Writes a file that is there whole or not at all, also if another process writes it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.stem}-", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as part:
            json.dump(data, part, indent=1)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
