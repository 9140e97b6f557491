"""Results of attention are kept or parked: its kernel runs once in a step, and the bits are eager PyTorch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatrain
from megatrain.errors import DeviceMemoryWarning, ExecuteError
from megatrain.passes import kept_results
from megatrain.passes.kept_results import HandedResults, KeptResults
from megatrain.runtime.streams.stream_set import Chaos
from tests.attention import EAGER_TO_KEEP, Layers, forwards, kernels_of_attention, text
from tests.comparing import assert_same

pytestmark = pytest.mark.usefixtures("short_texts")
MORE = 300_000
"""Bytes beside those of a step that recomputes: room for results, and for no graph."""

Batches = Sequence[torch.Tensor]


def step_of(model: nn.Module, **options: Any) -> Any:
    compiled = megatrain.compile(copy.deepcopy(model), device="cpu", **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    return compiled, megatrain.TrainStep(compiled, optimizer, loss=lambda result, _: result)


def keeping(model: nn.Module, batches: Batches, *, more: int = MORE, **options: Any) -> Any:
    """A training step in a memory in which results are kept."""
    _, frugal = step_of(model, activations="recompute", memory="1GiB", **options)
    memory = frugal.prepare(list(batches)).device_bytes + more
    return step_of(model, memory=memory, hardware=EAGER_TO_KEEP, **options)


def eager(model: nn.Module, steps: Sequence[Batches], context: Callable[[], Any]) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            with context():
                loss = model(batch) / len(batches)
            loss.backward()
        optimizer.step()
    return model


def assert_bits_of_eager(model: Layers, steps: Sequence[Batches], context: Callable[[], Any]) -> Any:
    """Trains, and counts the kernels of the last step; returns the step."""
    with context():
        compiled, step = keeping(model, steps[0])
        compiled.megatrain.engine.set_chaos(Chaos(seed=0, max_delay_s=0.001))
        for batches in steps[:-1]:
            step(list(batches))
        with kernels_of_attention() as kernels:
            step(list(steps[-1]))
    kept = {*step.schedule.results, *step.schedule.saves}
    assert step.schedule.results
    calls = sum(count * (1 if index in kept else 2) for index, count in enumerate(model.calls))
    assert forwards(kernels) == len(steps[-1]) * calls
    expected = eager(model, steps, context)
    assert_same(list(expected.parameters()), list(compiled.parameters()))
    return step


def texts(micro_batches: int, steps: int = 2) -> list[list[torch.Tensor]]:
    return [[text(10 * step + number) for number in range(micro_batches)] for step in range(steps)]


@pytest.mark.parametrize(
    ("kind", "micro_batches", "context"),
    [("causal", 3, torch.enable_grad), ("grouped", 1, partial(torch.autocast, "cpu", dtype=torch.bfloat16))],
)
def test_steps_have_the_bits_of_eager_and_run_attention_once(kind: str, micro_batches: int, context: Any):
    step = assert_bits_of_eager(Layers(*[kind] * 4), texts(micro_batches), context)
    assert step.schedule.results == (0, 1, 2)
    values = step.schedule.known_workload().values
    parked = [index for found in step.schedule.parked().values() for index in found]
    assert any(values[index].is_result for index in parked) or kind != "causal"


def grads_there(model: Any) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@functools.cache
def frugal_bytes() -> int:
    """What a call of four causal layers needs that recomputes."""
    frugal = megatrain.compile(Layers(*["causal"] * 4), device="cpu", activations="recompute", memory="1GiB")
    return frugal.prepare(text()).schedule.device_bytes


def call_of(model: Layers) -> Any:
    """A model, of four causal layers, whose calls keep results."""
    return megatrain.compile(copy.deepcopy(model), device="cpu", memory=frugal_bytes() + 2 * MORE)


def test_calls_keep_results_and_can_be_differentiated_twice():
    model = Layers(*["causal"] * 4)
    compiled, expected = call_of(model), copy.deepcopy(model)
    for retain in (True, False):
        loss = compiled(text())
        with kernels_of_attention() as kernels:
            loss.backward(retain_graph=retain)
        assert compiled.schedule.results
        assert forwards(kernels) == 4 - len({*compiled.schedule.results, *compiled.schedule.saves})
        first = expected(text())
        first.backward(retain_graph=retain)
        if retain:
            loss.backward()
            first.backward()
    assert_same(grads_there(expected), grads_there(compiled))


def grads_of(compiled: Any) -> list[torch.Tensor | None]:
    compiled(text()).backward()
    return grads_there(compiled)


def test_a_result_that_is_written_into_is_refused(monkeypatch: pytest.MonkeyPatch):
    compiled = call_of(Layers(*["causal"] * 4))
    real = HandedResults.__init__

    def written(mode: HandedResults, kept: KeptResults) -> None:
        real(mode, kept)
        for tensor in kept.tensors:
            tensor.zero_()

    monkeypatch.setattr(HandedResults, "__init__", written)
    with pytest.raises(ExecuteError, match="a result of attention that is kept for the backward was modified in place"):
        grads_of(compiled)


def test_other_kernels_than_planned_keep_nothing_and_say_so():
    model = Layers(*["causal"] * 4)
    compiled, expected = call_of(model), copy.deepcopy(model)
    grads_of(compiled)
    compiled.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.warns(DeviceMemoryWarning, match=r"block \d \(layers.\d\) ran other kernels of attention"):
            loss = compiled(text())
        loss.backward()
        expected(text()).backward()
    assert_same(grads_there(expected), grads_there(compiled))


def test_a_kernel_with_dropout_is_never_kept():
    q = torch.randn(1, 1, 4, 8)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert kept_results.is_kept(kernel, (q, q, q), {})
    assert kept_results.is_kept(kernel, (q, q, q, 0.0, True), {})
    assert not kept_results.is_kept(kernel, (q, q, q, 0.1), {})
    assert not kept_results.is_kept(kernel, (q, q, q), {"dropout_p": 0.1})
    on_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert kept_results.is_kept(on_cuda, (q, q, q), {})
    assert not kept_results.is_kept(on_cuda, (q, q, q, 0.5), {})
    assert not kept_results.is_kept(torch.ops.aten._scaled_dot_product_flash_attention_backward.default, (), {})
    in_place = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)  # newer than torch 2.11
    assert in_place is None or not kept_results.is_kept(in_place.default, (), {})
    assert not kept_results.is_kept(torch.ops.aten.mm.default, (q, q), {})
