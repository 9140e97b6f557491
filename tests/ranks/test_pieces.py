"""Tensors in pieces: each element is in one of them, in order, and no group is larger than asked for."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.ranks.channels import pieces
from megatrain.tracer.spec import TensorSpec
from tests.draws import draws

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), max_size=4)


@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.integers(8, 60))
@draws(200)
def test_pieces_cover_each_element_once_and_in_order(shapes: list[tuple[int, ...]], dtype: torch.dtype, most: int):
    specs = [TensorSpec(shape, dtype) for shape in shapes]
    groups = pieces(specs, most)
    tensors = [torch.arange(1, torch.Size(shape).numel() + 1).view(shape) for shape in shapes]
    found: dict[int, list[int]] = {number: [] for number in range(len(shapes))}
    for group in groups:
        assert 0 < len(group)
        assert sum(tensors[number][cut].numel() for number, cut in group) * dtype.itemsize <= most
        for number, cut in group:
            found[number] += tensors[number][cut].flatten().tolist()
    assert [found[number] for number in range(len(shapes))] == [tensor.flatten().tolist() for tensor in tensors]
    order = [number for group in groups for number, _ in group]
    assert all(a <= b for a, b in pairwise(order))
    assert pieces(specs, most) == groups


def test_what_fits_goes_together():
    specs = [TensorSpec((4,), torch.int8)] * 5
    assert [len(group) for group in pieces(specs, most=8)] == [2, 2, 1]
