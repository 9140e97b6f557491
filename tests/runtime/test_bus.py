"""The way between host and device: memory locked in pieces, or not at all; the numbers are the same."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError
from megatrain.memory import bus as buses
from megatrain.memory.bus import Bus
from megatrain.memory.host_arena import HostArena
from megatrain.memory.ring import BUFFERS
from megatrain.runtime.stores.host_store import HostStore
from megatrain.runtime.streams.chaos import Chaos
from tests.models import MODELS
from tests.runtime.parity import assert_same, train
from tests.runtime.strict_toy import PAGE, StrictToy
from tests.tiers import diagonal
from tests.training.parity import MODES, TASKS, SideBySide, adamw

LEAST = 2 * BUFFERS * PAGE


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buses, "MOST_BYTES", 4 * LEAST)
    monkeypatch.setattr(buses, "LEAST_BYTES", LEAST)


def in_pieces() -> StrictToy:
    return StrictToy(lock_bytes=PAGE)


def through_a_ring() -> StrictToy:
    return StrictToy(limit=2 * LEAST, num_refusals=1)


def in_pieces_through_a_ring() -> StrictToy:
    return StrictToy(lock_bytes=PAGE, limit=2 * LEAST, num_refusals=1)


def refused() -> StrictToy:
    toy = StrictToy(limit=0)
    toy.allows_pageable = True
    return toy


DEVICES = [in_pieces, through_a_ring, in_pieces_through_a_ring, refused]


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.parametrize(("make", "name"), diagonal(DEVICES, ["gpt_loss", "torch_encoder", "tied_blocks"]))
def test_calls_have_the_bits_of_eager(make: Any, name: str):
    model, args, kwargs = MODELS[name]()
    toy, eager = make(), copy.deepcopy(model)
    compiled = megatrain.compile(model, device=toy, activations="offload", chaos=Chaos(0))
    assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
    assert toy.copied_bytes >= 2 * 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.parametrize(("make", "mode"), diagonal(DEVICES, MODES))
def test_training_steps_have_the_bits_of_eager(make: Any, mode: str):
    task = TASKS["gpt"]
    model, eager = task.build(), task.build()
    compiled = megatrain.compile(model, device=make(), activations="offload")
    own, clip = adamw(model), MODES[mode].get("max_grad_norm")
    step = megatrain.TrainStep(compiled, own, loss=task.loss, **MODES[mode])
    sides = SideBySide(eager, model, compiled, [adamw(eager)], [own], step, task.loss, clip)
    for seed in range(3):
        sides.take([task.batch(seed, 2)], seed=seed)
    sides.assert_same()


def test_what_is_refused_is_said_once_and_printed():
    model, args, kwargs = MODELS["gpt_loss"]()
    toy = through_a_ring()
    compiled = megatrain.compile(model, device=toy, activations="offload")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(*args, **kwargs)[1].backward()
    (warning,) = [str(w.message) for w in caught if issubclass(w.category, megatrain.PageLockWarning)]
    assert "\n" not in warning
    ring = "transfers pass through a ring of 64.00 KiB, copied once more"
    assert warning.startswith("the system refused to page-lock ")
    assert warning.endswith(f"{ring}. Raise it.")
    assert ring in str(compiled)
    assert sum(toy.locked.values()) <= toy.limit
    assert not megatrain.compile(MODELS["gpt_loss"]()[0], device=StrictToy()).megatrain.engine.bus.note


def test_the_largest_ring_that_can_be_locked_is_taken():
    for limit, expected in ((100 * LEAST, 4), (3 * LEAST, 2), (2 * LEAST - 1, 1), (LEAST - 1, 0)):
        toy = StrictToy(limit=limit)
        bus = Bus(toy)
        with pytest.warns(megatrain.PageLockWarning, match="even a ring" if not expected else "pass through a ring"):
            arena = bus.arena(limit + 1)
        assert arena.is_refused
        assert not arena.is_locked
        assert sum(toy.locked.values()) == expected * LEAST


def test_some_of_several_arenas_are_not_locked_alone():
    toy = StrictToy(limit=20 * PAGE)
    arenas = [HostArena(8 * PAGE) for _ in range(3)]
    with pytest.warns(megatrain.PageLockWarning):
        Bus(toy).lock(arenas)
    assert [arena.is_locked for arena in arenas] == [False] * 3
    assert not any(toy.is_within(arena.tensor) for arena in arenas)


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.parametrize("make", DEVICES)
def test_any_layout_crosses(make: Any):
    toy = make()
    bus = Bus(toy)
    arena = bus.arena(1 << 20)
    plain = torch.randn(300, 70)
    values = [plain, plain.t(), plain[:, :1].expand(300, 70), torch.ones(()), torch.empty(0, 3), plain > 0]
    for value in (*values, torch.randn(9000, dtype=torch.complex64).conj()):
        place = arena.tensor[64 : 64 + value.numel() * value.element_size()].view(value.dtype).view(value.shape)
        bus.to_host(place, value, arena)
        toy.synchronize()
        assert torch.equal(place, value)
        back = torch.empty_like(place)
        bus.to_device(back, place, arena)
        toy.synchronize()
        assert torch.equal(back, value)


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
def test_what_passed_through_a_ring_may_be_overwritten_at_once():
    toy = through_a_ring()
    bus = Bus(toy)
    arena = bus.arena(1 << 20)
    toy.enter(toy.new_stream())  # works only when somebody waits for it
    first = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    arena.tensor.copy_(first)
    device = torch.zeros(1 << 20, dtype=torch.uint8)
    bus.to_device(device, arena.tensor, arena)
    arena.tensor.fill_(2)
    assert not device[-PAGE:].any(), "the last piece is still on its way"
    bus.to_host(arena.tensor, device, arena)
    assert torch.equal(arena.tensor, first)


def test_a_lock_that_fails_loses_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    model, args, kwargs = MODELS["gpt_loss"]()
    toy, eager = StrictToy(lock_bytes=PAGE), copy.deepcopy(model)
    lock, calls = toy.lock, iter(range(1 << 30))

    def failing(address: int, nbytes: int) -> Any:
        if threading.current_thread() is threading.main_thread() and next(calls) == 0:
            raise KeyboardInterrupt
        return lock(address, nbytes)

    monkeypatch.setattr(toy, "lock", failing)
    compiled = megatrain.compile(model, device=toy, activations="recompute")
    with pytest.raises(KeyboardInterrupt):
        compiled(*args, **kwargs)
    assert not toy.locked
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    places = [p.data_ptr() for p in model.parameters()]
    assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
    assert [p.data_ptr() for p in model.parameters()] == places, "without a second copy of the model"
    assert sum(toy.locked.values()) > sum(p.nbytes for p in model.parameters())


@pytest.mark.filterwarnings("ignore::megatrain.PageLockWarning")
@pytest.mark.parametrize("fails", ["once", "at last", "is interrupted"])
def test_arenas_are_locked_while_others_are_filled(fails: str, monkeypatch: pytest.MonkeyPatch):
    """The lock of the first waits until all the rest is filled; and the memory is that of a lock at the end."""
    model, args, kwargs = MODELS["gpt_loss"]()
    toy, eager, num_filled = StrictToy(lock_bytes=3 * PAGE), copy.deepcopy(model), 0
    lock, move, threads, is_filled = toy.lock, HostStore._move_one, list[str](), threading.Event()

    def moving(self: HostStore, *given: Any) -> None:
        nonlocal num_filled
        move(self, *given)
        num_filled += 1
        if num_filled == 4 and fails == "is interrupted":
            is_filled.set()
            raise KeyboardInterrupt
        if num_filled == len(model.state_dict()):
            is_filled.set()

    def locking(address: int, nbytes: int) -> Any:
        threads.append(threading.current_thread().name)
        if threads[-1].startswith("megatrain-lock"):
            assert is_filled.wait(10)
            if fails == "once" and len(threads) == 2:
                raise ExecuteError("refused.\n  There is a limit.\n  Raise it.")
        elif fails == "at last":
            raise ExecuteError("refused.\n  There is a limit.\n  Raise it.")
        return lock(address, nbytes)

    monkeypatch.setattr(HostStore, "_move_one", moving)
    monkeypatch.setattr(toy, "lock", locking)
    toy.allows_pageable = is_refused = fails == "at last"
    compiled = megatrain.compile(model, device=toy, activations="recompute")
    if fails == "is interrupted":
        with pytest.raises(KeyboardInterrupt):
            compiled(*args, **kwargs)
        assert sum(name.startswith("megatrain-lock") for name in threads) <= 1, "no other has begun"
    assert_same(train(eager, eager, args, kwargs), train(compiled, model, args, kwargs))
    assert any(name.startswith("megatrain-lock") for name in threads)
    assert ("refused" in compiled.megatrain.engine.bus.note) == is_refused
    assert bool(toy.locked) == (not is_refused)
    assert not any(thread.name.startswith("megatrain-lock") for thread in threading.enumerate())


@pytest.mark.parametrize("num_pages", [3, 4, 5])
def test_state_lies_in_one_piece_by_blocks(num_pages: int):
    model, args, kwargs = MODELS["gpt_loss"]()
    toy = StrictToy(lock_bytes=num_pages * PAGE)
    compiled = megatrain.compile(model, device=toy)
    compiled(*args, **kwargs)
    assert sum(p.nbytes for p in model.parameters()) > num_pages * PAGE
    for block in compiled.program.blocks:
        tensors = [compiled.megatrain.engine.tensors[compiled.program.state[key].owner] for key in block.binding]
        assert all(map(toy.is_within, tensors))
