"""Tensors of the CPU in a capture for another device, which this machine needn't have: its tensors have no values."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.passes.program import Program
from megatrain.scheduler.text import workload_text
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule

ELSEWHERE = torch.device("lazy", 0)  # a kind that torch knows, and for which no call looks for a driver

# The option checks ask for a device that is there; a capture without values needs none.
_trace = inspect.unwrap(trace)


def captured(model: nn.Module, *args: torch.Tensor) -> TracedModule:
    """Captures a call without gradients: for these torch would ask the driver of the device."""
    return _trace(model.requires_grad_(False), args, device=ELSEWHERE)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, order: torch.Tensor, scale: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[order] * scale + kept.to(x.device)


class Model(nn.Module):
    """Its blocks share an index made on the CPU, a number given there, and a result that was brought there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body() for _ in range(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        order = torch.arange(3, -1, -1)
        kept = (x * 2).cpu()
        for layer in self.layers:
            x = layer(x, order, scale, kept)
        return x.sum(), kept


X, SCALE = torch.empty(4, 8, device="meta"), torch.tensor(0.5)
ON_HOST = {"scale": "f32[] cpu", "arange": "i64[4] cpu", "cpu": "f32[4, 8] cpu"}


@pytest.fixture(scope="module")
def program() -> Program:
    return megatrain.lower(captured(Model(), X, SCALE))


def test_a_capture_knows_what_is_on_the_host() -> None:
    traced = captured(Model(), X, SCALE)
    assert {name: str(spec) for name, spec in traced.specs.items() if spec.on_host} == ON_HOST
    assert "traced Model(x: f32[4, 8], scale: f32[] cpu) -> (f32[], f32[4, 8] cpu)" in str(traced)
    assert "to: f32[4, 8] = cpu.to(torch.device('lazy:0'))" in str(traced)


def test_a_program_keeps_them_apart(program: Program) -> None:
    assert {name: str(value.spec) for name, value in program.values.items() if value.spec.on_host} == ON_HOST
    assert 'scale: "f32[] cpu",' in str(program)
    assert ') -> ("i64[4] cpu", "f32[4, 8] cpu", "f32[4, 8]"):' in str(program)


def test_a_schedule_counts_their_bytes_on_the_host(program: Program) -> None:
    schedule = megatrain.schedule(program, mode="forward", num_slots=1)
    workload = schedule.known_workload()
    assert [value.name for value in workload.values if value.on_host] == list(ON_HOST)
    # The number, the index, and the result; on the device the slot, the input, and what layers hand on.
    assert schedule.host_bytes == schedule.host_value_bytes == 4 + 4 * 8 + 4 * 8 * 4
    # Weight and bias begin at multiples of 512 bytes each.
    assert schedule.peak_bytes == 2 * 512 + 2 * 4 * 8 * 4
    assert "input+cpu  scale" in workload_text(workload)
    schedule.check()


def test_a_spec_makes_tensors_where_it_says() -> None:
    spec = TensorSpec((2, 3), torch.float32, (1, 2), on_host=True)
    assert str(spec) == "f32[2, 3] stride (1, 2) cpu"
    made = spec.empty(torch.device("meta"))
    assert (made.device.type, made.stride()) == ("cpu", (1, 2))
    assert TensorSpec.of(made, torch.device("meta")) == spec
    assert TensorSpec.of(made) == TensorSpec.of(made, torch.device("cpu")) == TensorSpec((2, 3), torch.float32, (1, 2))
    assert (spec.nbytes, spec.device_bytes) == (24, 0)
