"""Packing: how an object around tensors is taken apart, and made again around others.

Quantized weights come in two forms. A *wrapper* is a tensor subclass whose values are in inner tensors, which its class
lists (`__tensor_flatten__`). A parameter of a class of its own may also hold tensors in its attributes, or in objects
there (scales, tables of codes). Either way the inner tensors are plain tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.errors import TraceError
from megatrain.torch_private import FakeTensor, is_traceable_wrapper_subclass
from megatrain.tracer.spec import storage_key

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
        kind: Its class.
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

    Raises:
        UnpackableError: If an object there can't be taken apart.
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
    """Lists the plain tensors that a registered tensor consists of, with the path to each; itself has an empty one.

    Raises:
        UnpackableError: If it can't be taken apart.
    """
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


# What is neither packed nor plain is refused: no spec describes it, and no arena holds it.

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor is dense, and that its class changes nothing about what calls on it do.

    Args:
        what: How messages name it, ``input `x` ``.
        tensor: The tensor.

    Raises:
        TraceError: If it isn't.
    """
    if type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    if is_lazy(tensor):
        raise TraceError(
            f"{what} is not initialized yet.\n"
            "  A lazy module takes its shapes from the first batch, but a capture needs them earlier.\n"
            "  Call the model itself once, uncompiled, then compile it."
        )
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"{tensor.layout}"
        raise TraceError(
            f"{what} is a {kind.removeprefix('torch.')} tensor.\n"
            "  Inputs, parameters and buffers must be dense tensors, described fully by shape, dtype and strides.\n"
            "  Pass its dense parts, and build the tensor inside the forward."
        )
    if is_wrapper(tensor):
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__}, a tensor class that keeps its values in inner tensors.\n"
            "  Only parameters and buffers may be of such a class.\n"
            "  Pass its inner tensors, and make the object around them inside the forward."
        )
    if _changes_calls(type(tensor)):
        _refuse_class(what, type(tensor))


def _refuse_class(what: str, kind: type) -> NoReturn:
    if _dispatches(kind):
        rest = (
            "a tensor class that says nowhere where its values are.\n"
            "  A class of packed tensors lists its inner tensors in `__tensor_flatten__`; then they can be streamed.\n"
            "  Load the weights in bf16 or fp32 instead (frozen weights too), or replace them by their dequantized "
            "values."
        )
    elif issubclass(kind, nn.Parameter):
        rest = (
            "a class of parameters with its own behaviour, and holds plain values.\n"
            "  Quantized weights are followed when they are quantized, with scales and tables in their attributes.\n"
            "  If a later step quantizes this one (with bitsandbytes, `model.to(device)`), take it first; otherwise "
            "assign a torch.nn.Parameter of its values."
        )
    else:
        rest = (
            "a special tensor class.\n"
            "  This class may change the meaning of every call, and a capture of plain tensors can't show the change.\n"
            "  Use a plain tensor: `.as_subclass(torch.Tensor)`, if its values are ordinary."
        )
    raise TraceError(f"{what} is a {kind.__qualname__}, {rest}")


def check_plain_state(model: nn.Module) -> None:
    """Checks all parameters and buffers: each is plain, or frozen and packed of plain tensors."""
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if type(tensor) in _PLAIN:
                check_plain(f"{what} `{name}`", tensor)
            else:
                _check_packed(f"{what} `{name}`", name, tensor)


def _check_packed(what: str, name: str, tensor: torch.Tensor) -> None:
    inner = [] if is_lazy(tensor) else [(path, held) for path, held in taken_apart(name, tensor) if path]
    if is_wrapper(tensor):
        _check_frozen(what, tensor)
    elif not inner and (is_lazy(tensor) or tensor.is_floating_point() or tensor.is_complex()):
        check_plain(what, tensor)
    _check_whole(what, tensor, inner)
    for path, held in inner:
        check_plain(f"the inner tensor `{'.'.join(path)}` of {what}", held)


def _check_whole(what: str, tensor: torch.Tensor, inner: Collection[tuple[Path, torch.Tensor]]) -> None:
    """Refuses codes that move about while their library computes, and those whose scales are nowhere beside them."""
    if is_wrapper(tensor) or tensor.is_floating_point() or tensor.is_complex():
        return
    kind = type(tensor).__qualname__
    again = [".".join(path) for path, held in inner if storage_key(held) == storage_key(tensor)]
    if again:
        raise TraceError(
            f"{what} is a {kind} that holds its values again in its attribute `{again[0]}`.\n"
            "  Such weights (bitsandbytes' 8-bit layers) move between attributes in each forward, where no capture "
            f"follows.\n{_PACKED_WAY_OUT}"
        )
    if not inner:
        raise TraceError(
            f"{what} is a {kind} of codes without scales beside them (of a GGUF file, or bitsandbytes' 8 bit).\n"
            "  Their class alone knows how to read them; a capture of plain tensors doesn't.\n"
            "  Unpack a GGUF model after loading, by `model.dequantize()` of diffusers; transformers does so by itself."
            f"\n{_PACKED_WAY_OUT}"
        )


_PACKED_WAY_OUT = (
    "  Quantize with torchao's Int8WeightOnlyConfig or to bitsandbytes' 4 bit, or load the weights in bf16."
)


def _check_frozen(what: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__} that is trained.\n"
            "  Its values are in inner tensors, which no gradient reaches: packed (quantized) weights are streamed "
            "frozen.\n"
            "  Freeze it with requires_grad_(False) and train adapters (LoRA), or load it in bf16 or fp32."
        )


def _dispatches(kind: type) -> bool:
    """Tells whether a class computes by itself, so that its dense values say nothing."""
    return any("__torch_dispatch__" in vars(base) for base in kind.__mro__ if base not in _PLAIN)


def _changes_calls(kind: type) -> bool:
    """Tells whether a class other than torch's own gives its tensors another behaviour (or passes on its type)."""
    own = [c for c in kind.__mro__ if c not in _PLAIN and issubclass(c, torch.Tensor)]
    if issubclass(kind, nn.Parameter):
        return any("__torch_function__" in vars(c) or "__torch_dispatch__" in vars(c) for c in own)
    return any(not c.__module__.startswith("torch._C") for c in own)
