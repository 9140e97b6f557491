"""Device: the questions of the library to a device, answered for the plainest device."""

from __future__ import annotations

import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch.backends import cuda, cudnn, opt_einsum
from torch.nn import attention

from megatrain.base.torch_private import attention_priority, kernels_of_op, python_kernels
from megatrain.device.host_pages import HostPages

# Looked up once: modules of settings answer through Python.
_MATMUL, _CONV, _RNN, _EINSUM = cuda.matmul, cudnn.conv, cudnn.rnn, getattr(opt_einsum, "m", opt_einsum)  # pyright: ignore
_flash: Callable[[], object] = getattr(attention, "current_flash_attention_impl", lambda: None)


def kernel_settings() -> Hashable:
    """The settings as they are now: where they differ, recorded work isn't what eager calls would do."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        tuple(attention_priority()),
        _flash(),
        cuda.preferred_blas_library(),
        cuda.preferred_linalg_library(),
        cuda.preferred_rocm_fa_library(),
        _MATMUL.fp32_precision,  # reads of the older names fail once this was set
        _MATMUL.allow_fp16_reduced_precision_reduction,
        _MATMUL.allow_bf16_reduced_precision_reduction,
        _MATMUL.allow_fp16_accumulation,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
        _CONV.fp32_precision,
        _RNN.fp32_precision,
        _EINSUM.enabled,
        _EINSUM.strategy,
        len(python_kernels),
    )


def replaced_kernel() -> str:
    """Names a kernel of torch's own operators that others have written in Python; empty if there is none."""
    home = torch.__path__[0]
    for name in sorted(python_kernels):
        namespace, operator, key = name.split("/")
        if namespace != "aten" or key == "Meta":
            continue
        lines = [line for line in kernels_of_op(f"aten::{operator}").splitlines() if line.startswith(f"{key}")]
        if any(".py:" in line and f" {home}" not in line for line in lines):
            return f"aten::{operator} of {key}"
    return ""


class LaunchGraphs(ABC):
    """Makes launch graphs, and keeps the memory in which they run.

    Tensors that a graph makes are in memory that no other work gets, for as long as this object is there, also when no
    graph is left, or until `release`. All graphs share this memory, so one run overwrites what the run before has left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settings(self) -> Hashable:
        """What chooses kernels now, besides tensors: under other settings recorded work isn't what calls would do."""
        return kernel_settings()

    @abstractmethod
    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Records what `work` launches, which nothing runs yet.

        Args:
            work: Launches kernels and copies between tensors of the device, and waits for nothing. It runs on a stream
                of its own, without a wait for other streams.

        Returns:
            Launches the work on the calling thread's current stream. All that it reads must be where it was.

        Raises:
            RuntimeError: If the device can't record it.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes`, one or more, of the memory of the graphs, as `uint8`.

        Nothing else gets it, also once the tensor is gone. So it may be used on any stream.
        """
        made: list[torch.Tensor] = []
        # By a recording, which is then dropped; an empty one would be warned of.
        self.record(lambda: made.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._device)))
        return made[0]

    @abstractmethod
    def release(self) -> None:
        """Gives the memory of all graphs back, none of which is left or runs; later ones get other memory."""

    @abstractmethod
    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns bytes that a graph writes, as `uint8`, though the tensor there is gone."""


class DeviceEvent(Protocol):
    """A point in the work of a stream; `torch.Event` is one."""

    def synchronize(self) -> object:
        """Blocks the host until all work before that point is done."""


class DeviceStream(Protocol):
    """A queue of work that runs in order, at the same time as the host; `torch.Stream` is one."""

    def record_event(self) -> Any:
        """Returns the `DeviceEvent` after all work that the stream has now."""

    def wait_event(self, event: Any) -> object:
        """Has all work that the stream gets from now on wait for a `DeviceEvent`, also one of another stream."""

    def synchronize(self) -> object:
        """Blocks the host until all work that the stream has now is done."""


class Moment(Protocol):
    """A moment in the work of a stream, for measurements."""

    def seconds_since(self, earlier: Any) -> float:
        """Waits until both moments are over; returns the seconds between them."""
        ...


@dataclass(frozen=True, slots=True)
class HostMoment:
    """A moment on the host, whose work is done when its call returns."""

    seconds: float

    def seconds_since(self, earlier: HostMoment) -> float:
        """The seconds between both."""
        return self.seconds - earlier.seconds


