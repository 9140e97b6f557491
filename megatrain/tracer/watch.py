"""Dispatch modes that see what a recorded call does below the level at which it was recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The schemas of these kernels don't say that they write running statistics, yet they do when training.
_WRITES_STATISTICS = {
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the storage behind a strided tensor while that storage is alive."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


class EffectWatch(TorchDispatchMode):
    """Collects the effects of one recorded call: tensors written in place, and use of the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[torch.Tensor] = []
        self.is_random = False

    def clear(self) -> None:
        """Forgets what was collected, before the next call."""
        self.written = []
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random = True
        schema = func._schema
        if schema.is_mutable:
            self._collect(schema.arguments, args, kwargs)
        statistics = _WRITES_STATISTICS.get(schema.name.removeprefix("aten::"))
        if statistics is not None and args[statistics[2]]:
            self.written += [args[i] for i in statistics[:2] if args[i] is not None]
        return func(*args, **kwargs)

    def _collect(self, arguments: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self.written.append(tensor)


class StrayWatch(TorchDispatchMode):
    """Reports operations that run while no torch function is being recorded.

    Such results (TorchScript, C++ extensions) would become silent constants of the graph.
    """

    def __init__(self, is_recording: Any, report: Any) -> None:
        super().__init__()
        self._is_recording = is_recording
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_recording():
            self._report(func, args)
        return func(*args, **(kwargs or {}))
