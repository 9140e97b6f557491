"""Memory of the device: budget, arena, meter, segments, alignment; and what the machine has left."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import megatrain
from megatrain.base.host_limits import available_bytes
from megatrain.device import Accelerator, Cpu, Device, Memory
from megatrain.device.accelerator import MIB, cublas_workspace, of_card
from megatrain.device.device_budget import DeviceBudget
from megatrain.errors import DeviceMemoryWarning, OptionError
from megatrain.runtime.engine import Engine
from megatrain.runtime.stores.device_memory import fitting
from tests.extending.test_device import Toy
from tests.models import MODELS

CPU = Cpu()


@pytest.mark.parametrize(
    ("needed", "scheduled", "expected"),
    [
        (101, 300, 101),  # it grows
        (40, 900, 100),  # the rest of the schedule has room beside it
        (40, 940, 100),
        (40, 941, 40),  # it is in the way
    ],
)
def test_an_arena_grows_and_shrinks_only_when_it_must(needed: int, scheduled: int, expected: int):
    engine = Engine(nn.Linear(2, 2), CPU, budget=DeviceBudget(CPU, 1000))
    engine.reserve_slots(100, 1000)
    before = engine.arena.slot(0, 100).data_ptr()
    engine.reserve_slots(needed, scheduled)
    assert engine.arena.nbytes == engine.meter.current == expected
    if expected == 100:
        assert engine.arena.slot(0, 100).data_ptr() == before


class Wide(Toy):
    """A toy that wants what an accelerator wants."""

    alignment = Accelerator.alignment


def build() -> nn.Module:
    """Biases of 12 and 20 bytes, so that all that follows them is at odd places without padding."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)) for _ in range(4)]
    return nn.Sequential(*layers)


def test_the_plan_for_a_device_and_the_run_on_it_agree_on_bytes():
    model, target, inputs = build(), Wide(), torch.randn(2, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = megatrain.compile(model, device=target, activations="offload", memory="1MiB")
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda out, _: out.sum())
    step(inputs)
    engine, schedule = compiled.megatrain.engine, step.schedule
    plan = megatrain.plan(
        model,
        inputs,
        device=target,
        device_memory="1MiB",
        optimizer=optimizer,
        activations="offload",
        loss=lambda out, _: out.sum(),
    )
    assert plan.schedule == schedule
    assert engine.arena.nbytes == schedule.arena_bytes
    assert engine.arena.nbytes % target.alignment == 0
    assert engine.store is not None
    assert engine.store.nbytes == plan.host.bytes_of("parameters") == step.host_plan.bytes_of("parameters")
    assert engine.store.nbytes == len(list(model.parameters())) * target.alignment, "none is larger than 64 bytes"


GIB = 1 << 30


class Card(Device):
    """A device of its own memory, of which less is free each time somebody asks."""

    def __init__(self, free: int, total: int, falls_to: float = 0.1):
        super().__init__(torch.device("cpu"), "card")
        self.free, self.total, self.falls_to, self.num_asked = free, total, falls_to, 0

    def memory(self) -> Memory:
        self.num_asked += 1
        free, self.free = self.free, int(self.free * self.falls_to)
        return Memory(free, self.total)


def test_memory_is_asked_once_for_all_schedules():
    """After the first step "free" is what the model itself has left, and later shapes would get next to nothing."""
    model, args, kwargs = MODELS["gpt_loss"]()
    card = Card(100_000, 100_000)
    compiled = megatrain.compile(model, device=card)
    assert "memory what is free, " in str(compiled.megatrain)
    compiled(*args, **kwargs)[1].backward()
    first = compiled.schedule
    assert "memory 87.89 KiB (what was free, less a reserve), " in str(compiled.megatrain)
    compiled(*(torch.cat([t, t]) for t in args), **{k: torch.cat([t, t]) for k, t in kwargs.items()})[1].backward()
    with torch.no_grad():
        compiled(*args, **kwargs)
    model.zero_grad()
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters()), loss=lambda out, _: out[1])
    batch = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    step([batch, batch])
    assert card.num_asked == 1
    assert (
        60_000
        < min(first.device_bytes, step.schedule.device_bytes)
        <= max(first.device_bytes, step.schedule.device_bytes)
        <= 90_000
    )