class Memory(NamedTuple):
    """Memory of a device, in bytes.

    Attributes:
        free: Bytes that can be allocated now.
        total: All bytes.
    """

    free: int
    total: int


class Device:
    """A place where blocks compute. The library asks this object, and never compares names of devices.

    The answers here are those of the plainest device: its tensors are the CPU's, and a copy is done when its call
    returns. A subclass overrides the methods that differ. Methods are called from several threads.

    Args:
        torch_device: Where torch makes its tensors.
        kind: Its name in options and texts, without a number; None takes the type of `torch_device`.

    Attributes:
        torch_device: See above.
        kind: See above.
        can_bind: The host's memory is the device's own: weights can be used in place in the host store, and gradients
            may stay where they are made. False where every block's weights must be copied into a slot.
        has_inductor: torch.compile makes kernels for the device.
        has_launch_graphs: Work is recorded once and then launched by one call (CUDA graphs).
        alignment: Tensors of a block's state begin at multiples of so many bytes in the device's memory, and so does
            what `allocate` gives. Kernels may be chosen by the alignment of what they read.
        lock_bytes: Most bytes that one `lock` takes, in whole pages. Larger memory is locked in several pieces, and
            no copy spans two of them. 0 if transfers don't gain from page-locking.
        repeats_itself: Two eager runs of the same step, with the same random numbers, have the same bits.
        launching_threads: Threads that launch work and transfers while the host updates; each keeps a processor.
        num_emptied: How often `empty_cache` was called.
    """

    can_bind: bool = False
    has_inductor: bool = False
    has_launch_graphs: bool = False
    alignment: int = 64
    lock_bytes: int = 1 << 62
    repeats_itself: bool = True
    launching_threads: int = 1
    num_emptied: int = 0

    def __init__(self, torch_device: torch.device, kind: str | None = None) -> None:
        self.torch_device = torch_device
        self.kind = torch_device.type if kind is None else kind

    def __str__(self) -> str:
        index = self.torch_device.index
        return self.kind if index is None else f"{self.kind}:{index}"  # pyright: ignore[reportUnnecessaryComparison]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    @property
    def is_host(self) -> bool:
        """Whether its tensors are ordinary tensors of the host: they take host memory, and the host's cores compute."""
        return is_on_host(self.torch_device)

    def lacking(self) -> Sequence[str]:
        """Lists what it lacks of all that a run asks of a device, in words; `compile` refuses such a device."""
        return ()

    # -- computation -----------------------------------------------------------------------------------------

    def add_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds the product of two matrices to `total`, in its dtype: the product isn't rounded to that of the two."""
        total.addmm_(left.to(total.dtype), right.to(total.dtype))

    def kernel(self, source: str, function: str) -> Callable[..., None] | None:
        """Compiles a kernel of CUDA C in which only `fmaf` fuses; None if the device runs none.

        Args:
            source: All of it, without files that it includes.
            function: Its name, `extern "C"`; one thread works on one element.

        Returns:
            Launches it on the calling thread's current stream: takes the number of elements, then its arguments, which
            are tensors, `int` and `double`.
        """
        return None

    def launch_graphs(self) -> LaunchGraphs:
        """Makes what records launch graphs, where `has_launch_graphs`."""
        raise AssertionError(f"{self} has no launch graphs")

    # -- streams and copies ----------------------------------------------------------------------------------

    def new_stream(self) -> DeviceStream | None:
        """Makes a stream for transfers; None if a copy is done when its call returns."""
        return None

    def current_stream(self) -> DeviceStream | None:
        """The stream that the calling thread's work goes to; None as for `new_stream`."""
        return None

    def enter(self, stream: DeviceStream) -> None:
        """Makes a stream from `new_stream` the current one of the calling thread."""
        raise AssertionError(f"{self} has no streams")

    def synchronize(self) -> None:
        """Blocks the host until the calling thread's current stream has done all its work; asleep if the device can."""
        stream = self.current_stream()
        if stream is not None:
            stream.synchronize()

    def wait_for(self, event: DeviceEvent) -> None:
        """Likewise, until all work before an event is done. A thread that spins takes a processor from launches."""
        event.synchronize()

    def settle(self) -> None:
        """Blocks the host until the device has done all the work that it has, of all streams."""

    def moment(self) -> Moment:
        """Returns the moment at which all work that the calling thread's current stream has now is done."""
        return HostMoment(time.perf_counter())

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copies `source` into `out`, one of which is the host's, as work of the calling thread's current stream.

        Returns:
            `out`, which may only be read after this work.
        """
        return out.copy_(source)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the device, of any layout, in new host memory, when it is there."""
        return tensor.to("cpu", copy=True)

    # -- memory ----------------------------------------------------------------------------------------------

    def card(self) -> str:
        """The name that the maker gives the device, such as `NVIDIA GeForce RTX 4090`; empty if it has none."""
        return ""

    def link_share(self) -> float:
        """The part of the card's own link to the host that its slot has, above 0; 1 where nothing is known."""
        return 1.0

    def identity(self) -> str:
        """What tells this device from all others, also for other processes; empty if nothing does."""
        return ""

    def described(self) -> str:
        """Names the model and all else by which its speed may differ from that of another of its kind."""
        return f"{self.kind} {platform.machine()} {_processor()}, {os.cpu_count()} processors"

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` of the device's memory as `uint8`, at a multiple of `alignment`.

        Raises:
            RuntimeError: If the device has too little memory; or an ExecuteError.
        """
        # Mapped pages: aligned and exact, where torch's CPU allocator aligns to 64 bytes only.
        return HostPages.of(nbytes).tensor() if nbytes else torch.empty(0, dtype=torch.uint8)

    def memory(self) -> Memory:
        """Tells how much memory is free, and how much there is."""
        found = psutil.virtual_memory()
        return Memory(int(found.available), int(found.total))

    def reserve(self, nbytes: int) -> int:
        """Tells how many of `nbytes`, all of its memory or what is free of that, no schedule should count on."""
        return nbytes // 10

    def uncounted(self) -> tuple[tuple[str, int], ...]:
        """Names what the reserve is for, with bytes, as far as they are known."""
        return ()

    def ran_out(self, error: BaseException) -> bool:
        """Tells whether an error says that the device had too little memory."""
        return isinstance(error, torch.OutOfMemoryError)

    def empty_cache(self) -> None:
        """Gives memory that nothing uses, but that torch's allocator keeps for later, back to the device."""

    def peak_bytes(self) -> int | None:
        """Most bytes that torch's allocator gave out at once since `reset_peak`; None if it doesn't count them."""
        return None

    def reset_peak(self) -> None:
        """Starts counting anew, from the bytes in use now."""

    def lock(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Page-locks host memory for transfers with the device; makes all pages resident.

        Args:
            address: Of the first byte, which begins a page.
            nbytes: At most `lock_bytes`.

        Returns:
            A function that unlocks it, to be called once, while it is still mapped and when no copy is under way; None
            if transfers don't gain from locking.

        Raises:
            ExecuteError: If the system refuses. Transfers then go through a small ring of locked memory.
        """
        return None

    # -- random numbers --------------------------------------------------------------------------------------

    def generator_state(self) -> torch.Tensor | None:
        """The state of its generator, `uint8` in host memory; None if it draws from torch's generator on the CPU."""
        return None

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Sets its generator to a state that `generator_state` returned."""
        raise AssertionError(f"{self} draws from torch's generator on the CPU")

    def seeded_state(self, seed: int) -> torch.Tensor | None:
        """The state that `torch.manual_seed(seed)` would give its generator, which stays as it is; None as above."""
        return None

    @property
    def is_initialized(self) -> bool:
        """Whether this process uses it already: before, nothing was drawn, and to ask for a state would take memory."""
        return True

    # -- modes -----------------------------------------------------------------------------------------------

    @property
    def autocast_kinds(self) -> tuple[str, ...]:
        """Names under which `torch.autocast` may be on for code that computes there."""
        return (self.torch_device.type,)

    def without_autocast(self) -> AbstractContextManager[object]:
        """Switches autocast off during the body, under each of `autocast_kinds`."""
        kind = self.torch_device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def is_late(error: BaseException) -> bool:
    """Tells whether an error is a device's own, of work that may have been issued long before it was raised."""
    return isinstance(error, torch.AcceleratorError)


def is_on_host(place: torch.Tensor | torch.device) -> bool:
    """Tells whether a tensor is in host memory, as a tensor of the CPU."""
    device = place.device if isinstance(place, torch.Tensor) else place
    return device.type == "cpu"


def is_same_kind(one: torch.device, other: torch.device) -> bool:
    """Tells whether two devices are of one kind; their numbers may differ."""
    return one.type == other.type
