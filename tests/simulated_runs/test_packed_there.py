"""Packed weights on the simulated device: their inner tensors cross, and are packed again there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.packed import KINDS, WIDTH, Boxed, Form, Quantized, adapted
from tests.runtime.parity import assert_same, train
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import choose


class Placed(Quantized):
    """One whose context says where it is, as torchao's NF4 does: only `.to` makes one of another place."""

    def __init__(self, codes, scale, dtype, shift=0, place=None):
        super().__init__(codes, scale, dtype, shift)
        self.place = place or codes.device

    @staticmethod
    def __new__(cls, codes, scale, dtype, shift=0, place=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=place or codes.device)

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"dtype": self.dtype, "place": self.place}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context["dtype"], 0, context["place"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            x, place = args[0], (kwargs or {}).get("device")
            return cls(x.codes.to(place), x.scale.to(place), x.dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


def there(model: nn.Module) -> nn.Module:
    """Moves a model, parameter by parameter: `Module.to` can't swap every class."""
    for layer in model:  # pyright: ignore[reportGeneralTypeIssues]
        weight: Any = layer.weight
        if isinstance(weight, Quantized):
            moved = type(weight)(weight.codes.to("sim"), weight.scale.to("sim"), weight.dtype)
            layer.weight = nn.Parameter(moved, requires_grad=False)
        else:
            layer.weight = torch.Tensor._make_subclass(Boxed, weight.data.to("sim"), False)
            form = weight.form
            layer.weight.form = Form(form.scale.to("sim"), form.table.values.to("sim"))
        layer.down.to("sim")
        layer.up.to("sim")
    return model


@pytest.mark.parametrize("kind", [*KINDS, "placed"])
def test_training_has_the_bits_of_eager_in_every_order(sim: Simulator, kind: str) -> None:
    model = adapted("wrapper" if kind == "placed" else kind)
    for layer in model if kind == "placed" else ():
        weight: Any = layer.weight
        layer.weight = nn.Parameter(Placed(weight.codes, weight.scale, weight.dtype), requires_grad=False)
    x = torch.randn(3, WIDTH).to("sim")
    eager = there(copy.deepcopy(model))
    expected = train(eager, eager, (x,), {})
    for order, activations in (("late", "keep"), ("seeded", "recompute")):
        choose(sim, order, seed=1)
        streamed = copy.deepcopy(model)
        compiled = megatrain.compile(streamed, device="sim", memory="24KiB", activations=activations)
        found = train(compiled, streamed, (x,), {})
        sim.order("early")
        assert_same(expected.outputs, found.outputs)
        assert_same(expected.gradients, found.gradients)
    assert sim.violations() == []
