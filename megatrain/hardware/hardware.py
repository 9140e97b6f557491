"""Hardware: the rates of a machine, each measured, from the table of presets, or given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isinf
from typing import TYPE_CHECKING, Any

from megatrain.base.checks import Rule, checked, count, mapping_of, number, one_of, optional
from megatrain.base.host_limits import locked_bytes
from megatrain.base.sizes import format_bytes
from megatrain.hardware.presets import DISK, PRESETS, preset_figures
from megatrain.hardware.work import MEMORY, RATES, SHARED_BYTES, Works

if TYPE_CHECKING:  # its folder imports torch, and this file is imported where torch isn't
    from megatrain.device import Device

_RATE = number(above=0, example=1e9)
_SECONDS = number(least=0, below=inf, example=0.0)
_SHARE = number(above=0, below=1 + 1e-12, example=1.0)


def _products_fault(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return _RATE.fault(value)
    return mapping_of(_RATE, one_of(*RATES)).fault(value) if value else "is empty"


_PRODUCTS = Rule(
    f"a number above 0, or one by name: {', '.join(RATES)}",
    '{name}=1e12, or {name}={{"bf16": 1e14, "fp32": 2e13}}',
    _products_fault,
)

OF_A_RECORDING = 40
"""Launches of kernels that take Python as long as a block whose kernels are recorded: the recording's launch, copies of
what goes in and out, and the look-up. Measured: 380 us where a call of an operator took 5 to 10 us."""

RING_MOVES = 3
"""How often a byte on its way through a ring moves within the host's memory: read, written, read by the device."""

# Which rate counts where a machine's own isn't known, and by what it is divided.
_INSTEAD = {"tf32": ("fp32", 1), "bf16": ("fp32", 1), "fp64": ("fp32", 2), "fp8": ("bf16", 1), "int8": ("bf16", 1)}


