"""The host store: state lies there, blocks are copied from it, and gradients come back to it."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatrain.device import Cpu
from megatrain.errors import ExecuteError
from megatrain.memory.bus import Bus
from megatrain.runtime.stores.host_store import BlockImage, HostStore, image
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec

CPU = Bus(Cpu())


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def image_of(state: dict[str, torch.Tensor]) -> BlockImage:
    return image([(key, TensorSpec.of(tensor)) for key, tensor in state.items()])


def store_of(*blocks: dict[str, torch.Tensor]) -> tuple[HostStore, list[BlockImage]]:
    images = [image_of(block) for block in blocks]
    return HostStore(images, {k: t for block in blocks for k, t in block.items()}, CPU), images


def prefetched(store: HostStore, layout: BlockImage) -> list[torch.Tensor]:
    slot = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    store.prefetch(layout, slot)
    return store.views(layout, slot)


@pytest.mark.filterwarnings("ignore::megatrain.HeldMemoryWarning")
def test_dense_strides_are_kept_and_others_become_contiguous():
    values = torch.arange(24.0)
    state = {
        "channels_last": values.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "transposed": values.reshape(4, 6).t(),
        "expanded": torch.arange(3.0).expand(2, 3),
        "gaps": values.reshape(6, 4)[:, :2],
    }
    expected = {key: tensor.clone() for key, tensor in state.items()}
    strides = {key: tensor.stride() for key, tensor in state.items()}
    state = {key: nn.Parameter(tensor) for key, tensor in state.items()}
    # Two of them share memory with `values`, so each gets a store of its own, which leaves the dense one in place.
    for key, parameter in state.items():
        store, (layout,) = store_of({key: parameter})
        dense = key in ("channels_last", "transposed")
        for tensor in (parameter, *store.bound(layout), *prefetched(store, layout)):
            assert torch.equal(tensor, expected[key])
            assert (tensor.stride() == strides[key]) == dense
            assert dense or tensor.is_contiguous()


def test_what_became_contiguous_may_be_placed_again():
    parameter = nn.Parameter(torch.arange(3.0).expand(2, 3))
    store, _ = store_of({"p": parameter})
    again = image_of({"p": parameter})
    store.extend([again])
    assert torch.equal(store.bound(again)[0], parameter)


def test_parameters_become_views_and_stay_the_same_objects():
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    identities = {key: id(tensor) for key, tensor in state.items()}
    store, (layout,) = store_of(state)
    after = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    assert {key: id(tensor) for key, tensor in after.items()} == identities
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key])
        assert isinstance(tensor, nn.Parameter) == tensor.requires_grad
        assert tensor.data_ptr() % 64 == 0
    places = sorted(
        (t.data_ptr(), t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in after.values()
    )
    assert all(start == storage for start, storage, _ in places), "each has a storage of its own"
    assert places[-1][0] + places[-1][2] - places[0][0] <= store.nbytes, "all lie in one arena"
    assert store.nbytes == layout.nbytes


def test_old_memory_is_given_back():
    array = numpy.ones(1000, dtype=numpy.float32)
    old = weakref.ref(array)
    parameter = nn.Parameter(torch.from_numpy(array))
    del array
    assert old() is not None
    store_of({"p": parameter})
    assert old() is None
    assert parameter.sum() == 1000


def test_an_optimizer_steps_through_the_store():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    store, (layout,) = store_of({"p": parameter})
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert store.bound(layout)[0].tolist() == [0.0] * 4
    assert prefetched(store, layout)[0].tolist() == [0.0] * 4
    assert not store.bound(layout)[0].requires_grad
    parameter.sum().backward()


def test_parameters_survive_the_store():
    parameter = nn.Parameter(torch.arange(2000.0))
    store, _ = store_of({"p": parameter})
    del store
    gc.collect()
    junk = [torch.full((2000,), -1.0) for _ in range(20)]
    assert torch.equal(parameter, torch.arange(2000.0))
    assert junk


def test_a_block_is_one_copy():
    blocks = [{f"{b}.{i}": torch.randn(i + 1, 3) for i in range(5)} for b in range(3)]
    expected = [[t.clone() for t in block.values()] for block in blocks]
    store, images = store_of(*blocks)
    for layout, tensors in zip(images, expected, strict=True):
        assert store.num_copies(layout) == 1
        for got, wanted in zip(prefetched(store, layout), tensors, strict=True):
            assert torch.equal(got, wanted)
    assert store.nbytes == sum(layout.nbytes for layout in images)


def test_tied_state_is_stored_once_and_copied_apart():
    embed, tail = torch.randn(10, 4), torch.randn(3)
    first = {"embed": embed, "a": torch.randn(5)}
    last = {"norm": torch.randn(4), "embed": embed, "tail": tail}
    expected = [tensor.clone() for tensor in last.values()]
    store, (one, two) = store_of(first, last)
    assert store.num_copies(one) == 1
    assert store.num_copies(two) == 3
    assert store.nbytes == one.nbytes + two.nbytes - aligned(embed.nbytes)
    for got, wanted in zip(prefetched(store, two), expected, strict=True):
        assert torch.equal(got, wanted)
    assert store.bound(one)[0].data_ptr() == store.bound(two)[1].data_ptr()


def test_empty_blocks_and_tensors_are_fine():
    store, (empty, layout) = store_of({}, {"none": torch.empty(0, 3), "one": torch.ones(1)})
    assert store.num_copies(empty) == 0
    store.prefetch(empty, torch.empty(0, dtype=torch.uint8))
    none, one = prefetched(store, layout)
    assert none.shape == (0, 3)
    assert one.item() == 1.0
    store.refresh()


@given(st.data())
def test_any_layout_is_prefetched_right(data: st.DataObject):
    tensors = {f"t{i}": torch.randn(data.draw(st.integers(0, 40))) for i in range(6)}
    keys = st.lists(st.sampled_from(sorted(tensors)), unique=True, max_size=6)
    blocks = [{k: tensors[k] for k in data.draw(keys)} for _ in range(4)]
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    store, images = store_of(*blocks[:2])
    later = [image_of(block) for block in blocks[2:]]
    store.extend(later, tensors)
    for layout in (*images, *later):
        for found in (prefetched(store, layout), store.bound(layout)):
            for entry, tensor in zip(layout.entries, found, strict=True):
                assert torch.equal(tensor, expected[entry.key])
    used = {key for block in blocks for key in block}
    assert store.nbytes == sum(aligned(expected[key].nbytes) for key in used)


def test_a_store_grows_and_what_is_there_stays():
    tensors = {name: nn.Parameter(torch.randn(9)) for name in "abc"}
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    one = image_of({"a": tensors["a"], "b": tensors["b"]})
    store = HostStore([one], tensors, CPU)
    address = tensors["a"].data_ptr()
    two = image_of({"b": tensors["b"], "c": tensors["c"]})
    store.extend([two, image_of({"a": tensors["a"], "b": tensors["b"]})])
    assert tensors["a"].data_ptr() == address
    assert store.num_copies(two) == 2
    for entry, tensor in zip(two.entries, prefetched(store, two), strict=True):
        assert torch.equal(tensor, expected[entry.key])
    equal = image_of({"a": tensors["a"], "b": tensors["b"]})
    assert equal is not one
    assert store.num_copies(equal) == 1, "an equal image is found by value"


def test_refresh_takes_in_new_memory_and_new_objects():
    parameter = nn.Parameter(torch.zeros(4))
    model = nn.Module()
    model.p = parameter
    store, (layout,) = store_of({"p": parameter})
    home = parameter.data_ptr()
    parameter.data = torch.full((4,), 2.0)
    store.refresh()
    assert parameter.data_ptr() == home
    assert store.bound(layout)[0].tolist() == [2.0] * 4
    model.load_state_dict({"p": torch.full((4,), 5.0)}, assign=True)
    assert model.p is not parameter
    store.refresh({"p": model.p, "unknown": torch.ones(1)})
    assert model.p.data_ptr() == home
    assert store.bound(layout)[0].tolist() == [5.0] * 4


def test_refresh_sees_another_view_of_the_same_memory():
    parameter = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    store, (layout,) = store_of({"p": parameter})
    parameter.data = parameter.data.t()
    store.refresh()
    assert parameter.tolist() == store.bound(layout)[0].tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert parameter.is_contiguous()


@pytest.mark.parametrize("new", [torch.zeros(5), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)])
def test_refresh_refuses_another_shape_or_dtype(new: torch.Tensor):
    parameter = nn.Parameter(torch.zeros(4))
    store, _ = store_of({"layers.0.w": parameter})
    parameter.data = new
    with pytest.raises(ExecuteError, match=r"`layers\.0\.w` became .*; the compiled model holds f32\[4\]"):
        store.refresh()


def test_refresh_costs_little_when_nothing_changed():
    store, _ = store_of({f"p{i}": nn.Parameter(torch.zeros(2)) for i in range(2000)})
    best = min(_seconds(store) for _ in range(5))
    # Far above what it takes (0.4 us per tensor), to hold on a loaded machine.
    assert best / 2000 < 20e-6


def _seconds(store: HostStore) -> float:
    start = time.perf_counter()
    store.refresh()
    return time.perf_counter() - start


def test_lack_of_memory_is_refused_with_numbers_before_anything_moves(monkeypatch: pytest.MonkeyPatch):
    parameter = nn.Parameter(torch.zeros(1 << 20))
    address = parameter.data_ptr()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(ExecuteError, match=r"needs 4\.00 MiB more host memory, 1\.00 MiB are available"):
        store_of({"p": parameter})
    assert parameter.data_ptr() == address


def test_memory_given_back_on_the_way_is_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500_000))
    store_of({f"p{i}": torch.zeros(100_000) for i in range(10)})
    flat = torch.zeros(1_000_000)
    shared = {f"p{i}": flat[i * 100_000 : (i + 1) * 100_000].data for i in range(10)}
    del flat  # else its memory would be used in place
    with pytest.raises(ExecuteError, match=r"needs 3\.81 MiB more"):
        store_of(shared)


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
