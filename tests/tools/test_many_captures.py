"""A model that is captured at most of its calls says so once, and what changes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import megatrain


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Computes the rows that have a label."""
        return self.layer(x[labels >= 0]).square().sum()


def told(calls: Any) -> list[str]:
    compiled = megatrain.compile(Scored(), device="cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows, learnt in calls:
            compiled(torch.ones(rows, 2), torch.arange(rows) - (rows - learnt))
    return [str(one.message) for one in said if one.category is megatrain.ManyCapturesWarning]


def test_another_shape_at_each_call_is_told_once():
    [text] = told((count, count) for count in range(1, 16))
    assert text.startswith(
        "12 of the latest 12 calls were captured anew.\n  The latest: `x` is f32[12, 2], and was f32[11"
    )


def test_another_number_of_rows_that_a_mask_chooses_is_told():
    [text] = told((20, learnt) for learnt in range(1, 14))
    assert "  The latest: size(getitem) == torch.Size([11, 2]) at test_many_captures.py:" in text


@pytest.mark.parametrize("shapes", [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)], ids=len)
def test_shapes_that_come_again_are_not_told(shapes: tuple[int, ...]):
    assert told((shapes[number % len(shapes)],) * 2 for number in range(40)) == []
