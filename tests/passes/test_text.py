"""The printed form of each pass's result, on models small enough to read."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import nn

from megatrain.passes.canonicalize import canonicalize, dedup
from megatrain.passes.partition import partition
from megatrain.passes.pipeline import lift_state, lower
from megatrain.tracer.trace import trace
from tests import captures


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
traced Tiny(x: f32[1, 2]) -> f32[1, 2]
  state: 2 parameters, 32 bytes; 1 buffer, 8 bytes
  add_: i64[] = calls.add_(1)
  linear: f32[1, 2] = F.linear(x, layers.0.weight, None)  # layers.0
  relu: f32[1, 2] = torch.relu(linear)
  linear_1: f32[1, 2] = F.linear(relu, layers.1.weight, None)  # layers.1
  relu_1: f32[1, 2] = torch.relu(linear_1)
  write back calls = calls
  return relu_1""",
    )


def test_dedup_gives_equal_layers_one_template():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    program = dedup(lift_state(partition(canonicalize(trace(model, (torch.ones(1, 2),))))))
    assert_expected_inline(
        str(program),
        """\
program Sequential: 3 blocks, 1 template
  inputs input_; outputs linear_2
  block 0 0: t0(input_) -> linear; state 16 bytes
  block 1 1: t0(linear) -> linear_1; state 16 bytes
  block 2 2: t0(linear_1) -> linear_2; state 16 bytes

# template t0: blocks 0-2
def t0(
    input_: "f32[1, 2]",
    *,
    weight: "f32[2, 2]",
) -> "f32[1, 2]":
    linear: "f32[1, 2]" = F.linear(input_, weight, None)
    return linear""",
    )


def test_a_gpt_prints_as_a_program(golden: Callable[[str, str], None]):
    golden("program_gpt", str(captures.program("gpt_loss")))


def scaled(x: torch.Tensor, scale: float = 1.0, shift: int | None = None, *, is_flat: bool = False) -> torch.Tensor:
    """A function of a user's own, with defaults."""
    y = x * scale + (0 if shift is None else shift)
    return y.flatten() if is_flat else y


# `__wrapped__` has other defaults than the wrapper, which is what a call calls.
@functools.wraps(scaled)
def doubled(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return scaled(x, scale)


def test_values_show_in_a_line_without_addresses():
    traced = _tiny()
    program = lower(traced)
    assert repr(traced) == "<TracedModule Tiny: 6 calls, 3 state tensors>"
    assert repr(program) == "<Program Tiny: 3 blocks, 2 templates>"
    assert repr(program.blocks[1]) == "<Block 1 layers.0: t1>"
    assert repr(program.templates["t1"]) == "<Template t1: 1 input, 1 state tensor, 1 output>"


def test_the_heading_of_a_template_tells_its_blocks_and_its_cost():
    kinds = (nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    program = lower(trace(nn.Sequential(*kinds), (torch.ones(4, 2),)))
    headings = [line for line in str(program).splitlines() if line.startswith("#")]
    assert_expected_inline(
        "\n".join(headings),
        """\
# template t0: blocks 0-1, 3; state 24 B, saves 0 B, workspace 64 B, 32 + 64 FLOP
# template t1: block 2; state 16 B, saves 0 B, workspace 64 B, 32 + 64 FLOP""",
    )
