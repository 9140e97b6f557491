"""The printed form of a capture: complete, deterministic, readable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from megatrain.passes.pipeline import lower
from megatrain.tracer.trace import trace
from tests import captures
from tests.models import MODELS


@pytest.mark.parametrize("name", ["cnn", "mixture_of_experts", "aliased_inplace"])
def test_equal_models_print_equal_texts(name: str):
    first, second = captures.traced(name), trace(*MODELS[name]())
    assert str(first) == str(second)
    assert str(captures.program(name)) == str(lower(second))
    assert " at 0x" not in str(first)


def test_a_gpt_prints_its_calls_state_and_ties(golden: Callable[[str, str], None]):
    golden("traced_gpt", str(captures.traced("gpt_loss")))


def test_a_capture_prints_write_backs_guards_and_ties():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x, mask):
            self.seen += 1
            if mask.any():
                x = x * mask
            return self.second(self.first(x)), {"count": self.seen}

    traced = trace(Small(), (torch.ones(1, 2), torch.tensor([True, False])))
    assert_expected_inline(
        str(traced),
        """\
traced Small(x: f32[1, 2], mask: bool[2]) -> (f32[1, 2], i64[])
  state: 1 parameter, 16 bytes; 1 buffer, 8 bytes
  tied: second.weight = first.weight
  add_: i64[] = seen.add_(1)
  any_1: bool[] = mask.any()
  mul: f32[1, 2] = x.mul(mask)
  linear: f32[1, 2] = F.linear(mul, first.weight, None)  # first
  linear_1: f32[1, 2] = F.linear(linear, first.weight, None)  # second
  write back seen = seen
  guard __bool__(any_1) == True at test_text.py:41: `if mask.any():`
  return linear_1, add_""",
    )
