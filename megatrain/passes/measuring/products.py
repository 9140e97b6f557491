"""products_of(): the products of matrices that a model's forwards compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatrain.hardware.kernels_alone import DTYPES
from megatrain.passes.exact_fakes import exact_fakes
from megatrain.passes.interpret import Code, opaque_calls
from megatrain.passes.program import Program
from megatrain.torch_private import TorchDispatchMode
from megatrain.tracer.packed.packing import has_wrappers

_RATES = {dtype: rate for rate, dtype in DTYPES.items()} | {torch.float16: "bf16"}
# By name, at which arguments the two matrices are.
_PRODUCTS: Mapping[str, int] = {"aten::mm": 0, "aten::addmm": 1, "aten::linear": 0}


def products_of(program: Program) -> tuple[tuple[int, int, int, str], ...]:
    """The distinct products of the forwards of a program, as `Hardware.measure` takes them, largest first.

    Templates that don't run without values (a module runs its own code) are left out.
    """
    found: set[tuple[int, int, int, str]] = set()
    for template in program.templates.values():
        cost = template.cost
        if opaque_calls(template.graph) or (cost is not None and cost.unmeasured):
            continue
        with exact_fakes():
            arguments = [port.spec.empty(program.device) for port in (*template.inputs, *template.state)]
            with torch.no_grad(), _Products(found):
                Code(template.graph)(arguments, is_checked=False)
    return tuple(sorted(found, key=lambda product: (-product[0] * product[1] * product[2], product)))


class _Products(TorchDispatchMode):
    """Notes the shapes of products while it is active."""

    def __init__(self, found: set[tuple[int, int, int, str]]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented  # its class computes with plain tensors, and comes here again with these
        first = _PRODUCTS.get(func._schema.name)
        if first is not None:
            one, other = args[first], args[first + 1]
            rate = _RATES.get(one.dtype)
            if rate is not None and one.numel() and other.numel():
                self._found.add((one.shape[0], one.shape[1], other.shape[1], rate))
        return func(*args, **(kwargs or {}))
