"""Narrowing: the fp32 parameters of a model become bf16, and what they lose is kept beside them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megatrain.errors import ExecuteError, OptionError
from megatrain.optim.layout import dense, in_memory, memory_order
from megatrain.optim.master import read_
from megatrain.optim.masters import Kind, Masters
from megatrain.runtime.overlap import check_unshared
from megatrain.tracer.layouts import check_plain_state
from megatrain.tracer.state import inventory

_OF_MODELS: WeakKeyDictionary[nn.Module, Masters] = WeakKeyDictionary()
"""A model that is compiled again goes on with the masters that it has."""


def masters_of(model: nn.Module, kind: Kind) -> Masters:
    """Returns the masters of a model; it stays as it is, until `narrowed`.

    Raises:
        OptionError: If a parameter is neither fp32 nor bf16.
        TraceError: If a tensor of its state isn't a plain dense one.
        ExecuteError: If a parameter to be narrowed shares memory with other state, or is on another device.
    """
    if kind == "whole":
        return Masters(model, kind)
    check_plain_state(model)
    known = _OF_MODELS.get(model)
    entries, tensors = inventory(model)
    parameters = {key: tensors[key] for key, entry in entries.items() if entry.kind == "parameter"}
    others = [key for key, p in parameters.items() if p.dtype not in (torch.float32, torch.bfloat16)]
    if others:
        more = f", nor are {len(others) - 1} others" if len(others) > 1 else ""
        raise OptionError(
            f"precision='bf16': parameter `{others[0]}` {entries[others[0]].spec} is neither fp32 nor bf16{more}.\n"
            "  fp32 parameters become bf16 with exact fp32 masters; a model that has bf16 ones stays as it is.\n"
            "  Convert it, register what is no floating-point number as a buffer, or use precision='fp32'."
        )
    is_wide = _is_wide(model)
    if is_wide:
        check_unshared(tensors)
        for key, parameter in parameters.items():
            if parameter.device.type not in ("cpu", "meta"):
                raise ExecuteError(
                    f"parameter `{key}` is on {parameter.device}.\n"
                    "  Parameters live in host memory; the device only borrows them.\n"
                    '  Move the model back with model.to("cpu").'
                )
    casts_inputs = is_wide or (known is not None and known.casts_inputs)
    if known is not None and (known.kind, known.casts_inputs) == (kind, casts_inputs):
        return known
    return Masters(model, kind, casts_inputs=casts_inputs)


@contextmanager
def narrowed(model: nn.Module, masters: Masters) -> Generator[None]:
    """Makes the parameters of a model bf16, if all are fp32 and the masters say so; nothing else changes.

    They stay the same objects. One after the other is converted and frees its old memory; gradients are converted too.
    If the body fails they are fp32 again, with the values they had, but for what frozen ones lost.
    """
    if masters.kind == "whole":
        yield
        return
    _OF_MODELS[model] = masters
    masters.find()
    is_wide = _is_wide(model)
    if is_wide:
        _narrow(model, masters)
    try:
        yield
    except BaseException:
        if is_wide:
            _widen(model, masters)
            del _OF_MODELS[model]
        raise


@contextmanager
def explained(masters: Masters) -> Generator[None]:
    """Adds to what torch says of mixed dtypes where they come from."""
    try:
        yield
    except RuntimeError as error:
        if masters.casts_inputs and "type" in str(error):
            error.add_note(
                'precision="bf16" made the parameters and inputs of this model bf16; its buffers keep their dtype.\n'
                "  If a module needs fp32 parameters beside its buffers, as BatchNorm does, make the model bf16\n"
                "  yourself, but for that module: docs/precision.md."
            )
        raise


def _is_wide(model: nn.Module) -> bool:
    return all(parameter.dtype == torch.float32 for parameter in model.parameters())


def _narrow(model: nn.Module, masters: Masters) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for parameter in model.parameters():
            values = dense(parameter.detach())
            _give(parameter, torch.empty_like(values, dtype=torch.bfloat16))
            if not parameter.is_meta and not masters.take(parameter, values):
                parameter.detach().copy_(values)


def _widen(model: nn.Module, masters: Masters) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dtype == torch.bfloat16):
            values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            master = None if parameter.is_meta else masters.get(parameter)
            if master is None:
                values.copy_(parameter)
            else:
                read_(in_memory(values, memory_order(values)), master)
            _give(parameter, values)


def _give(parameter: torch.Tensor, values: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = values
    parameter.grad = None if gradient is None else gradient.to(values.dtype)
