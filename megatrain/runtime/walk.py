"""walk(): the model's own code runs in the body, with its state on the device as calls read it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.base.torch_private import are_transforms_active, pytree
from megatrain.device import is_on_host
from megatrain.errors import ExecuteError
from megatrain.runtime.engine import Engine
from megatrain.runtime.on_demand import Learned, WalkFigures, WeightCache
from megatrain.tracer.calls import call_name, is_property_get, is_property_set
from megatrain.tracer.inventory import first_packed
from megatrain.tracer.recording.effect_watch import EffectWatch
from megatrain.tracer.recording.sandbox import uncompiled
from megatrain.tracer.spec import storage_key


@contextmanager
def walk(
    what: str, model: nn.Module, engine: Engine, budget_bytes: int, learned: Learned
) -> Generator[Callable[[], WalkFigures]]:
    """Runs the body without a schedule: torch calls on this thread find the model's state on the compute device.

    The slots' memory is given back before. The model's own code does everything else, and what it leaves in attributes
    and in objects of the caller (caches) is what it would leave there in eager.

    Args:
        model: Its modules' state is in the engine's store, or comes there now.
        engine: Idle, in a turn of its model.
        budget_bytes: The bound of the device's memory: for state, for what calls return, and for what is held already.

    Raises:
        ExecuteError: If the state has no values, or a parameter is packed; or, from a torch call of the body, if there
            is no room on the device, or gradients are switched on.
    """
    entries = engine.adopt_state()
    packed = first_packed(entries)
    if packed is not None:
        raise ExecuteError(
            f"{what} is a walk, which can't bring the packed (quantized) parameter `{packed}` to the device.\n"
            "  A walk replaces parameters by copies on the device, and those of a packed one lie within it.\n"
            "  Run it eagerly, on the host: compiled.megatrain.model has the same weights."
        )
    engine.release_slots()
    cache = WeightCache(what, engine, entries, budget_bytes, learned)
    keys: Mapping[int, str] = {id(tensor): key for key, tensor in engine.tensors.items()}
    try:
        with uncompiled(), engine.streams.step(waits_for=("h2d",)):
            with WalkMode(cache, keys, engine.device.torch_device):
                yield lambda: cache.figures
            cache.end()
    finally:
        cache.end(has_failed=True)
        bring_buffers_home(model, engine)


def bring_buffers_home(model: nn.Module, engine: Engine) -> None:
    """Copies buffers to the host that the forward has replaced by tensors of the device."""
    if engine.device.is_host:
        return
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_on_host(buffer):
                if id(buffer) not in copies:
                    copies[id(buffer)] = engine.device.to_host(buffer)
                module._buffers[name] = copies[id(buffer)]


_VALUES = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Properties whose answer has the values of the tensor."""
_UNCOUNTED = frozenset(("data", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "data_ptr"))
"""Answers through which the tensor can be written without its version counting that."""
_OWN = frozenset(
    (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "__len__", "__hash__", "__deepcopy__",
        "__reduce_ex__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
        "share_memory_",
    )
)  # fmt: skip
"""Calls that need no values, or that mean the parameter itself and not a copy."""


class _Kind(Enum):
    OWN = "concerns the tensor itself"
    OF_PLACE = "asks for its place"
    CALL = "reads values"
    UNCOUNTED = "leads to writes that no version counts"
    NEW_MEMORY = "gives the tensor other memory"
    BATCH_NORM = "may write running statistics"


