"""The printed form of each pass's result, on models small enough to read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import nn

from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.dedup import dedup
from megatrain.passes.lift_state import lift_state
from megatrain.passes.partition import partition
from megatrain.passes.pipeline import lower
from megatrain.passes.program import template_text
from megatrain.tracer.trace import trace
from tests.models import MODELS


class Tiny(nn.Module):
    """Two layers, a dead call, a counter, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        torch.arange(3)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _tiny():
    return trace(Tiny(), (torch.ones(1, 2),))


def test_canonicalize_removes_what_nobody_reads():
    assert "arange" in str(_tiny())
    assert_expected_inline(
        str(canonicalize(_tiny())),
        """\
traced Tiny(arg0: f32[1, 2]) -> (f32[1, 2])
  state: 2 parameters, 32 bytes; 1 buffers, 8 bytes
  add_: i64[] = calls.add_(1)
  linear: f32[1, 2] = F.linear(arg0, layers.0.weight, None)  # layers.0
  relu: f32[1, 2] = torch.relu(linear)
  linear_1: f32[1, 2] = F.linear(relu, layers.1.weight, None)  # layers.1
  relu_1: f32[1, 2] = torch.relu(linear_1)
  write back calls = calls
  return relu_1""",
    )


def test_partition_cuts_at_the_layers():
    assert_expected_inline(
        str(partition(canonicalize(_tiny()))).split("\n\n")[0],
        """\
program Tiny: 3 blocks, 3 templates
  inputs arg0; outputs relu_1
  buffer calls = calls
  commit calls = calls_in_0
  block 0 self: t0(calls) -> calls_in_0; state 0 bytes
  block 1 layers.0: t1(arg0) -> relu; state 0 bytes
  block 2 layers.1: t2(relu) -> relu_1; state 0 bytes""",
    )


def test_a_template_reads_state_by_name_before_it_is_lifted():
    cut = partition(canonicalize(_tiny()))
    assert_expected_inline(
        template_text(cut.templates["t1"]),
        """\
def t1(
    arg0: "f32[1, 2]",
) -> ("f32[1, 2]"):
    linear: "f32[1, 2]" = F.linear(arg0, layers.0.weight, None)
    relu: "f32[1, 2]" = torch.relu(linear)
    return (relu,)""",
    )


def test_a_lifted_template_takes_its_state_by_keyword():
    lifted = lift_state(partition(canonicalize(_tiny())))
    assert_expected_inline(
        template_text(lifted.templates["t1"]),
        """\
def t1(
    arg0: "f32[1, 2]",
    *,
    weight: "f32[2, 2]",
) -> ("f32[1, 2]"):
    linear: "f32[1, 2]" = F.linear(arg0, weight, None)
    relu: "f32[1, 2]" = torch.relu(linear)
    return (relu,)""",
    )
    assert [b.binding for b in lifted.blocks] == [(), ("layers.0.weight",), ("layers.1.weight",)]


def test_dedup_gives_equal_layers_one_template():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    program = dedup(lift_state(partition(canonicalize(trace(model, (torch.ones(1, 2),))))))
    assert_expected_inline(
        str(program),
        """\
program Sequential: 3 blocks, 1 templates
  inputs arg0; outputs linear_2
  block 0 0: t0(arg0) -> linear; state 16 bytes
  block 1 1: t0(linear) -> linear_1; state 16 bytes
  block 2 2: t0(linear_1) -> linear_2; state 16 bytes

# template t0: blocks 0, 1, 2
def t0(
    arg0: "f32[1, 2]",
    *,
    weight: "f32[2, 2]",
) -> ("f32[1, 2]"):
    linear: "f32[1, 2]" = F.linear(arg0, weight, None)
    return (linear,)""",
    )


def test_modes_are_printed_as_the_python_that_enters_them():
    program = lower(trace(*MODELS["autocast_region"]()))
    assert_expected_inline(
        template_text(program.templates["t1"]),
        """\
def t1(
    linear: "f32[2, 4]",
    *,
    fc_weight: "f32[4, 4]",
    fc_bias: "f32[4]",
) -> ("f32[2, 4]"):
    with torch.autocast('cpu', torch.bfloat16, cache_enabled=False):
        linear_1: "bf16[2, 4]" = F.linear(linear, fc_weight, fc_bias)
        tanh: "bf16[2, 4]" = torch.tanh(linear_1)
        add: "f32[2, 4]" = linear.add(tanh)
    return (add,)""",
    )


def test_a_gpt_prints_as_a_program(golden: Callable[[str, str], None]):
    golden("program_gpt", str(lower(trace(*MODELS["gpt_loss"]()))))


def test_a_cnn_prints_as_a_program(golden: Callable[[str, str], None]):
    golden("program_cnn", str(lower(trace(*MODELS["cnn"]()))))
