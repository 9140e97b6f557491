"""Packed weights: frozen parameters of several tensors cross as their bytes, and compute by their class's own code."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, OptionError, TraceError, WeightsError
from tests.packed import KINDS, WIDTH, Adapted, Quantized, adapted
from tests.runtime.parity import PATHS, assert_parity

kinds = pytest.mark.parametrize("kind", KINDS)
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(("path", "kind"), [("offload", "wrapper"), ("keep", "attributes")])
def test_training_has_the_bits_of_eager(kind: str, path: str) -> None:
    compiled = assert_parity(adapted(kind), (X,), {}, **PATHS[path])
    assert path == "offload" or len(compiled.program.templates) <= 2  # an input without a gradient isn't another code


@kinds
def test_packed_bytes_cross_and_count(kind: str) -> None:
    model = adapted(kind, depth=3)
    compiled = megatrain.compile(model, device="cpu", memory="40KiB")
    compiled(X)
    block = compiled.program.blocks[1]
    scales = 4 * WIDTH + (0 if kind == "wrapper" else 4 * 16)
    assert compiled.program.state_bytes(block) == WIDTH * WIDTH + scales + 2 * (4 * WIDTH * 2)
    inner = ["weight.codes", "weight.scale"] if kind == "wrapper" else ["weight", "weight.form.scale"]
    assert set(f"1.{name}" for name in inner) <= set(block.binding)
    assert f"packed {'F.linear' if kind == 'wrapper' else 'tests.packed.BoxedLinear.apply'}(" in str(compiled.program)


class Noisy(Quantized):
    """It draws where no call of the graph shows it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        return result + torch.rand(result.shape) if func is torch.ops.aten.mm.default else result


def test_random_numbers_within_a_class_are_those_of_eager() -> None:
    model = adapted("wrapper", depth=3)
    for layer in list[Any](model):
        layer.weight = nn.Parameter(Noisy.of(layer.weight.plain()), requires_grad=False)
    compiled = assert_parity(model, (X,), {}, transfer="copy", activations="recompute")
    assert all(template.is_random for template in compiled.program.templates.values())


def test_a_trained_one_is_refused_and_its_advice_works() -> None:
    class Straight(Quantized):
        """One with a gradient of its own, as in quantized training."""

    model = adapted("wrapper")
    layer: Any = model[0]
    values = layer.weight.plain()
    layer.weight = nn.Parameter(Straight.of(values))
    with pytest.raises(TraceError, match=r"`0\.weight` is a \S*Straight that is trained") as caught:
        megatrain.compile(model, device="cpu")(X)
    assert "requires_grad_(False)" in str(caught.value)
    layer.weight.requires_grad_(False)
    assert torch.equal(megatrain.compile(model, device="cpu")(X), copy.deepcopy(model)(X))
    layer.weight = nn.Parameter(values)  # or in fp32
    assert torch.equal(megatrain.compile(model, device="cpu")(X), copy.deepcopy(model)(X))


def test_an_input_is_refused_and_its_advice_works() -> None:
    class Model(nn.Module):
        def forward(self, x, *inner):
            weight = inner[0] if len(inner) == 1 else Quantized(inner[0], inner[1], torch.float32)
            return nn.functional.linear(x, weight)

    weight = Quantized.of(torch.randn(4, WIDTH))
    with pytest.raises(
        TraceError, match="is a Quantized, a tensor class that keeps its values in inner tensors"
    ) as caught:
        megatrain.compile(Model(), device="cpu")(X, weight)
    assert "Pass its inner tensors, and make the object around them inside the forward" in str(caught.value)
    found = megatrain.compile(Model(), device="cpu")(X, weight.codes, weight.scale)
    assert torch.equal(found, Model()(X, weight))


def test_what_no_graph_repeats_is_refused() -> None:
    class Listed(Adapted):
        def base(self, x):
            return x @ torch.cat([self.weight, self.weight])[:WIDTH]

    class Own(Adapted):
        def base(self, x):
            return super().base(x) * random.random()

    class Keeps(Adapted):
        def base(self, x):
            self.weight.scale = self.weight.scale + 1
            return super().base(x)

    for kind, message in (
        (Listed, "passes a Quantized inside a list"),
        (Own, r"holds packed \(quantized\) weights in `0`, a module that runs its own code because it draws"),
        (Keeps, r"changes the attribute `scale` of the packed parameter `0\.weight`"),
    ):
        model: Any = nn.Sequential(kind("wrapper"))
        before = copy.deepcopy(model)
        with pytest.raises(TraceError, match=message):
            megatrain.compile(model, device="cpu")(X)
        assert torch.equal(model[0].weight.plain(), before[0].weight.plain())


@kinds
def test_bf16_of_an_fp32_model_and_files_are_refused(kind: str, tmp_path: Path) -> None:
    for refused in (
        lambda: megatrain.compile(adapted(kind), device="cpu", precision="bf16"),
        lambda: megatrain.plan(adapted(kind), X, precision="bf16"),
    ):
        with pytest.raises(OptionError, match=r"packed parameter `0\.weight` can't be converted"):
            refused()
    save_file({"down": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"can't fill the packed \(quantized\) parameter `0\.weight`"):
        megatrain.compile(adapted(kind), device="cpu", weights=tmp_path)


@kinds
def test_a_walk_of_packed_weights_is_refused_where_it_would_bring_them(kind: str) -> None:
    model = adapted(kind)
    with torch.no_grad():
        expected = model(X)
        in_place = megatrain.compile(model, device="cpu", transfer="bind")
        with in_place.megatrain.walk():
            assert torch.equal(model(X), expected)
        copied = megatrain.compile(model, device="cpu", memory="1MiB")
        with pytest.raises(ExecuteError, match=r" is a walk.* packed \(quantized\) parameter `0\.weight`"):
            with copied.megatrain.walk():
                pass
