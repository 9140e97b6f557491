"""Runs without memory: tensors that have no values, and the bytes of a device that they would take."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from megatrain.device import is_on_host
from megatrain.passes.measuring.kernel_buffers import private_bytes
from megatrain.torch_private import FakeTensorMode, TorchDispatchMode
from megatrain.tracer.packed.packing import has_wrappers


class ExactFakes(FakeTensorMode):
    """A mode of fake tensors that share storages just as real ones would; torch's cache serves it where it can.

    From the cache, a kernel that returns one tensor twice gives two, so that figures would depend on earlier runs in
    the process. Only kernels of one result are looked up there, which halves the time of a run.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.cache_enabled = self.cache_enabled, _has_one_result(func)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = before


@functools.cache
def _has_one_result(func: Any) -> bool:
    found = func._schema.returns
    return len(found) == 1 and isinstance(found[0].real_type, torch.TensorType)


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of storages made on the compute device while it is active, and of kernels' own buffers."""

    def __init__(self, known: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._alive: dict[int, Any] = {}
        self._known = {t.untyped_storage()._cdata for t in known}  # pyright: ignore[reportPrivateUsage]
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented  # its class computes with plain tensors, and comes here again with these
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.layout == torch.strided and is_on(item, self._device):
                self._add(item.untyped_storage())
        self.peak = max(self.peak, self.current + private_bytes(func, args))
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return
        self._alive[key] = weakref.finalize(storage, self._remove, key, size)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int, size: int) -> None:
        self._alive.pop(key, None)
        self.current -= size


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Tells whether a tensor takes memory of the compute device, rather than of the host beside it."""
    return is_on_host(device) or not is_on_host(tensor)
