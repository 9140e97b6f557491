"""Buffers that a forward writes cross in one copy each way, whatever their number, with all their bits and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.device import HOST
from megatrain.memory.bus import Bus
from megatrain.runtime.stores import buffer_copies
from megatrain.runtime.stores.buffer_copies import BufferCopies
from tests.extending.test_device import Toy


def buffers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "mean": floats(3),
        "count": torch.tensor(7),
        "flag": torch.tensor([True, False, True]),
        "half": floats(5).bfloat16(),
        "byte": torch.arange(3, dtype=torch.uint8),
        "columns": floats(4, 3).t(),
        "image": floats(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "spread": floats(2, 1).expand(2, 3),
        "part": floats(6, 4)[1:3, ::2],
        "complex": torch.complex(floats(2), floats(2)).conj(),
        "none": torch.empty(0, 3),
        "double": floats(2).double(),
    }


def assert_equal(one: Any, other: Any) -> None:
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert torch.equal(tensor, other[key]), key


@pytest.mark.parametrize("device", [Toy, lambda: HOST], ids=["toy", "host"])
@pytest.mark.parametrize("piece", [1, 40, 1 << 20])
def test_what_comes_back_is_what_went_there(monkeypatch: pytest.MonkeyPatch, device: Any, piece: int):
    monkeypatch.setattr(buffer_copies, "GROUP_BYTES", piece)
    copies, given = BufferCopies(Bus(device())), buffers()
    for _ in range(2):
        there = copies.upload(given)
        assert_equal(given, there)
        storages = {tensor.untyped_storage().data_ptr() for tensor in there.values() if tensor.numel()}
        assert len(storages) == sum(tensor.numel() > 0 for tensor in there.values()), "each can be dropped alone"
        assert all(there[key].stride() == given[key].stride() for key in ("columns", "image"))
        back = {key: torch.zeros_like(tensor).contiguous() for key, tensor in given.items()}
        copies.download([(back[key], tensor) for key, tensor in there.items()])
        assert_equal(given, back)
        given["mean"] = given["mean"] + 1


def test_many_are_one_copy_and_a_large_one_goes_by_itself():
    toy = Toy()
    copies = BufferCopies(Bus(toy))
    small = {str(i): torch.full((100,), float(i)) for i in range(300)}
    there = copies.upload(small)
    copies.download([(small[key], tensor) for key, tensor in there.items()])
    assert toy.num_copies == 2
    assert toy.locked_bytes == 300 * 400
    toy.num_copies = 0
    there = copies.upload({**small, "large": torch.ones(1 << 19)})
    assert toy.num_copies == 2
    assert there["large"].sum() == 1 << 19


def test_sparse_buffers_and_other_dtypes_are_copied_as_before():
    toy = Toy()
    copies, sparse = BufferCopies(Bus(toy)), torch.eye(3).to_sparse()
    there = copies.upload({"sparse": sparse, "x": torch.ones(2)})
    assert torch.equal(there["sparse"].to_dense(), torch.eye(3))
    narrow, count = torch.zeros(2, dtype=torch.bfloat16), torch.tensor(0)
    copies.download([(narrow, there["x"]), (count, torch.tensor(3, dtype=torch.int32))])
    assert (narrow.tolist(), count.item()) == ([1.0, 1.0], 3)
