"""The image of a block: where its tensors lie, one behind the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.runtime.stores.host_store import BlockImage, image, views
from megatrain.tracer.spec import TensorSpec

CPU = torch.device("cpu")


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def test_an_image_aligns_its_entries():
    layout = image([("a", spec(3)), ("empty", spec(0, 5)), ("b", spec(17)), ("scalar", spec())])
    assert [entry.offset for entry in layout.entries] == [0, 64, 64, 192]
    assert layout.nbytes == 256
    assert str(layout) == ("image: 256 B\n  0: a f32[3]\n  64: empty f32[0, 5]\n  64: b f32[17]\n  192: scalar f32[]")
    assert image([]) == BlockImage((), 0)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float64]


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=8))
def test_views_are_typed_disjoint_and_in_place(found: list[tuple[list[int], torch.dtype]]):
    specs = [(f"k{i}", TensorSpec(tuple(shape), dtype)) for i, (shape, dtype) in enumerate(found)]
    layout = image(specs)
    buffer = torch.zeros(layout.nbytes + 128, dtype=torch.uint8)[64:]
    tensors = views(layout, buffer)
    for tensor, (_, wanted), entry in zip(tensors, specs, layout.entries, strict=True):
        assert TensorSpec.of(tensor) == wanted
        assert tensor.numel() == 0 or tensor.data_ptr() == buffer.data_ptr() + entry.offset
    for tensor in tensors:
        if tensor.dim() and tensor.numel():
            tensor.view(torch.uint8).add_(1)
    assert not (buffer > 1).any()
