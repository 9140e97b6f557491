"""Launches of Triton kernels, which no mode of torch sees, and which read the addresses that fake tensors lack."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import OpaqueModelWarning, TraceError
from megatrain.passes.interpret import exact_fakes
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.tracer.calls import call_text
from megatrain.tracer.trace import trace
from tests.stand_in_triton import (
    Autotuner,
    JITFunction,
    Scaling,
    assert_bits_of_eager,
    in_layers,
    stand_in_triton,
)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_triton(monkeypatch)


def scale(x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(x * weight)


scaling = JITFunction(scale)
tuned = Autotuner(scaling)


@pytest.mark.parametrize("kernel", [scaling, tuned], ids=["kernel", "tuned"])
@pytest.mark.parametrize(("has_function", "said"), [(True, "Scaled.apply("), (False, "opaque")])
def test_models_with_kernels_are_captured_on_values_and_have_the_bits_of_eager(
    kernel: Any, said: str, *, has_function: bool
):
    model = in_layers(3, lambda: Scaling(kernel[(1,)], has_function=has_function))
    compiled = assert_bits_of_eager(model, torch.randn(2, 3), memory="64KiB", transfer="copy")
    assert said in str(compiled.program)
    assert len(compiled.program.blocks) == 3
    assert "" not in {template.cost.unmeasured for template in compiled.program.templates.values()}
    if not has_function:
        assert "launches the Triton kernel `scale` at" in str(compiled.program)
        assert "stand_in_triton.py" in str(compiled.program)


def test_a_kernel_needs_the_values_of_the_weights():
    with torch.device("meta"):
        model = nn.Sequential(Scaling(scaling[(1,)]), Scaling(scaling[(1,)]))
    with pytest.raises(TraceError) as refused:
        trace(model, (torch.randn(2, 3),))
    said, rule, way_out = str(refused.value).splitlines()
    assert "Scaled.apply" in said
    assert "stand_in_triton.py" in said
    assert rule.endswith("`scale` needs tensors with values.")
    assert "Load the weights before compiling" in way_out


def test_a_model_that_launches_itself_says_what_helps():
    with pytest.warns(OpaqueModelWarning, match="launches the Triton kernel `scale`"):
        megatrain.compile(Scaling(scaling[(1,)], has_function=False), device="cpu")(torch.randn(2, 3))


class Filled(torch.autograd.Function):
    """Writes into the tensor that it is given, or by an address alone."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "by an address":
            JITFunction(lambda: None)[(1,)]()
        else:
            scaling[(1,)](x.sum(1), torch.ones(2), total)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, grads[0].expand(2, 3), None


class Totals(nn.Linear):
    """A tensor made of constants alone, or an input, becomes unknown when a kernel writes what depends on weights."""

    def __init__(self, how: str = "") -> None:
        super().__init__(3, 3)
        self.how = how

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.how == "of inputs":  # nothing here depends on weights: even so the effect is no constant
            total = input.clone()
            Filled.apply(total[:, 0], input, "")
            return super().forward(input) + total
        total, x = torch.zeros(2), super().forward(input).abs() + 1
        result: Any = Filled.apply(total, x, self.how)
        return result * total.sum()


@pytest.mark.parametrize("how", ["", "of inputs"])
def test_what_a_kernel_has_changed_is_found(how: str):
    torch.manual_seed(0)
    traced = trace(Totals(how), (torch.randn(2, 3),))
    (call,) = [node for node in traced.graph.nodes if node.meta.get("writes")]
    assert "Filled" in call_text(call)
    assert_bits_of_eager(Totals(how), torch.randn(2, 3))


def test_a_kernel_that_is_given_no_tensors_is_refused():
    with pytest.raises(TraceError, match="which is given no tensors"):
        trace(Totals("by an address"), (torch.randn(2, 3),))


def test_tokens_that_a_kernel_may_mix_are_not_tiled():
    mixing = JITFunction(lambda x, weight, made: made.copy_(x.flip(0) * weight))
    model = in_layers(4, lambda: Scaling(mixing[(1,)], 4))
    compiled = assert_bits_of_eager(model, torch.randn(300, 4), passes=[partial(tile_tokens, rows=64)])
    assert "Scaled.apply(" in str(compiled.program)


def test_no_launcher_reaches_a_kernel_without_values_and_all_is_as_before_afterwards():
    real, made, before = torch.ones(2), torch.empty(2), scaling[(1,)]
    kinds, finders, launched = (JITFunction, Autotuner), [*sys.meta_path], len(scaling.launched)
    methods = [kind.run for kind in kinds]
    with exact_fakes() as mode:
        assert not {*methods} & {kind.run for kind in kinds}
        for tensor in (mode.from_tensor(real), real, torch.empty(2, device="meta")):
            for launcher in (before, scaling[(1,)], tuned[(1,)], partial(scaling.run, grid=(1,), warmup=False)):
                with pytest.raises(RuntimeError, match="the Triton kernel `scale` needs tensors with values"):
                    launcher(tensor, real, real)
        thread = threading.Thread(target=before, args=(real, real, made))
        thread.start()  # which is another's
        thread.join()
    assert [kind.run for kind in kinds] == methods
    assert sys.meta_path == finders
    assert len(scaling.launched) == launched + 1
