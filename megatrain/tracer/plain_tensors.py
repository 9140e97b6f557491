"""Refuses tensors that aren't plain dense ones: no spec describes them, and no arena holds them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.errors import TraceError
from megatrain.torch_private import FakeTensor
from megatrain.tracer.packing import Path, is_wrapper, taken_apart

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
    """Checks all parameters and buffers: each is plain, or frozen and packed of plain tensors.

    Raises:
        TraceError: Naming the first that is neither.
    """
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
    elif not inner:
        check_plain(what, tensor)
    _check_whole(what, tensor, inner)
    for path, held in inner:
        check_plain(f"the inner tensor `{'.'.join(path)}` of {what}", held)


def _check_whole(what: str, tensor: torch.Tensor, inner: Collection[tuple[Path, torch.Tensor]]) -> None:
    """Refuses quantized parameters whose library moves their values and scales about while it computes."""
    if is_wrapper(tensor) or tensor.is_floating_point() or tensor.is_complex():
        return
    again = [".".join(path) for path, held in inner if _storage(held) == _storage(tensor)]
    if again or not inner:
        where = f"again in its attribute `{again[0]}`" if again else "without scales"
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__} that holds its values {where}.\n"
            "  Such weights (bitsandbytes' 8-bit layers) move between attributes in each forward, where no capture "
            "follows.\n"
            "  Quantize with torchao's Int8WeightOnlyConfig or to bitsandbytes' 4 bit, or load the weights in bf16."
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


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
