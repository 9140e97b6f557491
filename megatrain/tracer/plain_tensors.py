"""Refuses tensors that aren't plain dense ones: no spec describes them, and no arena holds them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.errors import TraceError
from megatrain.torch_private import FakeTensor
from megatrain.tracer.inventory import inventory
from megatrain.tracer.packed.packing import attribute_packings, inner_tensors, is_wrapper

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
    if _changes_calls(type(tensor)) and _holds_more(tensor):
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__}, a tensor class that keeps its values in inner tensors.\n"
            "  Only its own code can read them, as with quantized, packed or distributed weights; megatrain streams "
            "plain tensors only.\n"
            "  Load the weights in bf16 or fp32 instead (frozen weights too), or replace them by their dequantized "
            "values."
        )
    if _changes_calls(type(tensor)):
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__}, a special tensor class.\n"
            "  This class may change the meaning of every call, and a capture of plain tensors can't show the change.\n"
            "  Use a plain tensor: `.as_subclass(torch.Tensor)`, if its values are ordinary."
        )


def check_plain_state(model: nn.Module) -> None:
    """Checks all parameters and buffers: each is plain, or frozen and packed of plain tensors.

    Raises:
        TraceError: Naming the first that is neither.
    """
    inventory(model)  # refuses what can't be taken apart
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if is_wrapper(tensor):
                _check_packed(f"{what} `{name}`", tensor)
            elif not attribute_packings(tensor):
                check_plain(f"{what} `{name}`", tensor)
            for path, inner in inner_tensors(tensor):
                if path:
                    check_plain(f"the inner tensor `{'.'.join(path)}` of {what} `{name}`", inner)


def _check_packed(what: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__} that is trained.\n"
            "  Its values are in inner tensors, which no gradient reaches: packed (quantized) weights are streamed "
            "frozen.\n"
            "  Freeze it with requires_grad_(False) and train adapters (LoRA), or load it in bf16 or fp32."
        )


def _holds_more(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of a class of its own is more than its dense values, which then say nothing."""
    dispatches = any("__torch_dispatch__" in vars(kind) for kind in type(tensor).__mro__ if kind not in _PLAIN)
    return dispatches or bool(vars(tensor))


def _changes_calls(kind: type) -> bool:
    """Tells whether a class other than torch's own gives its tensors another behaviour (or passes on its type)."""
    own = [c for c in kind.__mro__ if c not in _PLAIN and issubclass(c, torch.Tensor)]
    if issubclass(kind, nn.Parameter):
        return any("__torch_function__" in vars(c) or "__torch_dispatch__" in vars(c) for c in own)
    return any(not c.__module__.startswith("torch._C") for c in own)
