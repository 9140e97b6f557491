"""Small quantized weights: a tensor class around inner tensors, and a parameter that holds tensors in an attribute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
WIDTH = 16


class Quantized(torch.Tensor):
    """Rows of 8-bit codes with a scale each; it computes with its plain values, which autograd never sees."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale, dtype, shift=0):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype, shift=0):
        self.codes, self.scale, self.shift = codes, scale, shift

    @classmethod
    def of(cls, values: torch.Tensor) -> Quantized:
        scale = values.abs().amax(1, keepdim=True) / 127
        return cls((values / scale).round().to(torch.int8), scale, values.dtype)

    def plain(self) -> torch.Tensor:
        return (self.codes.to(self.dtype) + self.shift) * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"dtype": self.dtype, "shift": self.shift}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context["dtype"], context["shift"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default, aten.clone.default, aten.t.default):
            x = args[0]
            out = cls(func(x.codes, **kwargs), func(x.scale, **kwargs), x.dtype, x.shift)
            return return_and_correct_aliasing(func, args, kwargs, out)
        return func(*(x.plain() if isinstance(x, cls) else x for x in args), **kwargs)


class Table:
    """A nested object of a parameter's attribute."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Form:
    """How codes become values: a table, and a scale for each row."""

    def __init__(self, scale: torch.Tensor, table: torch.Tensor, power: int = 1) -> None:
        self.scale, self.table, self.power = scale, Table(table), power

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return self.table.values[codes.long()] ** self.power * self.scale


class Boxed(nn.Parameter):
    """Codes, as its dense values, and their form beside them; the class is asked at each call."""

    form: Form

    @classmethod
    def of(cls, values: torch.Tensor) -> Boxed:
        scale = values.abs().amax(1, keepdim=True)
        table = torch.linspace(-1, 1, 16)
        codes = ((values / scale).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
        made: Any = torch.Tensor._make_subclass(cls, codes, False)
        made.form = Form(scale, table)
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result: Any = super().__torch_function__(func, types, args, kwargs or {})
        return -result if func is torch.Tensor.neg else result  # a call that it changes

    def __deepcopy__(self, memo):
        made: Any = torch.Tensor._make_subclass(type(self), self.data.clone(), False)
        made.form = Form(self.form.scale.clone(), self.form.table.values.clone(), self.form.power)
        return memo.setdefault(id(self), made)


class BoxedLinear(torch.autograd.Function):
    """Keeps codes and form in its context, past the tensors that autograd saves."""

    @staticmethod
    def forward(ctx, x, codes, form):
        ctx.kept = codes, form
        return x @ form.values(codes).t()

    @staticmethod
    def backward(ctx, *gradients):
        codes, form = ctx.kept
        return gradients[0] @ form.values(codes), None, None


class Adapted(nn.Module):
    """A frozen quantized layer with a low-rank correction beside it."""

    def __init__(self, kind: str, width: int = WIDTH, rank: int = 2):
        super().__init__()
        values = nn.Linear(width, width).weight.detach()
        quantized = Quantized.of(values) if kind == "wrapper" else Boxed.of(values)
        self.weight: Any = nn.Parameter(quantized, requires_grad=False) if kind == "wrapper" else quantized
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def base(self, x):
        if isinstance(getattr(self.weight, "form", None), Form):
            return BoxedLinear.apply(x, self.weight, self.weight.form)
        return nn.functional.linear(x, self.weight)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).tanh()


KINDS = ("wrapper", "attributes")


def adapted(kind: str, depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Layers of one template, all weights of which differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(*(Adapted(kind, width) for _ in range(depth)))