class WalkMode(TorchFunctionMode):
    """Has the state of a model look as if it were on the compute device.

    A call that reads parameters or buffers gets copies on the device in their places; a question about their place is
    answered with the compute device. All else passes unchanged.

    Args:
        keys: Of the state, by the id of the model's own tensors.
    """

    def __init__(self, cache: WeightCache, keys: Mapping[int, str], device: torch.device) -> None:
        super().__init__()
        self._cache = cache
        self._keys = keys
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind is _Kind.OWN:
            return func(*args, **kwargs)
        if kind is _Kind.NEW_MEMORY:
            return self._given_memory(func, args)
        if kind is _Kind.OF_PLACE:
            return func(self._probe(args[0]) if id(args[0]) in self._keys else args[0])
        given: list[torch.Tensor] = []
        _collect(args, given)
        _collect(kwargs.values(), given)
        keys = [self._keys[id(t)] for t in given if id(t) in self._keys]
        if keys:
            keys = list(dict.fromkeys(keys))
            if torch.is_grad_enabled() and any(t.requires_grad for t in given):
                raise ExecuteError(_GRADIENTS)
            given = [t for t in given if id(t) not in self._keys]
        result, written = self._run(func, kind, args, kwargs, keys)
        if kind is _Kind.UNCOUNTED:
            self._cache.compare_values(keys)
        if are_transforms_active():
            given = []  # nobody can look at the memory of their tensors
        else:
            _collect((result,), given)
        self._cache.after(keys, given, written)
        return result

    def _run(self, func: Any, kind: _Kind, args: Any, kwargs: Any, keys: list[str]) -> tuple[Any, set[int]]:
        """Runs a call; also returns what memory it wrote, if versions may not tell.

        What the call was given ends with this frame, so that nobody else has the copies behind it.
        """
        run = _watched if kind is _Kind.BATCH_NORM else _plain
        if not keys:
            return run(func, args, kwargs)
        copies = dict(zip(keys, self._cache.get(keys), strict=True))
        args = tuple(self._copied(value, copies) for value in args)
        kwargs = {name: self._copied(value, copies) for name, value in kwargs.items()}
        has_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would keep what autocast makes of each weight
        try:
            return run(func, args, kwargs)
        finally:
            torch.set_autocast_cache_enabled(has_cache)

    def _copied(self, value: Any, copies: Mapping[str, torch.Tensor]) -> Any:
        """The value with copies in the places of the model's tensors."""
        if isinstance(value, torch.Tensor):
            key = self._keys.get(id(value))
            return value if key is None else copies[key]
        if isinstance(value, _CONTAINERS):
            return pytree.tree_map_only(torch.Tensor, lambda tensor: self._copied(tensor, copies), value)
        return value

    def _given_memory(self, func: Any, args: Any) -> Any:
        key = self._keys.get(id(args[0]))
        if key is not None:
            raise ExecuteError(
                f"the model gives `{key}` new memory, by an assignment to `.data`.\n"
                "  In a walk, a copy on the device stands for it, which would keep its former values.\n"
                "  Write into it in place (copy_), or assign a new tensor to the module's attribute."
            )
        return func(*args)

    def _probe(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor that is where the state seems to be."""
        return torch.empty(0, dtype=tensor.dtype, device=self._device)


@functools.lru_cache(maxsize=4096)
def _kind_of(func: Any) -> _Kind:
    name = call_name(func)
    if is_property_set(func):
        return _Kind.NEW_MEMORY if name == "data" else _Kind.OWN
    if name in _UNCOUNTED:
        return _Kind.UNCOUNTED
    if is_property_get(func):
        is_of_place = name == "device" or (name.startswith("is_") and name != "is_leaf")
        return _Kind.CALL if name in _VALUES else _Kind.OF_PLACE if is_of_place else _Kind.OWN
    return _Kind.OWN if name in _OWN else _Kind.BATCH_NORM if "batch_norm" in name else _Kind.CALL


def _plain(func: Any, args: Any, kwargs: Any) -> tuple[Any, set[int]]:
    return func(*args, **kwargs), set()


def _watched(func: Any, args: Any, kwargs: Any) -> tuple[Any, set[int]]:
    """Some kernels write running statistics and count no write. A watch may change the kernels of other calls."""
    with EffectWatch(lambda _: None, lambda _: None, lambda call: (call(), False)) as watch:
        result = func(*args, **kwargs)
    return result, {storage_key(tensor) for tensor in watch.written}


_CONTAINERS = (tuple, list, dict)


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Adds the tensors in arguments and results, which are nested in lists, tuples and dicts at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _CONTAINERS):
            _collect(value.values() if isinstance(value, dict) else value, found)  # pyright: ignore


_GRADIENTS = (
    "a walk of the model's own code has no gradients, and gradients are switched on.\n"
    "  The model's weights come to the device as calls read them, and go again; a backward would not find them.\n"
    "  Use torch.no_grad() around it. Calls of the compiled model have gradients; those with a cache have none."
)
