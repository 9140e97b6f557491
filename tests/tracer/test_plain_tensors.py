"""Tensors that aren't plain dense ones are refused by name, as inputs and as state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import LowerError, TraceError


class Renamed(torch.Tensor):
    """A tensor class without any behaviour of its own: eager would still pass the class on."""


class Doubles(torch.Tensor):
    """A parameter class that changes calls."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.nn.functional.linear else result


class Packed(torch.Tensor):
    """A quantized weight: two tensors that only its own code can put together."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)

        def dense(x):
            return x.codes * x.scale if isinstance(x, cls) else x

        return func(*map(dense, args), **(kwargs or {}))


INPUTS = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
    "Renamed": lambda: torch.ones(4, 4).as_subclass(Renamed),
    "Doubles": lambda: torch.ones(4, 4).as_subclass(Doubles),
}


@pytest.mark.filterwarnings("ignore")
def test_inputs_and_buffers() -> None:
    compiled = megatrain.compile(nn.Linear(4, 4), device="cpu")
    for kind, make in INPUTS.items():
        with pytest.raises(TraceError, match=f"input `input_` is a {kind}"):
            compiled(make())
        model = nn.Linear(4, 4)
        model.register_buffer("extra", make())
        with pytest.raises(TraceError, match=f"buffer `extra` is a {kind}") as caught:
            megatrain.compile(model, device="cpu")(torch.ones(2, 4))
        assert kind != "Renamed" or "as_subclass(torch.Tensor)" in str(caught.value)


def test_parameters_whose_class_changes_calls() -> None:
    class Custom(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model = nn.Linear(4, 4)
    model.weight = Custom(torch.ones(4, 4))
    with pytest.raises(
        TraceError, match=r"parameter `weight` is a .*Custom, a class of parameters with its own"
    ) as caught:
        megatrain.compile(model, device="cpu")(torch.ones(2, 4))
    assert "assign a torch.nn.Parameter of its values" in str(caught.value)
    model.weight = nn.Parameter(model.weight.detach())
    assert megatrain.compile(model, device="cpu")(torch.ones(2, 4)).shape == (2, 4)


def test_codes_that_only_their_class_can_read_are_refused_by_the_name_of_their_files() -> None:
    """As diffusers keeps the weights of a GGUF file: bytes, whose class follows them through calls."""

    class Codes(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            return coded(result) if isinstance(result, torch.Tensor) and result.dtype == torch.uint8 else result

    def coded(values: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(Codes, values, False)

    class Unpacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = coded(torch.arange(16, dtype=torch.uint8).view(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.as_subclass(torch.Tensor).float()

    with pytest.raises(TraceError, match=r"parameter `weight` is a .*Codes of codes without scales .* GGUF") as caught:
        megatrain.compile(Unpacked(), device="cpu")(torch.ones(2, 4))
    for way_out in ("`model.dequantize()` of diffusers", "torchao's Int8WeightOnlyConfig", "in bf16"):
        assert way_out in str(caught.value)


def test_a_class_that_hides_its_values_is_refused_without_the_advice_that_fits_other_classes() -> None:
    weight = nn.Parameter(Packed(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5)), requires_grad=False)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = weight
    message = r"parameter `0\.weight` is a Packed, a tensor class that says nowhere where its values are"
    with pytest.raises(TraceError, match=message) as caught:
        megatrain.compile(model, device="cpu")(torch.ones(2, 4))
    assert "as_subclass" not in str(caught.value)
    assert "Load the weights in bf16 or fp32 instead" in str(caught.value)


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    compiled = megatrain.compile(model, device="cpu")
    with pytest.raises(TraceError, match=r"parameter `0\.weight` is not initialized yet"):
        compiled(torch.ones(2, 3))
    model(torch.ones(2, 3))
    compiled(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is not None


class Recurrent(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(4))
        self.way = way

    def forward(self, x):
        h = self.layer(x)
        if self.way == "bound":
            self.memory = self.memory + h.mean(0)
        else:
            self.memory.mul_(0.5).add_(h.mean(0))
        return h * self.memory


def test_gradients_through_buffers_from_call_to_call() -> None:
    for way in ("bound", "in place"):
        with pytest.raises(LowerError, match="leaves a tensor with gradient history in the buffer `memory`"):
            megatrain.compile(Recurrent(way), device="cpu")(torch.ones(2, 4))
        with torch.no_grad():
            megatrain.compile(Recurrent(way), device="cpu")(torch.ones(2, 4))
