"""Calls, and kinds of models that the laws don't draw: the bits of eager PyTorch there, in any order of the streams."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests import packed
from tests.comparing import assert_same
from tests.equal_blocks import EqualBlocks
from tests.packed import Boxed, Form, Quantized, adapted
from tests.runtime.parity import train
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import (
    DEVICE,
    ORDERS,
    choose,
    host_copy,
    on_device,
    step_by_hand,
)
from tests.training.parity import MODES, adamw, generator_of, square


@pytest.mark.filterwarnings("error::megatrain.EagerKernelsWarning")
def test_recorded_kernels_have_the_bits_of_a_loop_in_any_order_of_the_streams(sim: Simulator):
    model, eager = EqualBlocks(4), EqualBlocks(4)
    own, other = adamw(model), adamw(eager)
    compiled = megatrain.compile(model, device=DEVICE, activations="offload", kernels="graphs")
    step = megatrain.TrainStep(compiled, own, loss=square, **MODES["deferred"])
    for seed, order in enumerate(("early", "early", *ORDERS)):
        batches = [torch.randn(8, 32, generator=generator_of(10 * seed + n)) for n in range(2)]
        sim.order("early")
        expected = step_by_hand(eager, other, on_device(batches), square, MODES["deferred"]["max_grad_norm"])
        choose(sim, order, compiled, seed)
        assert torch.equal(expected.cpu(), step(on_device(batches)).cpu()), order
    step.flush()
    assert_same(host_copy(list(eager.parameters())), host_copy(list(model.parameters())), "parameters")
    assert sim.violations() == []


# -- packed weights, parametrizations, numbers that change, TorchScript ------------------------------------------


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
            moved = type(weight)(weight.codes.to(DEVICE), weight.scale.to(DEVICE), weight.dtype)
            layer.weight = nn.Parameter(moved, requires_grad=False)
        else:
            layer.weight = torch.Tensor._make_subclass(Boxed, weight.data.to(DEVICE), False)
            form = weight.form
            layer.weight.form = Form(form.scale.to(DEVICE), form.table.values.to(DEVICE))
        layer.down.to(DEVICE)
        layer.up.to(DEVICE)
    return model


@pytest.mark.parametrize("kind", [*packed.KINDS, "placed"])
def test_packed_weights_train_as_in_eager(sim: Simulator, kind: str) -> None:
    model = adapted("wrapper" if kind == "placed" else kind)
    for layer in model if kind == "placed" else ():
        weight: Any = layer.weight
        layer.weight = nn.Parameter(Placed(weight.codes, weight.scale, weight.dtype), requires_grad=False)
    x = torch.randn(3, packed.WIDTH).to(DEVICE)
    eager = there(copy.deepcopy(model))
    expected = train(eager, eager, (x,), {})
    for order, activations in (("late", "keep"), ("seeded", "recompute")):
        choose(sim, order, seed=1)
        streamed = copy.deepcopy(model)
        compiled = megatrain.compile(streamed, device=DEVICE, memory="24KiB", activations=activations)
        found = train(compiled, streamed, (x,), {})
        sim.order("early")
        assert_same(expected.outputs, found.outputs)
        assert_same(expected.gradients, found.gradients)
    assert sim.violations() == []


TORCHSCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(3, 3), torch.jit.script(gate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.layer(x))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Gated(), Gated())


@TORCHSCRIPT
def test_a_module_with_torchscript_trains_as_in_eager(sim: Simulator):
    sim.order("late")
    model, eager = made(), made().to(DEVICE)
    compiled = megatrain.compile(model, device=DEVICE)
    x = torch.randn(2, 3, device=DEVICE)
    for _ in range(2):
        expected, found = eager(x), compiled(x)
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(found, expected)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad.cpu())
