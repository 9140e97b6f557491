from __future__ import annotations

import gc
import itertools
import time
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatrain.errors import ExecuteError
from megatrain.runtime import pages
from megatrain.runtime.host import BlockImage, HostArena, HostStore, aligned, image, views
from megatrain.runtime.parks import ParkPool
from megatrain.tracer.spec import TensorSpec

CPU = torch.device("cpu")


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


# -- arena -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000, 3_000_001])
def test_an_arena_has_its_exact_size_and_is_zero(nbytes: int):
    arena = HostArena(nbytes)
    assert arena.nbytes == arena.tensor.untyped_storage().nbytes() == nbytes
    assert arena.tensor.dtype == torch.uint8
    assert not arena.tensor.any()
    assert not arena.is_pinned


def test_views_outlive_the_arena():
    arena = HostArena(1 << 16)
    view = arena.tensor[64:128].view(torch.float32).fill_(3)
    arena.close()
    assert arena.nbytes == 0
    arena.close()
    del arena
    gc.collect()
    assert view.tolist() == [3.0] * 16


def test_the_memory_goes_with_the_last_view():
    arena = HostArena(1 << 26)
    arena.tensor.fill_(1)
    kept = weakref.ref(arena._pages)
    view = arena.tensor[:64]
    arena.close()
    assert kept() is not None
    del view
    assert kept() is None


def test_an_arena_beyond_reason_is_refused_with_its_size():
    with pytest.raises(ExecuteError, match=r"the host has no .* PiB of memory"):
        HostArena(1 << 60)


def test_only_cuda_is_page_locked():
    assert not HostArena(64, pin=CPU).is_pinned
    assert not HostArena(64, pin=torch.device("mps")).is_pinned


class FakeCudart:
    def __init__(self, code: int = 0) -> None:
        self.code, self.locked, self.log = code, {}, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(("register", nbytes, flags))
        if self.code == 0:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        # Still mapped: reading it would crash otherwise.
        self.log.append(("unregister", self.locked.pop(address)))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(pages, "_cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))  # any context manager
    return fake


def test_a_pinned_arena_is_unlocked_with_its_last_view(cudart: FakeCudart):
    arena = HostArena(5000, pin=torch.device("cuda", 0))
    assert arena.is_pinned
    arena.pin(torch.device("cuda", 0))
    assert cudart.log == [("register", 5000, 0)]
    view = arena.tensor[:8]
    arena.close()
    del arena
    assert cudart.locked
    del view
    assert not cudart.locked
    assert cudart.log[-1] == ("unregister", 5000)


def test_an_arena_that_cant_be_locked_is_refused(cudart: FakeCudart):
    cudart.code = 2
    with pytest.raises(ExecuteError, match=r"can't be page-locked: CUDA error 2(.|\n)*ulimit"):
        HostArena(5000, pin=torch.device("cuda", 0))
    gc.collect()
    assert cudart.log == [("register", 5000, 0)], "what was never locked must not be unlocked"


# -- image -------------------------------------------------------------------------------------------------


def test_an_image_aligns_its_entries():
    layout = image([("a", spec(3)), ("empty", spec(0, 5)), ("b", spec(17)), ("scalar", spec())])
    assert [entry.offset for entry in layout.entries] == [0, 64, 64, 192]
    assert layout.nbytes == 256
    assert str(layout) == (
        "image: 256 B\n  0: a f32[3]\n  64: empty f32[0, 5]\n  64: b f32[17]\n  192: scalar f32[]"
    )
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
        tensor.view(torch.uint8).add_(1) if tensor.dim() and tensor.numel() else None
    assert buffer.max() <= 1 if layout.nbytes else True


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
    # Two of them share memory with `values`, so each gets a store of its own.
    for key, parameter in state.items():
        store, (layout,) = store_of({key: parameter})
        dense = key in ("channels_last", "transposed")
        for tensor in (parameter, *store.bound(layout), *prefetched(store, layout)):
            assert torch.equal(tensor, expected[key])
            assert (tensor.stride() == strides[key]) == dense
            assert dense or tensor.is_contiguous()


# -- store -------------------------------------------------------------------------------------------------


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
    storages = {tensor.untyped_storage().data_ptr() for tensor in after.values()}
    assert len(storages) == 1
    assert store.nbytes == layout.nbytes


def test_old_memory_is_given_back_tensor_by_tensor():
    parameter = nn.Parameter(torch.ones(1000))
    old = weakref.ref(parameter.untyped_storage())
    address = parameter.data_ptr()
    store_of({"p": parameter})
    assert old() is None or parameter.data_ptr() != address


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
    shared = {f"p{i}": flat[i * 100_000 : (i + 1) * 100_000] for i in range(10)}
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


# -- parks -------------------------------------------------------------------------------------------------


def test_parked_values_come_back():
    pool = ParkPool(CPU)
    values = {"x": torch.randn(3, 5), "y": torch.arange(4), "z": torch.randn(4, 6).t(), "e": torch.empty(0)}
    parks = pool.take([TensorSpec.of(t) for t in values.values()])
    assert parks.nbytes == sum(aligned(t.nbytes) for t in values.values())
    for name, tensor in values.items():
        parks.put(name, tensor)
    for name, tensor in values.items():
        back = parks.get(name, CPU)
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.untyped_storage().nbytes() == tensor.nbytes


def test_parks_are_reused_between_calls():
    pool = ParkPool(CPU)
    parks = pool.take([spec(1000)])
    parks.put("x", torch.ones(1000))
    address = parks._places["x"].data_ptr()
    parks.give()
    parks.give()
    assert (parks.nbytes, pool.idle_bytes) == (0, 4032)
    again = pool.take([spec(1000)])
    again.put("y", torch.ones(1000))
    assert again._places["y"].data_ptr() == address
    assert pool.idle_bytes == 0


def test_parks_of_calls_under_way_are_apart():
    pool = ParkPool(CPU)
    one, two = pool.take([spec(8)]), pool.take([spec(8)])
    one.put("x", torch.zeros(8))
    two.put("x", torch.ones(8))
    assert one.get("x", CPU).sum() == 0


def test_dropped_parks_return_to_the_pool_and_nothing_is_hoarded():
    pool = ParkPool(CPU)
    for length in range(1, 50):
        parks = pool.take([spec(length * 16)])
        parks.put("x", torch.ones(length * 16))
        del parks
        assert pool.idle_bytes == length * 64
    pool.trim()
    assert pool.idle_bytes == 0


def test_nothing_parked_takes_nothing():
    pool = ParkPool(CPU)
    parks = pool.take([])
    assert parks.nbytes == 0
    parks.give()
    assert pool.idle_bytes == 0


def test_more_than_announced_is_our_mistake():
    parks = ParkPool(CPU).take([spec(16)])
    parks.put("x", torch.ones(16))
    parks.put("x", torch.zeros(16))
    with pytest.raises(AssertionError, match="more is parked"):
        parks.put("y", torch.ones(1))
