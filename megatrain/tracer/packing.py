"""Packing: how an object around tensors is taken apart, and made again around others.

Quantized weights come in two forms. A *wrapper* is a tensor subclass whose values are in inner tensors, which its class
lists (`__tensor_flatten__`). A parameter of a class of its own may also hold tensors in its attributes, or in objects
there (scales, tables of codes). Either way the inner tensors are plain tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.base.torch_private import FakeTensorMode, is_traceable_wrapper_subclass
from megatrain.errors import TraceError

Path = tuple[str, ...]
"""Names of attributes, from a parameter to an inner tensor."""

# Values that are what they print.
_TOLD = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    Enum,
)  # fmt: skip
_NO_HOLDERS = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType, *_TOLD)
_DEPTH = 4


class UnpackableError(Exception):
    """An object around tensors that can't be taken apart; the text says why."""


def is_wrapper(value: Any) -> bool:
    """Tells whether this is a tensor whose values are in inner tensors; a nested one has no shape of its own."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) and not value.is_nested


def has_wrappers(types: Iterable[type]) -> bool:
    """Tells whether one of the classes that torch asks at an operation is that of a wrapper."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


@dataclass(frozen=True, eq=False)
class Packing:
    """An object's form without its tensors.

    Args:
        inner: By attribute, in order: the packing of what is there, or None for a plain tensor.
        make: Makes such an object around what belongs into these attributes.
        key: Equal for packings that make equal objects of equal tensors.
        text: The same for people and files: classes and values.
    """

    kind: type
    inner: tuple[tuple[str, Packing | None], ...]
    make: Callable[[Mapping[str, Any]], Any] = field(repr=False)
    key: Hashable
    text: str

    @staticmethod
    def of(value: Any, depth: int = _DEPTH) -> Packing | None:
        """Describes a wrapper, or an object with tensors in its attributes; None for one without.

        Raises:
            UnpackableError: If it can't be taken apart.
        """
        if is_wrapper(value):
            return _of_wrapper(value, depth)
        if isinstance(value, _NO_HOLDERS) or not hasattr(value, "__dict__"):
            return None
        return _of_object(value, depth)

    def tensors(self, value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
        """Lists the inner tensors of an object of this form, with the path to each."""
        for name, packing in self.inner:
            held = getattr(value, name)
            if packing is None:
                yield (name,), held
            else:
                for path, tensor in packing.tensors(held):
                    yield (name, *path), tensor

    def packed(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Makes an object of this form around the next tensors, in the order of `tensors`."""
        return self.make(
            {name: next(tensors) if packing is None else packing.packed(tensors) for name, packing in self.inner}
        )


def repacked(wrapper: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a wrapper of the same form around changed inner tensors."""
    packing = Packing.of(wrapper)
    assert packing is not None
    return packing.packed(iter([change(tensor) for _, tensor in packing.tensors(wrapper)]))


def is_usual(tensor: torch.Tensor) -> bool:
    """Tells whether a registered tensor is of one of torch's own two classes, as nearly all are."""
    return type(tensor) is nn.Parameter or type(tensor) is torch.Tensor


def _pairs(value: Any, packing: Packing | None) -> Iterable[tuple[Path, torch.Tensor]]:
    """Lists the plain tensors of an object, with the path to each; a plain tensor is its own, at an empty path."""
    return [((), value)] if packing is None else packing.tensors(value)


def _pairs_of_wrapper(value: Any) -> Iterable[tuple[Path, torch.Tensor]]:
    return _pairs(value, Packing.of(value) if is_wrapper(value) else None)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the inner tensors of a wrapper at any depth; any other tensor alone."""
    return [inner for _, inner in _pairs_of_wrapper(tensor)]


def attribute_packings(parameter: torch.Tensor) -> Mapping[str, Packing | None]:
    """Describes the tensors that a frozen parameter of a class of its own holds in its attributes.

    Returns:
        By attribute: the packing of the object there, or None for a plain tensor.
    """
    if is_usual(parameter) or not isinstance(parameter, nn.Parameter) or is_lazy(parameter):
        return {}
    # One that computes by itself isn't what its dense values say, so there would be nothing to stream.
    own, usual = (getattr(kind, "__torch_dispatch__", None) for kind in (type(parameter), torch.Tensor))
    if parameter.requires_grad or own is not usual:
        return {}
    found: dict[str, Packing | None] = {}
    for name, value in vars(parameter).items():
        packing = Packing.of(value)
        if packing is not None or isinstance(value, torch.Tensor):
            found[name] = packing
        else:
            _refuse_container(type(parameter), name, value)
    return found


def inner_tensors(tensor: torch.Tensor) -> list[tuple[Path, torch.Tensor]]:
    """Lists the plain tensors that a registered tensor consists of, with the path to each; itself has an empty one."""
    if is_usual(tensor):
        return [((), tensor)]
    if is_wrapper(tensor):
        return list(_pairs_of_wrapper(tensor))
    found: list[tuple[Path, torch.Tensor]] = [((), tensor)]
    for name, packing in attribute_packings(tensor).items():
        found += [((name, *path), inner) for path, inner in _pairs(vars(tensor)[name], packing)]
    return found


def taken_apart(name: str, tensor: torch.Tensor) -> list[tuple[Path, torch.Tensor]]:
    """Lists the plain tensors that a registered tensor consists of, with the path to each.

    Raises:
        TraceError: If a packed one can't be taken apart.
    """
    try:
        return inner_tensors(tensor)
    except UnpackableError as error:
        raise TraceError(
            f"`{name}` is a {type(tensor).__qualname__}, which {error}.\n"
            "  A packed (quantized) parameter is taken apart into plain tensors of this process, found in attributes.\n"
            "  Load these weights in bf16 or fp32, or quantize them by another method."
        ) from None


def unpacked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the inner tensors of each wrapper in its place, under their own names."""
    return {".".join((name, *path)): inner for name, value in state.items() for path, inner in _pairs_of_wrapper(value)}


def packing_text(tensor: torch.Tensor) -> str | None:
    """Says how a registered tensor is packed: classes and values; None for a plain one."""
    packings = _packings(tensor)
    return ", ".join(name if p is None else f"{name}={p.text}" for name, p in packings.items()).lstrip("=") or None


def packing_key(tensor: torch.Tensor) -> Hashable:
    """Equal for registered tensors that are packed alike."""
    packings = () if is_usual(tensor) else _packings(tensor).items()
    return tuple((name, None if packing is None else packing.key) for name, packing in packings)


def namespaces(tensor: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Lists the dictionaries that hold a packed tensor's inner tensors, and what is known of them."""
    packings = {} if is_usual(tensor) else _packings(tensor)
    if packings:
        yield vars(tensor)
    for name, packing in packings.items():
        if packing is not None:
            yield from _namespaces(vars(tensor)[name] if name else tensor, packing)


def _namespaces(value: Any, packing: Packing) -> Iterator[dict[str, Any]]:
    yield vars(value)
    for name, inner in packing.inner:
        if inner is not None:
            yield from _namespaces(getattr(value, name), inner)


def _packings(tensor: torch.Tensor) -> Mapping[str, Packing | None]:
    """The packing of a wrapper, without a name; or those of a parameter's attributes."""
    return {"": Packing.of(tensor)} if is_wrapper(tensor) else attribute_packings(tensor)


def _of_wrapper(value: torch.Tensor, depth: int) -> Packing:
    kind = type(value)
    if any(base.__name__ == "DTensor" for base in kind.__mro__):
        raise UnpackableError("is spread over several processes")
    names, context = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]  # of wrappers only
    inner: list[tuple[str, Packing | None]] = []
    for name in names:
        held = getattr(value, name)
        if getattr(value, name) is not held:
            raise UnpackableError(f"makes its inner tensor `{name}` anew at each look")
        inner.append((name, Packing.of(held, depth - 1)))
    size, stride = value.size(), value.stride()

    def make(held: Mapping[str, Any]) -> torch.Tensor:
        return kind.__tensor_unflatten__(dict(held), context, size, stride)  # pyright: ignore[reportAttributeAccessIssue]

    key, text = _told(context)
    return Packing(kind, tuple(inner), make, *_joined(kind, inner, (tuple(size), stride, key), text))


def _of_object(value: Any, depth: int) -> Packing | None:
    kind = type(value)
    inner: list[tuple[str, Packing | None]] = []
    rest: dict[str, Any] = {}
    for name, held in vars(value).items():
        packing = Packing.of(held, depth - 1) if depth else None
        if packing is not None or isinstance(held, torch.Tensor):
            inner.append((name, packing))
        else:
            rest[name] = held
    if not inner:
        return None
    for name, held in rest.items():
        _refuse_container(kind, name, held)

    def make(held: Mapping[str, Any]) -> Any:
        made = object.__new__(kind)
        vars(made).update(rest | dict(held))
        return made

    return Packing(kind, tuple(inner), make, *_joined(kind, inner, *_told(rest)))


def _joined(kind: type, inner: Sequence[tuple[str, Packing | None]], key: Hashable, text: str) -> tuple[Hashable, str]:
    names = ", ".join(name if packing is None else f"{name}={packing.text}" for name, packing in inner)
    keys = tuple((name, None if packing is None else packing.key) for name, packing in inner)
    return (kind, keys, key), f"{kind.__module__}.{kind.__qualname__}({names}; {text})"


def _refuse_container(kind: type, name: str, value: Any) -> None:
    if isinstance(value, list | tuple | set | frozenset | dict):
        items = value.values() if isinstance(value, dict) else value
        if any(isinstance(item, torch.Tensor) for item in items):
            raise UnpackableError(f"holds tensors in the {type(value).__name__} `{kind.__qualname__}.{name}`")


def _told(value: Any) -> tuple[Hashable, str]:
    """Returns what is equal for equal values, and a text of it without addresses."""
    if isinstance(value, _TOLD):
        return (type(value), repr(value)), repr(value)
    if isinstance(value, type):
        return value, f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple):
        told = [_told(item) for item in value]
        return (type(value), *(key for key, _ in told)), f"({', '.join(text for _, text in told)})"
    if isinstance(value, dict):
        pairs = [(*_told(name), *_told(item)) for name, item in value.items()]
        text = ", ".join(f"{name}: {item}" for _, name, _, item in pairs)
        return (dict, *((name, item) for name, _, item, _ in pairs)), f"{{{text}}}"
    if dataclasses.is_dataclass(value):
        key, text = _told({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        return (type(value), key), f"{type(value).__qualname__}{text}"
    return (type(value), id(value)), type(value).__qualname__


def registered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Lists a model's parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class PackedState:
    """Stand-ins of packed parameters, around the fake tensors that stand for their inner tensors.

    Attributes:
        stand_ins: By the id of the registered tensor.

    Raises:
        TraceError: If no stand-in can be made, on this device.
    """

    def __init__(
        self, model: nn.Module, fakes: Mapping[int, torch.Tensor], fake_mode: FakeTensorMode, device: torch.device
    ) -> None:
        self._fakes, self._fake_mode, self._device = dict(fakes), fake_mode, device
        self.stand_ins: dict[int, torch.Tensor] = {}
        self._objects: dict[int, tuple[Any, Packing]] = {}
        self._handlers: dict[int, tuple[torch.Tensor, type]] = {}
        for name, tensor in registered(model):
            if is_wrapper(tensor):
                self.stand_ins[id(tensor)] = self._wrapper(name, tensor)
            else:
                self._attributes(tensor)
        pairs = [(name, self.stand_ins[id(t)], t) for name, t in registered(model) if id(t) in self.stand_ins]
        # The stand-ins' attributes as they were made: a forward must leave them so.
        self._made = [(name, stand_in, _held(stand_in, vars(tensor))) for name, stand_in, tensor in pairs]

    def forget(self) -> None:
        """Lets go of all tensors, when the capture is over."""
        for kept in (self.stand_ins, self._made, self._objects, self._handlers, self._fakes):
            kept.clear()

    def check_unchanged(self) -> None:
        """Checks, after the forward, that it has left the packed parameters as they were."""
        for name, stand_in, before in self._made:
            now = _held(stand_in, before)
            changed = sorted(key for key in before if before[key] != now[key])
            if changed:
                raise TraceError(
                    f"the forward changes the attribute `{changed[0]}` of the packed parameter `{name}`.\n"
                    "  A packed parameter stays as it is: its inner tensors are streamed, and a change would be lost.\n"
                    "  Use quantized layers that only read their weights in the forward (torchao's int8, bitsandbytes' "
                    "4-bit)."
                )

    def packing(self, value: Any) -> Packing | None:
        """The form of an argument of a call; None if it isn't packed."""
        if is_wrapper(value):
            return Packing.of(value)
        known = self._objects.get(id(value))
        return None if known is None else known[1]

    def handler(self, values: Iterable[Any]) -> type | None:
        """The class whose `__torch_function__` torch would ask at a call with these arguments, if there is one."""
        asked = (self._handlers.get(id(value)) for value in values)
        return next((found[1] for found in asked if found is not None), None)

    def _around_fakes(self, packing: Packing, value: Any) -> Any:
        return packing.packed(iter([self._fakes[id(inner)] for _, inner in packing.tensors(value)]))

    def _wrapper(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        packing = Packing.of(tensor)
        assert packing is not None
        stand_in = self._around_fakes(packing, tensor)
        if stand_in.device != self._device:
            stand_in = self._moved(name, tensor, packing)
        attributes = vars(stand_in)
        attributes.update({key: value for key, value in vars(tensor).items() if key not in attributes})
        return stand_in

    def _moved(self, name: str, tensor: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Makes the stand-in of a wrapper whose form says on which device it is, as `.to` does."""
        inner = [t for _, t in packing.tensors(tensor)]
        with self._fake_mode, torch.no_grad():
            here = packing.packed(iter([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inner]))
            there = here.to(self._device)
        moved = Packing.of(there) if is_wrapper(there) else None
        if moved is not None and [p for p, _ in moved.tensors(there)] == [p for p, _ in packing.tensors(tensor)]:
            stand_in = moved.packed(iter([self._fakes[id(t)] for t in inner]))
            if stand_in.device == self._device:
                return stand_in
        raise TraceError(
            f"parameter `{name}` is a {type(tensor).__qualname__}, which can't be brought to {self._device}.\n"
            "  Its inner tensors are streamed to the device, and the class makes a weight of them there.\n"
            "  Compute on the CPU, or load this weight in bf16 or fp32."
        )

    def _attributes(self, tensor: torch.Tensor) -> None:
        packings = attribute_packings(tensor)
        if not packings:
            return
        stand_in = self.stand_ins[id(tensor)] = self._fakes[id(tensor)]
        for name, packing in packings.items():
            value = vars(tensor)[name]
            vars(stand_in)[name] = self._fakes[id(value)] if packing is None else self._around_fakes(packing, value)
            if packing is not None:
                self._note_object(vars(stand_in)[name], packing)
        kind: Any = type(tensor)
        if kind.__torch_function__ is not nn.Parameter.__torch_function__:
            self._handlers[id(stand_in)] = (stand_in, kind)

    def _note_object(self, value: Any, packing: Packing) -> None:
        self._objects[id(value)] = (value, packing)
        for name, inner in packing.inner:
            if inner is not None:
                self._note_object(getattr(value, name), inner)


def _held(stand_in: torch.Tensor, names: Iterable[str]) -> dict[str, Any]:
    """What a stand-in holds under these names, in values that compare: identities of tensors, keys of objects."""
    return {name: _identity(vars(stand_in).get(name)) for name in names}


def _identity(value: Any) -> Any:
    packing = None if isinstance(value, torch.Tensor) else Packing.of(value)
    if packing is None:
        return type(value), id(value)
    return packing.key, [id(tensor) for _, tensor in packing.tensors(value)]
