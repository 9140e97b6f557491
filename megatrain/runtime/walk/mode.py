"""WalkMode: gives each torch call of a model's own code the state that it reads, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatrain.errors import ExecuteError
from megatrain.runtime.walk.loans import Loans
from megatrain.torch_private import are_transforms_active, pytree
from megatrain.tracer.calls import call_name, is_property_get, is_property_set
from megatrain.tracer.recording.effect_watch import EffectWatch, storage_key

_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Properties whose answer has the values of the tensor."""
_OWN = frozenset(
    (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "__len__", "__hash__", "__deepcopy__",
        "__reduce_ex__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
        "share_memory_",
    )
)  # fmt: skip
"""Calls that need no values, or that mean the parameter itself and not a copy."""


class WalkMode(TorchFunctionMode):
    """Has the state of a model look as if it were on the compute device.

    A call that reads parameters or buffers gets copies on the device in their places; a question about their place is
    answered with the compute device. All else passes unchanged.

    Args:
        loans: Brings the state.
        keys: Of the state, by the id of the model's own tensors.
        device: The compute device.
    """

    def __init__(self, loans: Loans, keys: Mapping[int, str], device: torch.device) -> None:
        super().__init__()
        self._loans = loans
        self._keys = keys
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_property_set(func):
            return func(*args, **kwargs)
        if is_property_get(func):
            name = call_name(func)
            if id(args[0]) not in self._keys:
                return func(*args, **kwargs)
            if name not in _VALUES:
                is_of_place = name == "device" or (name.startswith("is_") and name != "is_leaf")
                return func(self._probe(args[0]) if is_of_place else args[0])
        elif call_name(func) in _OWN:
            return func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        keys = list(dict.fromkeys(self._keys[id(t)] for t in given if id(t) in self._keys))
        if keys and torch.is_grad_enabled() and any(t.requires_grad for t in given):
            raise ExecuteError(_GRADIENTS)
        if are_transforms_active():  # nobody can look at the memory of their tensors
            result, written = self._run(func, args, kwargs, keys)
            self._loans.after(keys, iter(()), written)
            return result
        viewed = (self._loans.key_of(tensor) for tensor in given if id(tensor) not in self._keys)
        touched = dict.fromkeys((*keys, *(key for key in viewed if key is not None)))
        result, written = self._run(func, args, kwargs, keys)
        found = (t for t in (*given, *_tensors(result)) if id(t) not in self._keys)
        self._loans.after(touched, found, written)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, keys: list[str]) -> tuple[Any, set[int]]:
        """Runs a call; also returns what memory it wrote, if versions may not tell.

        What the call was given ends with this frame, so that nobody else has the copies behind it.
        """
        if not keys:
            return _watched(func, args, kwargs)
        copies = dict(zip(keys, self._loans.borrow(keys), strict=True))

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            key = self._keys.get(id(tensor))
            return tensor if key is None else copies[key]

        args, kwargs = pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))
        has_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would keep what autocast makes of each weight
        try:
            return _watched(func, args, kwargs)
        finally:
            torch.set_autocast_cache_enabled(has_cache)

    def _probe(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor that is where the state seems to be."""
        return torch.empty(0, dtype=tensor.dtype, device=self._device)


def _watched(func: Any, args: Any, kwargs: Any) -> tuple[Any, set[int]]:
    """Some kernels write running statistics and count no write. A watch may change the kernels of other calls."""
    if "batch_norm" not in call_name(func):
        return func(*args, **kwargs), set()
    with EffectWatch(lambda _: None, lambda _: None, lambda call: (call(), False)) as watch:
        result = func(*args, **kwargs)
    return result, {storage_key(tensor) for tensor in watch.written}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments and results, which are nested in lists, tuples and dicts at most."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


_GRADIENTS = (
    "a walk of the model's own code has no gradients, and gradients are switched on.\n"
    "  The model's weights come to the device as calls read them, and go again; a backward would not find them.\n"
    "  Use torch.no_grad() around it. Calls of the compiled model have gradients; those with a cache have none."
)
