"""The products of a program, for measurements of a machine."""

from __future__ import annotations

import torch
from torch import nn

from megatrain.passes.measuring.products import products_of
from megatrain.passes.pipeline import lower
from megatrain.tracer.trace import trace


def test_each_distinct_product_of_the_forwards_comes_once_largest_first():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    program = lower(trace(model, (torch.randn(5, 8),)))
    assert products_of(program) == ((5, 32, 32, "fp32"), (5, 8, 32, "fp32"), (5, 32, 4, "fp32"))


def test_products_of_fewer_bits_are_named_so():
    program = lower(trace(nn.Linear(8, 16, dtype=torch.bfloat16), (torch.randn(2, 3, 8, dtype=torch.bfloat16),)))
    assert products_of(program) == ((6, 8, 16, "bf16"),)
