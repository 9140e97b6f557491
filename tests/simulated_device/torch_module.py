"""`torch.sim`: the module that torch asks for what its generic interface of accelerators has no call for."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

NAME = "sim"
COUNT = 2


class SimModule(types.ModuleType):
    """Has the functions that torch, and code written for CUDA's module, look for.

    Args:
        library: The C functions.
    """

    Stream = torch.Stream
    Event = torch.Event
    _initialized = True  # asked by torch.utils.checkpoint, which otherwise keeps no state of a generator

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(f"torch.{NAME}")
        self._library = library

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(_index(device))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(_index(device))

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    @contextmanager
    def device(self, device: Any) -> Generator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Generator[None]:
        if stream is None:
            yield
            return
        device, before = self.current_device(), torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            self.set_device(device)

    # -- memory ----------------------------------------------------------------------------------------------

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(_index(device))

    # -- random numbers --------------------------------------------------------------------------------------

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        state = (ctypes.c_uint64 * 2)()
        self._library.sim_generator(_index(device), 0, state)
        return torch.frombuffer(bytearray(bytes(state)), dtype=torch.uint8).clone()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        state = (ctypes.c_uint64 * 2).from_buffer_copy(bytes(new_state.numpy()))
        self._library.sim_generator(_index(device), 1, state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(COUNT)]

    def set_rng_state_all(self, new_states: Sequence[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def manual_seed(self, seed: int) -> None:
        self._seed(self.current_device(), seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(COUNT):
            self._seed(index, seed)

    def _seed(self, index: int, seed: int) -> None:
        self._library.sim_generator(index, 1, (ctypes.c_uint64 * 2)(seed & (2**64 - 1), 0))

    def initial_seed(self) -> int:
        state = (ctypes.c_uint64 * 2)()
        self._library.sim_generator(self.current_device(), 0, state)
        return state[0]


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return torch.accelerator.current_device_index() if found is None else found  # pyright: ignore[reportUnnecessaryComparison]
