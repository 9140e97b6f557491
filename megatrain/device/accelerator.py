"""Accelerator: a device behind torch's generic interface, such as CUDA, XPU or a backend of another maker."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatrain.device.interface import Device, DeviceStream, Memory, Moment

GIB = 1 << 30
MIB = 1 << 20
# The reserve: memory that is taken during a step, but that no schedule can count.

SEGMENTS = 3 * (2 * MIB + 20 * MIB)
"""torch's allocator cuts small tensors from segments of 2 MiB and larger ones from segments of 20 MiB; each stream has
a pool of both, and the last segment of a pool is partly empty. Three streams have pools: compute has one always, a
transfer only where it has to rearrange a tensor."""


def of_card(nbytes: int) -> int:
    """How much of an accelerator's memory stays free of schedules.

    That is for the context, libraries' workspaces, rounding (each tensor to 512 bytes, large ones to 2 MiB), holes
    between tensors, and private buffers of kernels.
    """
    return max(nbytes // 10, min(GIB, nbytes // 4))


def beside(nbytes: int) -> int:
    """The reserve of the smallest card on which a schedule may take `nbytes`."""
    return max(-(-nbytes // 9), GIB)


def cublas_workspace(capability: tuple[int, int], config: str | None) -> int:
    """Bytes of a workspace of cuBLAS, as torch makes it.

    Args:
        capability: Of the GPU, such as `(9, 0)`.
        config: `CUBLAS_WORKSPACE_CONFIG`, such as `":4096:2:16:8"`: pairs of KiB and a count; None for torch's default.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    if pairs:
        return sum(1024 * int(kib) * int(count) for kib, count in pairs)
    return 32 * MIB if capability[0] >= 9 else 8 * MIB + 128 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A moment that an event marks."""

    event: torch.Event

    def seconds_since(self, earlier: _Recorded) -> float:
        """The seconds between both events."""
        for each in (earlier, self):
            each.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class Accelerator(Device):
    """The `torch.accelerator` of this machine.

    Args:
        index: Its number; None takes the current one.
    """

    # torch's allocator gives such addresses to tensors of eager PyTorch; CUDA's matrix products look at up to 256.
    alignment = 512
    repeats_itself = False  # kernels with atomic additions sum in another order each time
    launching_threads = 3  # the caller's, autograd's, and one for both transfers, which mostly sleep

    def __init__(self, kind: str, index: int | None = None) -> None:
        if index is None:
            index = torch.accelerator.current_device_index()
        super().__init__(torch.device(kind, index))

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.torch_device)

    def lacking(self) -> Sequence[str]:
        """Tries everything once: of an interface that is generic, each backend has some part."""
        attempts: Sequence[tuple[str, Callable[[], object]]] = (
            ("streams", self.new_stream),
            ("events", self._try_event),
            ("copies that don't block the host", self._try_copy),
            ("the size of its free memory", self.memory),
            ("the state of its random generator", lambda: self.set_generator_state(self.generator_state())),
        )
        return [what for what, attempt in attempts if _fails(attempt)]

    def _try_event(self) -> None:
        event = self.new_stream().record_event()
        stream = self.current_stream()
        stream.wait_event(event)
        self.enter(stream)
        event.synchronize()

    def _try_copy(self) -> None:
        self.copy(self.allocate(1), torch.zeros(1, dtype=torch.uint8))
        self.synchronize()

    # -- streams and copies ----------------------------------------------------------------------------------

    def new_stream(self) -> DeviceStream:
        """Takes a stream from torch's pool."""
        return torch.Stream(device=self.torch_device)

    def current_stream(self) -> DeviceStream:
        """The calling thread's current stream."""
        return torch.accelerator.current_stream(self.torch_device)

    def enter(self, stream: DeviceStream) -> None:
        """Sets the calling thread's device and stream."""
        torch.accelerator.set_stream(cast("torch.Stream", stream))

    def settle(self) -> None:
        """Waits for all streams of this device."""
        torch.accelerator.synchronize(self.torch_device)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Issues a copy; it runs at the same time as the host if the host's memory is page-locked."""
        return out.copy_(source, non_blocking=True)

    def moment(self) -> Moment:
        """An event of the current stream that knows its time."""
        event = torch.Event(device=self.torch_device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.torch_device))
        return _Recorded(event)

    # -- memory ----------------------------------------------------------------------------------------------

    def card(self) -> str:
        """The name that the backend gives the device."""
        return str(getattr(self._module, "get_device_name", lambda device: "")(self.torch_device))

    def described(self) -> str:
        """The name that the backend gives the device, and the host."""
        return f"{self.torch_device} {self.card()} {self._software()}; {super().described()}"

    def _software(self) -> str:
        """What drives the device, besides torch."""
        return ""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Takes memory from torch's allocator, which aligns to 512 bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def memory(self) -> Memory:
        """The figures of the driver, and as free also what torch's allocator keeps for later."""
        # From the device's own module or, where it has none, from torch's generic one.
        ask = getattr(self._module, "mem_get_info", None) or torch.accelerator.get_memory_info
        free, total = ask(self.torch_device)
        return Memory(free + self._cached_bytes(), total)

    def _cached_bytes(self) -> int:
        """What torch's allocator holds and hands out again; a device that isn't torch's accelerator has another one."""
        present = torch.accelerator.current_accelerator()
        if present is None or present.type != self.torch_device.type:
            return 0
        held = torch.accelerator.memory_reserved(self.torch_device)
        return held - torch.accelerator.memory_allocated(self.torch_device)

    def reserve(self, nbytes: int) -> int:
        """A tenth, and at least 1 GiB; of a device with less than 4 GiB, which no accelerator is, a quarter."""
        return of_card(nbytes)

    def uncounted(self) -> tuple[tuple[str, int], ...]:
        """What torch's allocator keeps in parts of segments, in the pools of up to three streams."""
        return (("allocator's segments", SEGMENTS),)

    def empty_cache(self) -> None:
        """Empties the cache of torch's allocator."""
        self.num_emptied += 1
        torch.accelerator.empty_cache()

    def peak_bytes(self) -> int:
        """The peak of torch's allocator, in which each block is rounded up."""
        return torch.accelerator.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """Starts the allocator's peak anew."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    # -- random numbers --------------------------------------------------------------------------------------

    def generator_state(self) -> torch.Tensor:
        """On CUDA this is host memory and doesn't wait for the device."""
        return self._module.get_rng_state(self.torch_device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Sets the state of this device's generator."""
        self._module.set_rng_state(state, self.torch_device)

    def seeded_state(self, seed: int) -> torch.Tensor:
        """From a generator that nobody else draws from."""
        return torch.Generator(self.torch_device).manual_seed(seed).get_state()

    @property
    def is_initialized(self) -> bool:
        """Asks the device's module, if it can tell; a kind of device without one has no generator either."""
        if not hasattr(torch, self.torch_device.type):
            return False
        ask = getattr(self._module, "is_initialized", None)
        return ask is None or bool(ask())

    # -- modes -----------------------------------------------------------------------------------------------

    @property
    def autocast_kinds(self) -> tuple[str, ...]:
        """Autocast may be on for the host's part of the code as well."""
        return ("cpu", self.torch_device.type)

    def without_autocast(self) -> AbstractContextManager[object]:
        """Switches both off, where one is on."""
        kinds = self.autocast_kinds
        return _switched_off(kinds) if any(map(torch.is_autocast_enabled, kinds)) else nullcontext()


def _fails(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (AttributeError, TypeError, RuntimeError):
        return True
    return False


@contextmanager
def _switched_off(kinds: Sequence[str]) -> Generator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
