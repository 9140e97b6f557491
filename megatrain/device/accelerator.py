"""Accelerator: a device behind torch's generic interface, such as CUDA, XPU or a backend of another maker."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from megatrain.device import reserve
from megatrain.device.interface import Device, DeviceStream, Memory


class Accelerator(Device):
    """The `torch.accelerator` of this machine.

    Args:
        kind: Type of the torch device, such as `"xpu"`.
        index: Its number; None takes the current one.
    """

    # torch's allocator gives such addresses to tensors of eager PyTorch; CUDA's matrix products look at up to 256.
    alignment = 512
    repeats_itself = False  # kernels with atomic additions sum in another order each time

    def __init__(self, kind: str, index: int | None = None) -> None:
        if index is None:
            index = torch.accelerator.current_device_index()
        super().__init__(torch.device(kind, index))

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.torch_device)

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

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Issues a copy; it runs at the same time as the host if the host's memory is page-locked."""
        return out.copy_(source, non_blocking=True)

    def record_use(self, tensor: torch.Tensor, stream: DeviceStream | None) -> None:
        """Tells torch's allocator that a stream reads the tensor."""
        tensor.record_stream(cast("torch.Stream", stream))

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Takes memory from torch's allocator, which aligns to 512 bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def memory(self) -> Memory:
        """The figures of the driver, and as free also what torch's allocator keeps for later."""
        free, total = self._module.mem_get_info(self.torch_device)
        kept = torch.accelerator.memory_reserved(self.torch_device)
        return Memory(free + kept - torch.accelerator.memory_allocated(self.torch_device), total)

    def reserve(self, nbytes: int) -> int:
        """A tenth, and at least 1 GiB; of a device with less than 4 GiB, which no accelerator is, a quarter."""
        return reserve.of_card(nbytes)

    def uncounted(self) -> tuple[tuple[str, int], ...]:
        """What torch's allocator keeps in parts of segments, in the pools of three streams."""
        return (("allocator's segments", reserve.SEGMENTS),)

    def empty_cache(self) -> None:
        """Empties the cache of torch's allocator."""
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

    def generator_states(self) -> list[torch.Tensor] | None:
        """By the module's own call for all devices; by that for one, where there is one."""
        module = self._module
        if hasattr(module, "get_rng_state_all"):
            return list(module.get_rng_state_all())
        if hasattr(module, "get_rng_state") and torch.accelerator.device_count() == 1:
            return [module.get_rng_state()]
        return None

    def set_generator_states(self, states: Sequence[torch.Tensor]) -> None:
        """The reverse of `generator_states`."""
        module = self._module
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all(states)
        else:
            module.set_rng_state(states[0])

    @contextmanager
    def kept_generators(self) -> Generator[None]:
        """Puts torch's generator on the CPU back as well."""
        with torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=self.kind):
            yield

    # -- modes -----------------------------------------------------------------------------------------------

    @property
    def autocast_kinds(self) -> tuple[str, ...]:
        """Autocast may be on for the host's part of the code as well."""
        return ("cpu", self.torch_device.type)

    @contextmanager
    def without_autocast(self) -> Generator[None]:
        """Switches both off."""
        with torch.autocast("cpu", enabled=False), torch.autocast(self.torch_device.type, enabled=False):
            yield
