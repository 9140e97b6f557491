"""State that the device alone has: what the host holds of it, who reads it, how it gets to a checkpoint and back."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import find, host_pages
from megatrain.device.bus import Bus
from megatrain.device.host_arena import HostArena
from megatrain.errors import ExecuteError, WeightsError
from megatrain.hardware.hardware import Hardware
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE
from tests.simulated_runs.test_device_updates import CLIPPED, NO_NORM, Block, Training, assert_same, batch, loss_of

WIDE: Mapping[str, Any] = {"width": 128}
pytestmark = pytest.mark.skipif(not host_pages.gives_back(), reason="the system takes no pages back")


def resident(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the whole pages of tensors that are in memory."""
    library, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    total = 0
    for tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            start, end = host_pages.whole_pages(tensor.data_ptr(), tensor.nbytes)
        seen = (ctypes.c_ubyte * ((end - start) // page))()
        assert library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), seen) == 0
        total += page * sum(each & 1 for each in seen)
    return total


def of_block(training: Training, block: int) -> list[torch.Tensor]:
    """The host's tensors of a block: parameters, low halves and moments; no use of them is noted."""
    masters, states = training.compiled.megatrain.masters, vars(training.optimizer)["state"]
    with torch._C.DisableTorchFunctionSubclass():
        named = dict(training.model.named_parameters())
        parameters = [named[key] for key in training.step.program.blocks[block].binding]
        lows = [masters.low_of(p) for p in parameters if p.dtype == torch.bfloat16]
        return [*parameters, *lows, *(states[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq"))]


def in_memory(training: Training) -> list[int]:
    """Bytes of each block that are in the host's memory."""
    return [resident(of_block(training, block)) for block in range(len(training.step.program.blocks))]


def lacking(monkeypatch: pytest.MonkeyPatch, nbytes: int = 0) -> None:
    """From now on the host has room for so many bytes."""
    for name in ("training.device_updates", "training.saved_step"):
        monkeypatch.setattr(f"megatrain.{name}.available_bytes", lambda: nbytes)


@pytest.mark.parametrize(
    ("precision", "memory"),
    [("bf16", "2MiB"), pytest.param("fp32", "3MiB", marks=pytest.mark.nightly), ("bf16", "30MiB")],
)
def test_the_host_holds_what_the_plan_says(sim: Simulator, precision: str, memory: str):
    one = Training(precision=precision, memory=memory, **WIDE)
    one.step.prepare(batch(0, width=128))
    before = one.step.host_plan.bytes_of("before the first update")
    for number in range(3):
        one.take(number)
    there, blocks = one.there[-1], range(len(one.step.program.blocks))
    assert 0 < len(there) < len(blocks) or memory == "30MiB"
    plan, held = one.step.host_plan, in_memory(one)
    assert [nbytes == 0 for nbytes in held] == [block in there for block in blocks]
    # Tensors of less than a page and the ends of others don't count.
    planned = sum(plan.bytes_of(name) for name in ("parameters", "low halves", "AdamW"))
    assert 0 <= planned - sum(held) < mmap.PAGESIZE * sum(2 for block in blocks for _ in of_block(one, block))
    # What the host then takes for its own blocks is mostly more than those that it gives away.
    weights = 4 * sum(p.numel() for p in one.model.parameters())
    assert before == (weights - plan.bytes_of("AdamW.step") if memory == "30MiB" else 0)


def test_what_lies_beside_stays_page_locked(sim: Simulator):
    device, page = find(DEVICE), mmap.PAGESIZE
    arena, before = HostArena(9 * page), sim.locked_bytes
    arena.lock(device)
    arena.tensor.fill_(7)
    arena.give_back(2 * page + 1, 6 * page, device)
    assert sim.locked_bytes - before == 6 * page
    assert arena.tensor.view(9, page).amax(1).tolist() == [7, 7, 7, 0, 0, 0, 7, 7, 7]
    assert arena.cuts(arena.tensor) == [3 * page, 6 * page]
    there = torch.empty(9 * page, dtype=torch.uint8, device=DEVICE)
    Bus(device).to_device(there, arena.tensor, arena)
    assert torch.equal(there.cpu(), arena.tensor)
    for _ in range(2):
        arena.lock_again(2 * page + 1, 6 * page, device)
        assert sim.locked_bytes - before == 9 * page
    arena.unlock()
    assert sim.locked_bytes == before


def test_a_look_has_one_block_and_the_next_step_gives_its_memory_back(sim: Simulator):
    one, other = Training(memory="30MiB", **WIDE), Training(is_there=False, **WIDE)
    for training in (one, other):
        training.take(0)
    assert in_memory(one) == [0] * 4
    for look in (lambda t: t.model[1].up.weight, lambda t: torch.stack([t.model[2].up.bias, t.model[1].up.bias])):
        assert torch.equal(look(one), look(other))
    assert [nbytes > 0 for nbytes in in_memory(one)] == [False, True, True, False]
    for training in (one, other):
        with torch.no_grad():
            training.model[2].down.weight.mul_(3)
        training.take(1)
    assert in_memory(one) == [0] * 4
    assert one.optimizer.state[one.model[3].up.weight]["exp_avg"].abs().sum() > 0
    assert all(in_memory(one))
    assert_same(one.state(), other.state())
    assert torch.equal(one.take(2), other.take(2))


@pytest.mark.parametrize("norm", [NO_NORM, pytest.param(CLIPPED, marks=pytest.mark.nightly)])
def test_checkpoints_come_straight_from_the_device(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: Mapping[str, Any]
):
    """And a run goes on from them: there, on a host that has to leave state in the files, and without the device."""
    host, one = Training(is_there=False, norm=norm, **WIDE), Training(memory="30MiB", norm=norm, **WIDE)
    expected = [host.take(number) for number in range(4)]
    found = [one.take(number) for number in range(2)]
    lacking(monkeypatch)
    one.step.save(tmp_path / "saved", scheduler=one.rates)
    assert in_memory(one) == [0] * 4
    assert found + [one.take(number) for number in (2, 3)] == expected
    for is_there in (True, False):
        again = Training(is_there=is_there, norm=norm, **({"memory": "30MiB"} if is_there else {}), **WIDE)
        parts = again.compiled, again.optimizer
        again.step = megatrain.TrainStep.load(tmp_path / "saved", *parts, scheduler=again.rates, loss=loss_of, **norm)
        maps = again.compiled.megatrain.engine.maps
        assert maps is not None
        assert maps.nbytes == 8 * sum(p.numel() for p in again.model.parameters())
        assert [again.take(number) for number in (2, 3)] == expected[2:]
        lacking(monkeypatch, 1 << 40)
        assert_same(again.state(), host.state())
        lacking(monkeypatch)


def test_state_in_a_checkpoint_that_somebody_writes_is_refused(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = Training(memory="30MiB", **WIDE)
    one.take(0)
    one.step.save(tmp_path / "saved")
    lacking(monkeypatch)
    again = Training(memory="30MiB", **WIDE)
    again.step = megatrain.TrainStep.load(tmp_path / "saved", again.compiled, again.optimizer, loss=loss_of)
    file = next((tmp_path / "saved").glob("training/optimizer*"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="was changed while the optimizer's state is used from it"):
        again.take(1)


def test_hooks_on_the_states_that_a_checkpoint_reads_see_the_devices_values(sim: Simulator, tmp_path: Path):
    seen: list[torch.Tensor] = []
    host, one = Training(is_there=False, **WIDE), Training(memory="30MiB", **WIDE)
    for training in (host, one):
        model, optimizer = training.model, training.optimizer
        model[1].register_state_dict_pre_hook(lambda module, *_: seen.append(module.up.weight.detach().clone()))
        optimizer.register_state_dict_post_hook(
            lambda _, state, p=model[2].up.weight: seen.append(state["state"][8]["exp_avg"].clone())
        )
        for number in range(2):
            training.take(number)
        training.step.save(tmp_path / str(training.is_there))
    assert_same(seen[2:], seen[:2])
    both = [megatrain.files.load(tmp_path / str(is_there)) for is_there in (False, True)]
    digests = [{name: s.digest for name, s in {**c.weights, **c.tensors, **c.optimizer_tensors}.items()} for c in both]
    assert digests[0] == digests[1]


def test_a_host_without_room_refuses_looks_by_name_and_loses_nothing(sim: Simulator, monkeypatch: pytest.MonkeyPatch):
    one, other = Training(memory="30MiB", **WIDE), Training(is_there=False, **WIDE)
    for training in (one, other):
        training.take(0)
    a_block = 12 * sum(p.numel() for p in one.model[0].parameters())
    lacking(monkeypatch, a_block)
    assert torch.equal(one.model[1].up.weight, other.model[1].up.weight)
    for look in (
        lambda: one.optimizer.state,
        one.optimizer.state_dict,
        one.step.flush,
        lambda: one.compiled(batch(7, width=128)),
        lambda: one.take(1, rows=16),  # another capture, whose code may read parameters
    ):
        with pytest.raises(ExecuteError, match=r"the device updates takes .* of host memory, .* are available"):
            look()
    assert torch.equal(one.take(1), other.take(1))
    lost, kept = Training(memory="30MiB", **WIDE), one.compiled
    lost.take(0)
    for training in (one, lost):
        training.step = None  # pyright: ignore[reportAttributeAccessIssue]
    lost.compiled = None  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    with pytest.raises(ExecuteError, match="are lost with the compiled model"):
        lost.model[1].up.weight.sum()
    lacking(monkeypatch, 1 << 40)
    assert one.compiled is kept
    assert_same(one.state(), other.state())


def test_what_somebody_else_holds_stays_in_memory(sim: Simulator):
    one = Training(memory="30MiB", **WIDE)
    one.take(0)
    view = one.model[1].up.weight.detach()
    before = view.clone()
    one.take(1)
    assert torch.equal(view, before)
    assert in_memory(one) == [0, resident([view]), 0, 0]
    assert not torch.equal(one.model[1].up.weight, before)
    assert torch.equal(view, one.model[1].up.weight)


FAST_HOST = Hardware.preset("rtx-4090")


def test_where_the_host_is_short_the_device_takes_more_blocks(sim: Simulator, monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"precision": "bf16", "loss": loss_of, "optimizer": "AdamW", "hardware": FAST_HOST}
    model = nn.Sequential(*(Block(128) for _ in range(4)))

    def plan(host_memory: int) -> megatrain.Plan:
        given = {"device_memory": "30MiB", "host_memory": host_memory}
        return megatrain.plan(model, batch(0, width=128).cpu(), **options, **given)

    most = plan(1 << 30)
    counts = [len(most.schedule.device_updates)]
    for part in (0.8, 0.5, 0.1):
        found = plan(int(part * most.host.total_bytes))
        assert found.fits == (found.host.total_bytes <= int(part * most.host.total_bytes))
        assert found.fits == (part > 0.1)
        counts.append(len(found.schedule.device_updates))
    assert counts[0] < counts[1] < counts[2] <= counts[3]
    one, other = Training(memory="30MiB", hardware=FAST_HOST, **WIDE), Training(is_there=False, **WIDE)
    needed = most.host.total_bytes // 2
    expected = [other.take(number) for number in range(2)]
    monkeypatch.setattr("megatrain.planning.host_plan.available_now", lambda: needed)
    assert [one.take(number) for number in range(2)] == expected
    assert len(one.there[-1]) > counts[0]
    assert_same(one.state(), other.state())