def test_more_than_the_device_has_is_refused():
    model, _, _ = MODELS["mlp"]()
    with pytest.raises(OptionError, match=r"^memory=2\.00 GiB is more than card has: 1\.00 GiB\.\n"):
        megatrain.compile(model, device=Card(GIB, GIB), memory="2GiB")
    assert megatrain.compile(model, device="cpu", memory="1PiB").megatrain.budget.nbytes == 1 << 50  # a rehearsal


def test_a_figure_leaves_the_reserve_of_the_device_free():
    budget = DeviceBudget(Card(80 * GIB, 80 * GIB), 79 * GIB)
    assert str(budget) == "79.00 GiB"
    assert budget.nbytes == 72 * GIB
    assert str(budget) == "72.00 GiB (79.00 GiB was given; the rest is a reserve)"
    small = DeviceBudget(Card(80 * GIB, 80 * GIB), 10 * GIB)
    assert (small.nbytes, str(small)) == (10 * GIB, "10.00 GiB")


def test_more_than_is_free_is_said_once():
    budget = DeviceBudget(Card(4 * GIB, 80 * GIB), 10 * GIB)
    with pytest.warns(DeviceMemoryWarning, match=r"memory=10\.00 GiB is more than is free: 4\.00 GiB of card are"):
        assert budget.nbytes == 10 * GIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert budget.nbytes == 10 * GIB


def test_the_reserve_of_an_accelerator():
    for card, kept in ((80 * GIB, 8 * GIB), (8 * GIB, GIB), (4 * GIB, GIB), (64 * MIB, 16 * MIB), (0, 0)):
        assert of_card(card) == kept


def test_workspaces_of_cublas_are_those_of_torch():
    assert cublas_workspace((9, 0), None) == cublas_workspace((9, 0), ":4096:8") == 32 * MIB
    assert cublas_workspace((8, 6), None) == cublas_workspace((8, 0), "nonsense") == 8 * MIB + 128 * 1024
    assert cublas_workspace((8, 0), ":4096:2:16:8") == 8 * MIB + 128 * 1024
    assert cublas_workspace((9, 0), ":16:8") == 128 * 1024


MACHINE = 1 << 40


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def version_2(root: Path, group: str, most: object, used: int, reclaimable: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", most)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 5\ninactive_file {reclaimable}")


@pytest.mark.usefixtures("machine")
def test_the_lowest_of_all_groups_above_counts_and_pages_of_files_are_free(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/jobs/mine")
    version_2(tmp_path, "jobs/mine", 1000, 600)
    assert available_bytes(tmp_path) == 400
    version_2(tmp_path, "jobs", 2000, 1900)
    assert available_bytes(tmp_path) == 100
    version_2(tmp_path, "jobs", 2000, 1900, reclaimable=50)
    assert available_bytes(tmp_path) == 150
    stat = next(tmp_path.rglob("jobs/memory.stat"))
    write(stat, f"{stat.read_text().strip()}\nactive_file 30")
    assert available_bytes(tmp_path) == 180
    version_2(tmp_path, "jobs", "max", 1900)
    assert available_bytes(tmp_path) == 400


def test_equal_tensors_share_segments_without_a_rest():
    assert fitting([6 * MIB] * 5) == [12 * MIB, 12 * MIB, 6 * MIB]
    assert fitting([7 * MIB, 6 * MIB, 7 * MIB]) == [14 * MIB, 6 * MIB]
    assert fitting([12 * MIB] * 3) == [12 * MIB] * 3
    # Three of them are 20.1 MiB, of which a segment takes 22.
    assert fitting([int(6.7 * MIB)] * 5)[0] > 30 * MIB
    assert fitting([1187 * MIB] * 2) == [1187 * MIB] * 2