@checked(
    h2d_bytes_per_s=_RATE,
    d2h_bytes_per_s=_RATE,
    flops_per_s=_PRODUCTS,
    launch_s=_SECONDS,
    host_bytes_per_s=_RATE,
    further_rates=mapping_of(_RATE),
    memory_bytes_per_s=_RATE,
    issue_s=_SECONDS,
    op_s=_SECONDS,
    wake_s=_SECONDS,
    update_s=_SECONDS,
    h2d_beside=_SHARE,
    d2h_beside=_SHARE,
    compute_beside=_SHARE,
    memory_bytes=optional(count(1)),
    locked_bytes=optional(count(1)),
    staged_bytes_per_s=_RATE,
    host_moves=count(1, RING_MOVES),
    disk_bytes_per_s=_RATE,
    disk_rating_bytes=optional(count(1)),
)
@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a machine: measured by `measure`, from the table by `preset`, or given.

    All rates are what work reaches, not what a data sheet says. Of a stream whose speed depends on what runs at the
    same time, the rate is that of the stream alone, and a share says what is left of it next to others.

    Args:
        h2d_bytes_per_s: Copies to the device, from page-locked memory.
        d2h_bytes_per_s: Copies to the host, likewise.
        flops_per_s: Floating-point operations of products: one rate, or one by name as in `Kernels.rate`: `"bf16"`
            (fp16 as well), `"tf32"`, `"fp32"`, `"bf16 attention"` and so on. What is missing counts as a similar one.
        launch_s: Seconds of the device for each kernel and copy, and of the host for each of its ops, beyond the work.
        host_bytes_per_s: Bytes per second of host memory, as updates and norms read and write them alone; without a
            figure they take no time. Updates, norms and copies share it: together they move no more.
        further_rates: Bytes per second of streams that a program adds, by name.
        memory_bytes_per_s: What kernels read and write in the device's memory; without a figure this takes no time.
        issue_s: Seconds that Python takes to launch a kernel, on average over forward and backward of a block, which
            takes no less than that for each of its kernels. 0 where kernels run in the calls that launch them: there
            `launch_s` has it.
        op_s: Seconds that Python takes for each op of compute and of the host besides.
        wake_s: Seconds to wake the other threads of a kernel that several processors compute, beyond `launch_s`; 0
            where the device isn't the host. A kernel of less than 512 KiB is computed by one.
        update_s: Seconds that an update takes for each parameter, beyond the bytes.
        h2d_beside: The share of its rate that a copy to the device keeps while one to the host is under way.
        d2h_beside: The reverse: of a copy to the host.
        compute_beside: The share that compute keeps while another stream works; less than 1 where the device is the
            host, and streams share its cores.
        memory_bytes: Size of the device's memory; None if unknown.
        locked_bytes: Most bytes of host memory that the system page-locks; None for all of it.
        staged_bytes_per_s: Copies through a small ring of page-locked memory, each way, where weights aren't locked.
        host_moves: How often a byte of a copy moves within the host's memory.
        disk_bytes_per_s: What the disk reads of large files, where frozen weights stay in them, and reads or writes of
            the optimizer's state, where that is in one.
        disk_rating_bytes: Bytes that may be written in the drive's life, as its maker says (TBW); None if unknown.
        name: Printed.
        origins: By the name of a figure where it is from; what has none was given.

    Raises:
        OptionError: If a rate isn't positive, a time is negative, or a share isn't one.

    >>> from megatrain.hardware.work import Kernels
    >>> machine = Hardware(25e9, 25e9, {"bf16": 1e14, "fp32": 2e13}, memory_bytes_per_s=1e12)
    >>> machine.seconds((Kernels("bf16", 10**12, 10**9), Kernels("memory", 0, 2 * 10**9)))
    0.012
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    flops_per_s: float | Mapping[str, float] = field(hash=False)
    launch_s: float = 0.0
    host_bytes_per_s: float = inf
    further_rates: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    memory_bytes_per_s: float = inf
    issue_s: float = 0.0
    op_s: float = 0.0
    wake_s: float = 0.0
    update_s: float = 0.0
    h2d_beside: float = 1.0
    d2h_beside: float = 1.0
    compute_beside: float = 1.0
    memory_bytes: int | None = None
    locked_bytes: int | None = None
    staged_bytes_per_s: float = inf
    host_moves: int = 1
    disk_bytes_per_s: float = DISK
    disk_rating_bytes: int | None = None
    name: str = ""
    origins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False, compare=False)

    @staticmethod
    def measure(device: Any = None, *, cache: Any = None, fresh: bool = False) -> Hardware:
        """Measures this machine in a few seconds, or reads what was measured before.

        Args:
            device: A device as for `compile`; None takes the accelerator, or the CPU.
            cache: The folder of what was measured; None takes `.cache/megatrain` of the user's home. There is a file
                for each machine, device, driver, version of torch, and number of threads.
            fresh: Whether to measure again.

        Raises:
            OptionError: If an argument has a wrong value, or the device can't be used.
        """
        # Later: this file is imported where torch isn't.
        from megatrain.device import usable
        from megatrain.hardware.measured import measured_figures

        place = usable(device)
        return on_this_system(Hardware(**measured_figures(place, cache, fresh, accept=Hardware)), place)

    @staticmethod
    @checked(name=one_of(*PRESETS))
    def preset(name: str) -> Hardware:
        """A machine of the table, whose figures are published ones, measured by others, or assumptions: print it.

        Args:
            name: Such as `"rtx-4090"`.

        Raises:
            OptionError: If the table has no such machine; the error lists the names.
        """
        return Hardware(**preset_figures(name))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names of the machines in the table."""
        return tuple(PRESETS)

    @checked(name=one_of(*RATES))
    def product_rate(self, name: str) -> float:
        """FLOP/s of products by the name of their rate, or of the most similar one that is known."""
        return self._product_rate(name)

    def _product_rate(self, name: str) -> float:
        if not isinstance(self.flops_per_s, Mapping):
            return self.flops_per_s
        divisor = 1
        while name not in self.flops_per_s:
            kind, _, is_attention = name.partition(" ")
            name, more = (kind, 1) if is_attention else _INSTEAD.get(name, ("", 1))
            divisor *= more
            if not name:
                return max(self.flops_per_s.values()) / divisor
        return self.flops_per_s[name] / divisor

    def seconds(self, works: Works, *, is_recorded: bool = False) -> float:
        """Seconds that an op with these kernels takes, one by one; no less than Python takes to launch them.

        Args:
            works: The kernels.
            is_recorded: They are launched by one call.
        """
        taken, kernels, woken = 0.0, 0, 0
        for rate, flops, nbytes, number_of in works:
            moving = nbytes / self.memory_bytes_per_s
            taken += moving if rate == MEMORY else max(moving, flops / self._product_rate(rate))
            kernels += number_of
            woken += number_of if nbytes >= number_of * SHARED_BYTES else 0
        taken += kernels * self.launch_s + woken * self.wake_s
        # Python launches kernels while the device works, or else it does nothing else meanwhile.
        launches = OF_A_RECORDING if is_recorded else kernels
        return max(taken, launches * self.issue_s + self.op_s) if self.issue_s else taken + self.op_s

    @property
    def is_staged(self) -> bool:
        """Whether copies pass through a ring."""
        return self.host_moves > 1

    @property
    def is_shared(self) -> bool:
        """Whether the speed of a stream depends on what others do."""
        return min(self.h2d_beside, self.d2h_beside, self.compute_beside) < 1 or not isinf(self.host_bytes_per_s)

    def __str__(self) -> str:
        return _text(self)


def of_weights(machine: Hardware, nbytes: int) -> Hardware:
    """A machine for a model with so many bytes of weights: with the ring's rates if the system can't lock them."""
    if machine.locked_bytes is None or nbytes <= machine.locked_bytes:
        return machine
    origins = {**machine.origins, **dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), "through the ring")}
    return replace(
        machine,
        h2d_bytes_per_s=min(machine.h2d_bytes_per_s, machine.staged_bytes_per_s),
        d2h_bytes_per_s=min(machine.d2h_bytes_per_s, machine.staged_bytes_per_s),
        host_moves=RING_MOVES,
        origins=origins,
    )


def of_files(machine: Hardware, crossing: int, read: int) -> Hardware:
    """A machine for weights that stay in their files: they cross through the ring, no faster than the disk gives them.

    Args:
        machine: Its rates.
        crossing: Bytes that cross in a step.
        read: Bytes of these that the disk reads.
    """
    rate = min(machine.h2d_bytes_per_s, machine.staged_bytes_per_s)
    disk = machine.disk_bytes_per_s * crossing / read if read else rate
    origins = {**machine.origins, "h2d_bytes_per_s": "from files, through the ring"}
    return replace(machine, h2d_bytes_per_s=min(rate, disk), host_moves=RING_MOVES, origins=origins)


def on_this_system(machine: Hardware, device: Device | None) -> Hardware:
    """A machine with the limit that this system has for page-locked memory, where a device gains from that."""
    limit = None if device is None or not device.lock_bytes else locked_bytes()
    if limit is None:
        return machine
    return replace(machine, locked_bytes=limit[0], origins={**machine.origins, "locked_bytes": limit[1]})


_GIVEN = "given"
# Name of the field, its label, its unit, and what one of the unit is.
_FIGURES = (
    ("flops_per_s", "products", "TFLOP/s", 1e12),
    ("memory_bytes_per_s", "device memory", "GB/s", 1e9),
    ("memory_bytes", "device memory, size", "bytes", 1),
    ("h2d_bytes_per_s", "copies to the device", "GB/s", 1e9),
    ("d2h_bytes_per_s", "copies to the host", "GB/s", 1e9),
    ("h2d_beside", "to the device, beside the other way", "of it", 1),
    ("d2h_beside", "to the host, beside the other way", "of it", 1),
    ("host_bytes_per_s", "host memory, updates and copies", "GB/s", 1e9),
    ("locked_bytes", "host memory that can be locked", "bytes", 1),
    ("staged_bytes_per_s", "copies through a locked ring", "GB/s", 1e9),
    ("disk_bytes_per_s", "disk, large files", "GB/s", 1e9),
    ("disk_rating_bytes", "disk, writes in its life", "bytes", 1),
    ("compute_beside", "compute, beside others", "of it", 1),
    ("launch_s", "launch of a kernel, device", "us", 1e-6),
    ("issue_s", "launch of a kernel, Python", "us", 1e-6),
    ("op_s", "an op besides, Python", "us", 1e-6),
    ("wake_s", "waking threads for a kernel", "us", 1e-6),
    ("update_s", "update of a parameter, besides bytes", "us", 1e-6),
    ("further_rates", "stream", "GB/s", 1e9),
)
# Figures that mean nothing at these values are left out unless somebody stated them.
_NONE = {
    "h2d_beside": 1.0,
    "d2h_beside": 1.0,
    "compute_beside": 1.0,
    "launch_s": 0.0,
    "issue_s": 0.0,
    "op_s": 0.0,
    "wake_s": 0.0,
    "update_s": 0.0,
    "disk_bytes_per_s": DISK,
}


def _text(machine: Hardware) -> str:
    """Prints a figure a line: what it is, how much, and whether it was measured, given, or is from the table."""
    rows = [row for figure in _FIGURES for row in _rows(machine, *figure)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    head = f"hardware: {machine.name}" if machine.name else "hardware"
    lines = [
        f"  {label:<{widths[0]}}  {value:>{widths[1]}}  {unit:<7}  {origin}" for label, value, unit, origin in rows
    ]
    return "\n".join([head, *lines])


def _rows(machine: Hardware, name: str, label: str, unit: str, one: float) -> Iterator[tuple[str, str, str, str]]:
    value, origins = getattr(machine, name), machine.origins
    if isinstance(value, Mapping):
        for kind, rate in value.items():  # pyright: ignore[reportUnknownVariableType]
            origin = origins.get(f"{name} {kind}", origins.get(name, _GIVEN))
            yield f"{label} {kind}", f"{rate / one:.4g}", unit, origin
    elif name == "staged_bytes_per_s" and machine.locked_bytes is None:
        return  # nothing passes through a ring
    elif value is not None and (name in origins or not (isinf(value) or value == _NONE.get(name))):
        text, unit = (format_bytes(value).rsplit(" ", 1)) if unit == "bytes" else (f"{value / one:.4g}", unit)
        yield label, text, unit, origins.get(name, _GIVEN)
