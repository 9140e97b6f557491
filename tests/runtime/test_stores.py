"""Stores on the host: state lies there in images of blocks, values are parked there, and buffers cross in groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from megatrain.device import HOST, Cpu
from megatrain.device.bus import Bus
from megatrain.errors import ExecuteError
from megatrain.runtime.stores import offload_buffers as buffer_copies
from megatrain.runtime.stores.host_store import HostStore
from megatrain.runtime.stores.offload_buffers import BufferCopies
from megatrain.tracer.block_image import BlockImage, image
from megatrain.tracer.spec import TensorSpec
from tests.extending.test_device import Toy

CPU = Bus(Cpu())


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def image_of(state: dict[str, torch.Tensor]) -> BlockImage:
    return image([(key, TensorSpec.of(tensor)) for key, tensor in state.items()])


def store_of(*blocks: dict[str, torch.Tensor]) -> tuple[HostStore, list[BlockImage]]:
    images = [image_of(block) for block in blocks]
    return HostStore(images, {k: t for block in blocks for k, t in block.items()}, CPU), images


def test_refresh_refuses_another_shape_or_dtype():
    for new in (torch.zeros(5), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)):
        parameter = nn.Parameter(torch.zeros(4))
        store, _ = store_of({"layers.0.w": parameter})
        parameter.data = new
        with pytest.raises(ExecuteError, match=r"`layers\.0\.w` became .*; the compiled model holds f32\[4\]"):
            store.refresh()


def test_lack_of_memory_is_refused_with_numbers_before_anything_moves(monkeypatch: pytest.MonkeyPatch):
    parameter = nn.Parameter(torch.zeros(1 << 20))
    address = parameter.data_ptr()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(ExecuteError, match=r"needs 4\.00 MiB more host memory, 1\.00 MiB are available"):
        store_of({"p": parameter})
    assert parameter.data_ptr() == address


def test_memory_shared_between_keys_is_refused_unless_apart():
    base = torch.arange(20.0)
    store_of({"a": base[:10], "b": base[10:]})
    base = torch.arange(20.0)
    with pytest.raises(ExecuteError, match="`a` and `b` share memory"):
        store_of({"a": base[:11], "b": base[10:]})


def test_what_has_no_values_or_another_spec_is_refused():
    with pytest.raises(ExecuteError, match="`p` is on the meta device"):
        store_of({"p": torch.empty(3, device="meta")})
    with pytest.raises(ExecuteError, match=r"`p` is f32\[4\], but the model was compiled for f32\[3\]"):
        HostStore([image([("p", spec(3))])], {"p": torch.ones(4)}, CPU)


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


@pytest.mark.parametrize(("device", "piece"), [(Toy, 1), (Toy, 40), (lambda: HOST, 1 << 20)])
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
