"""Kernels of torch.compile: eager's numbers within rounding in each way that a block runs, or eager's own kernels."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Device
from megatrain.errors import EagerKernelsWarning, OptionError
from tests.equal_blocks import EqualBlocks
from tests.gradients import grad_of

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler"
    ),
    # Of torch's own compiler, whose warnings as errors are failed compilations.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# Each block sums the terms of a product in another order: 32 of them, and the errors of four blocks add up.
BOUND = 4 * 32 * torch.finfo(torch.float32).eps


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: grad_of(parameter) for name, parameter in model.named_parameters()}


def compiled_of(model: nn.Module, **options: Any) -> megatrain.CompiledModule:
    return megatrain.compile(model, device="cpu", transfer="copy", kernels="inductor", **options)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= BOUND * tensor.abs().max(), name


def test_gradients_are_eagers_within_rounding_with_eagers_draws_and_one_compilation_serves_all_blocks():
    """Dropout draws in the recomputed blocks, too."""
    eager, model = EqualBlocks(extra=nn.Dropout(0.3)), EqualBlocks(extra=nn.Dropout(0.3))
    compiled = compiled_of(model, activations="recompute")
    states: list[torch.Tensor] = []
    for call in (eager, compiled):
        torch.manual_seed(7)
        for seed in range(2):
            call(batch(seed)).square().mean().backward()
        states.append(torch.get_rng_state())
    assert len(compiled.megatrain.program.templates) == 1
    assert compiled.megatrain.engine.runners.on_eager_kernels(compiled.megatrain.program) == {}
    assert_close(gradients_of(model), gradients_of(eager))
    assert torch.equal(*states)
    assert "kernels inductor" in str(compiled)
    assert any(not torch.equal(gradients_of(model)[name], g) for name, g in gradients_of(eager).items())


class Reads(nn.Module):
    """Reads a value in mid-step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > -1e9 else x


def test_what_no_compiler_serves_runs_on_eagers_kernels_with_eagers_bits_and_says_so():
    eager, model = EqualBlocks(extra=Reads()), EqualBlocks(extra=Reads())
    compiled = compiled_of(model)
    eager(batch(0)).square().mean().backward()
    with pytest.warns(EagerKernelsWarning, match=r"template t0 runs on eager's kernels: it compares values"):
        compiled(batch(0)).square().mean().backward()
    assert "template t0 on eager's kernels: it compares values with those of the capture" in str(compiled)
    assert all(torch.equal(gradients_of(model)[name], g) for name, g in gradients_of(eager).items())


def test_a_template_that_would_draw_other_numbers_keeps_eagers():
    """An LSTM's dropout is drawn otherwise by its decomposition: the first run shows it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.LSTM(8, 8, num_layers=2, dropout=0.5)

    results: list[Any] = []
    for model in (build(), build()):
        call: Any = model if not results else compiled_of(model)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerKernelsWarning)
            output = call(batch(0).view(4, 8, 8))[0]
        output.square().sum().backward()
        results.append((output.detach(), gradients_of(model), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][name], g) for name, g in results[0][1].items())
    assert torch.equal(results[0][2], results[1][2])


def test_a_failing_compilation_falls_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    eager, model = EqualBlocks(), EqualBlocks()
    compiled = compiled_of(model)
    with pytest.warns(EagerKernelsWarning, match="no kernels today"):
        compiled(batch(0)).square().mean().backward()
    eager(batch(0)).square().mean().backward()
    assert all(torch.equal(gradients_of(model)[name], g) for name, g in gradients_of(eager).items())


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernels today")


def test_a_device_that_torch_compiles_nothing_for_is_refused():
    plain = Device(torch.device("cpu"), "plain")
    with pytest.raises(OptionError, match=r'^kernels="inductor" makes no kernels for plain\.'):
        megatrain.compile(EqualBlocks(), device=plain, kernels="inductor")
    with pytest.raises(OptionError, match="kernels"):
        megatrain.compile(EqualBlocks(), device="cpu", kernels="triton")
