"""`megatrain doctor`: what this machine has of what a training step uses, and what each finding costs."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from megatrain.base import torch_private
from megatrain.base.counts import counted
from megatrain.base.host_limits import available_bytes, locked_bytes, update_threads
from megatrain.base.native.native_kernel import ADAMW
from megatrain.base.progress import stage
from megatrain.base.sizes import format_bytes
from megatrain.device import Device, present_accelerator, usable
from megatrain.device.host_arena import HostArena
from megatrain.errors import ExecuteError
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import slot_share, unknown_card
from megatrain.scheduler.bands import format_s

_LOCKED_BYTES = 256 << 20
_BILLION = 10**9
# AdamW in one pass reads weights, gradients and two moments in fp32, and writes all but the gradients.
_PASS_BYTES = 28
# Host memory for a parameter: bf16 with its low half, its gradient, two moments; a frozen one in bf16.
_TRAINED_BYTES, _FROZEN_BYTES = 14, 2
# What is less is worth a line.
_WHOLE_SLOT = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    found: str
    cost: str = ""
    is_flawed: bool = False

    def __str__(self) -> str:
        text = f"{'!' if self.is_flawed else ' '} {self.what:<14}{self.found}"
        return f"{text}\n{'':<16}{self.cost}" if self.cost else text


def run(device: str | None = None) -> int:
    """Looks at the machine, measures it for some seconds (or reads what was measured before), and prints all.

    Returns:
        0 if nothing could be better, else 1.

    Raises:
        OptionError: If the device can't be used.
    """
    place = usable(device)
    count = 0
    for finding in findings(place):
        print(finding, flush=True)
        count += finding.is_flawed
    print(f"\n{count or 'nothing'} could be better{', marked by !' if count else ''}")
    return int(count > 0)


def findings(device: Device) -> Iterator[Finding]:
    """Yields what is found, what takes no time first."""
    yield _torch()
    yield _device(device)
    yield from _slot(device)
    yield _compiler()
    yield _libraries()
    yield _memory()
    yield from _locking(device)
    with stage("measuring"):
        machine = Hardware.measure(device)
    yield from _rates(device, machine)


def _torch() -> Finding:
    is_newer = TorchVersion(torch.__version__) >= torch_private.UNTESTED
    cost = f"newer than the tested ones ({torch_private.TESTED}): run `megatrain verify` first" if is_newer else ""
    return Finding("torch", f"{torch.__version__}, Python {platform.python_version()}", cost, is_newer)


def _device(device: Device) -> Finding:
    found = f"{device}, {device.card() or device.described()}"
    if device.is_host:
        there = present_accelerator()
        cost = "blocks compute on the processor" if there is None else f"{there} is there, and was not asked for"
        return Finding("device", f"{found}: no accelerator" if there is None else found, cost)
    memory = device.memory()
    return Finding("device", f"{found}, {format_bytes(memory.free)} of {format_bytes(memory.total)} free",
                   unknown_card(device))  # fmt: skip


def _slot(device: Device) -> Iterator[Finding]:
    if device.is_host:
        return
    share = slot_share(device)
    is_slow = share < _WHOLE_SLOT
    cost = f"copies take {1 / share:.1f} times as long as in a slot with all lanes" if is_slow else ""
    yield Finding("slot", f"{share:.0%} of the card's own link", cost, is_slow)


def _compiler() -> Finding:
    fault = ADAMW.fault()
    if fault is None:
        return Finding("compiler", "there is one: AdamW takes one pass over memory")
    return Finding("compiler", fault, "AdamW takes torch's passes over memory, one for each of its operations", True)


def _libraries() -> Finding:
    needed = ("transformers", "accelerate", "datasets", "peft", "trl")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return Finding("libraries", "all that `megatrain train` needs")
    install = f"for `megatrain train`: pip install {' '.join(missing)}"
    return Finding("libraries", f"without {', '.join(missing)}", install, is_flawed=True)


def _memory() -> Finding:
    free = available_bytes()
    whole, frozen = (free / each / _BILLION for each in (_TRAINED_BYTES, _FROZEN_BYTES))
    return Finding(
        "host memory", f"{format_bytes(free)} free, {counted(update_threads(), 'thread')} for updates",
        f"room to train about {whole:.1f} billion parameters by AdamW, or adapters of a model of {frozen:.1f} billion",
    )  # fmt: skip


def _locking(device: Device) -> Iterator[Finding]:
    if not device.lock_bytes:
        return
    arena = HostArena(_LOCKED_BYTES)
    size = format_bytes(_LOCKED_BYTES)
    try:
        arena.lock(device)
    except ExecuteError as error:
        cost = "weights are copied once more, through a small locked ring. " + str(error).splitlines()[-1].strip()
        yield Finding("page-locking", f"{size} refused", cost, True)
        return
    arena.unlock()
    limit = locked_bytes()
    if limit is None:
        yield Finding("page-locking", f"{size} locked")
        return
    in_all, origin = format_bytes(limit[0]), limit[1]
    yield Finding("page-locking", f"{size} locked, {in_all} in all ({origin})",
                  "larger weights are copied once more, through a small locked ring", True)  # fmt: skip


def _rates(device: Device, machine: Hardware) -> Iterator[Finding]:
    rates: Any = machine.flops_per_s if isinstance(machine.flops_per_s, Mapping) else {"all": machine.flops_per_s}
    products = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in rates.items() if "attention" not in kind)
    yield Finding("compute", f"{products} TFLOP/s of matrix products")
    crossing = 2 * _BILLION / machine.h2d_bytes_per_s
    staged = "" if machine.locked_bytes is None else f"; {machine.staged_bytes_per_s / 1e9:.1f} through the ring"
    yield Finding(
        "copies",
        f"{machine.h2d_bytes_per_s / 1e9:.1f} GB/s to {device}, {machine.d2h_bytes_per_s / 1e9:.1f} back{staged}",
        f"weights of 1 billion parameters in bf16 cross in {format_s(crossing)}",
    )  # fmt: skip
    update = _PASS_BYTES * _BILLION / machine.host_bytes_per_s
    yield Finding(
        "host rate", f"{machine.host_bytes_per_s / 1e9:.1f} GB/s of updates",
        f"AdamW updates 1 billion parameters in {format_s(update)}; more tokens a step share that",
    )  # fmt: skip
