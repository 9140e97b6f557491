"""Calls, and kinds of models that the laws don't draw: the bits of eager PyTorch there, in any order of the streams."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.recording.unseen_kernels import kernels_need_values
from tests import packed
from tests.comparing import assert_same
from tests.equal_blocks import EqualBlocks
from tests.models import MODELS
from tests.packed import Boxed, Form, Quantized, adapted
from tests.parametrized import KINDS, OPAQUE, model_of
from tests.parametrized import WIDTH as PARAMETRIZED_WIDTH
from tests.runtime.parity import train
from tests.simulated_device.simulator import OrderName, Simulator
from tests.simulated_runs.on_device import (
    DEVICE,
    ORDERS,
    choose,
    compiled_copy,
    eager_copy,
    host_copy,
    on_device,
    step_by_hand,
    trained,
)
from tests.training.parity import MODES, adamw, generator_of, sgd, square
from tests.training.test_changing_numbers import COMPUTES, Given, Normed
from tests.training.test_changing_numbers import X as GIVEN


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("gpt_loss", "offload"),
        *(pytest.param(name, "offload", marks=pytest.mark.nightly) for name in ("cnn", "t5_labels", "torch_encoder")),
    ],
)
def test_calls_have_the_bits_of_eager(sim: Simulator, name: str, activations: str):
    model, args, kwargs = MODELS[name]()
    eager = eager_copy(model)
    compiled, streamed = compiled_copy(model, activations=activations, block_bytes=1)
    for seed, order in enumerate(ORDERS if name != "gpt_loss" else ("late", "seeded")):
        sim.order("early")
        expected = trained(eager, eager, args, kwargs, seed=seed)
        choose(sim, order, compiled)
        assert_same(expected, trained(compiled, streamed, args, kwargs, seed=seed), order)
    assert sim.violations() == []


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


X = torch.randn(5, PARAMETRIZED_WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("make", "order"),
    [(KINDS["two"], "late"), pytest.param(OPAQUE["two"], "seeded", marks=pytest.mark.nightly)],
    ids=["two", "opaque"],
)
def test_parametrized_models_train_as_in_eager(sim: Simulator, make: Any, order: OrderName):
    model = model_of(make)
    eager, streamed = copy.deepcopy(model).to(DEVICE), model
    random.seed(0)
    expected = trained(eager, eager, (X,), {}, steps=3)
    compiled = megatrain.compile(streamed, device=DEVICE, memory="64KiB" if make in OPAQUE.values() else "24KiB")
    sim.order(order)
    random.seed(0)
    assert_same(expected, trained(compiled, streamed, (X,), {}, steps=3))
    assert len(compiled.program.blocks) >= 3


def test_a_walk_between_steps_finds_and_leaves_the_weights_as_eager_does(sim: Simulator):
    streamed, eager = model_of(KINDS["two"]), model_of(KINDS["two"]).to(DEVICE)
    compiled = megatrain.compile(streamed, device=DEVICE, memory="24KiB")
    keys = list(streamed.state_dict())
    sim.order("late")
    for number in range(3):
        x = (X + number).to(DEVICE)
        with torch.no_grad():
            expected = eager(x).cpu()
            with compiled.megatrain.walk():
                assert_same(expected, compiled(x).cpu())
        for call, model in ((eager, eager), (compiled, streamed)):
            call(x).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
        assert_same(host_copy(list(eager.parameters())), host_copy(list(streamed.parameters())))
    assert list(streamed.state_dict()) == keys
    assert not any(p.device != torch.device("cpu") for p in streamed.parameters())


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Normed(), Given(COMPUTES["function"]), Normed(), Given(COMPUTES["arithmetic"])])

    def forward(self, x: torch.Tensor, number: float, also: float) -> torch.Tensor:
        for part in self.parts:
            x = part(x, number, also) if isinstance(part, Given) else part(x)
        return x


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::megatrain.EagerKernelsWarning")
def test_numbers_that_change_have_one_capture_and_eagers_bits():
    torch.manual_seed(0)
    eager: Any = Both()
    streamed: Any = copy.deepcopy(eager)
    reference, own = sgd(eager), sgd(streamed)
    compiled = megatrain.compile(streamed, device=DEVICE, memory="1MiB", kernels="graphs")
    step = megatrain.TrainStep(compiled, own, loss=square)
    for number in (0.1, 0.2, 0.3, 0.4):
        batches = [(x, number, number + 1) for x in on_device(GIVEN[:2])]
        wanted = step_by_hand(eager, reference, batches, square, None)
        assert torch.equal(step(batches).cpu(), wanted.cpu())
    step.flush()
    expected, found = host_copy([*eager.parameters(), *eager.buffers()]), [*streamed.parameters(), *streamed.buffers()]
    assert all(map(torch.equal, expected, found))
    assert compiled.megatrain.variant.number == 3


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
def test_a_scripted_function_needs_values(sim: Simulator):
    function = torch.jit.script(gate)
    real = torch.ones(2, device=DEVICE)
    with FakeTensorMode() as mode, kernels_need_values():
        assert function(torch.ones(2)).shape == (2,)
        with pytest.raises(RuntimeError, match="`gate` may be fused, and needs tensors with values"):
            function(mode.from_tensor(real))
    with kernels_need_values():
        assert torch.equal(function(real).cpu(), torch.full((2,), 2.0))


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
