"""Ranks on devices train with the bits of one process on one such device, in every order of the streams."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.device import find
from tests.comparing import assert_same
from tests.draws import draws
from tests.nightly import nightly
from tests.ranks.processes import Processes, refused
from tests.ranks.sides import EDITS, OURS, Case, begin, moved, take, train, train_here
from tests.ranks.test_parity import THREE, TWO
from tests.simulated_device.loading import load
from tests.simulated_runs.on_device import choose
from tests.training.parity import MODES, seeded_stack, square, stack_batch


def train_there(rank: int, case: Case) -> Any:
    """What a rank runs, with the streams in the order of the case."""
    simulator = load()
    simulator.reset()
    choose(simulator, case.order, seed=rank)
    found = train_here(rank, case)
    simulator.order("early")
    assert simulator.violations() == []
    return found


def train_alone_there(rank: int, case: Case) -> Any:
    """What one process computes; the other ranks have nothing to do."""
    load().reset()
    alone: Any = dist.new_group([0])
    return train(case, alone, None) if rank == 0 else None


def locked_there(rank: int, case: Case) -> dict[str, Any]:
    """What is page-locked after some steps, and whether this rank has copies of what all share."""
    load().reset()
    compiled, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(len(case.deal)))
    step.flush()
    engine = compiled.megatrain.engine
    residencies = engine.store.residencies.values()
    return {
        "shares": step._exchange.shares,
        "sent": all(home.sent is not None and home.sent.arena.is_locked for home in residencies),
        "private": any(home.arena.is_locked for home in residencies),
        "copies": sorted(name.key for name, twin in compiled.megatrain.ranks.store.twins.items() if twin.is_written),
    }


def waiting_there(rank: int, case: Case) -> list[str]:
    """Where the launching thread waits for the device in the third step."""
    simulator = load()
    simulator.reset()
    _, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(2))
    given = [moved(batch, case.device(rank)) for batch in case.batches(2)[rank]]
    with simulator.synchronizations() as found:
        step(given)
    return [str(one) for one in found if not one.thread.startswith("megatrain-")]


def evaluating_there(rank: int, case: Case) -> list[bool]:
    """Rank 1 writes weights for an evaluation of its own, and back; whether each evaluation has eager's bits."""
    load().reset()
    compiled, _, step = begin(case, dist.group.WORLD)
    take(case, rank, step, range(2))
    model, batch = compiled.megatrain.model, moved(OURS[case.task].batch(7, 2), case.device(rank))
    parameter = next(p for p in model.parameters() if p.requires_grad)
    before, found = parameter.detach().clone(), list[bool]()
    for factor in (1.0, 2.0 if rank == 1 else 1.0):
        parameter.data.mul_(factor)
        with torch.no_grad():
            eager = copy.deepcopy(model).to(case.device(rank))(**batch)
            found.append(torch.equal(compiled(**batch)["logits"].cpu(), eager["logits"].cpu()))
    parameter.data.copy_(before)
    take(case, rank, step, [2])
    return found


def sharing_a_card(rank: int) -> str:
    """Each rank asks for the device that the others have."""
    simulator = load()
    simulator.reset()
    device = find("sim:0")
    device.identity = lambda: "the only card"  # pyright: ignore
    return refused(lambda: megatrain.compile(seeded_stack(2), device=device, process_group=dist.group.WORLD))


def running_out(rank: int) -> list[str]:
    """The second step of rank 1 has too little memory; then there is another."""
    simulator = load()
    simulator.reset()
    device = f"sim:{rank % 2}"
    model = seeded_stack(3)
    compiled = megatrain.compile(model, device=device, process_group=dist.group.WORLD)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square)
    found: list[str] = []
    for number in range(3):
        batch = stack_batch(10 * number + rank, 2).to(device)
        if number == 1 and rank == 1:
            batch = batch.repeat(1 << 20, 1)
            simulator.set_capacity(1, torch.accelerator.memory_reserved(device))
        found.append(refused(lambda batch=batch: step(batch)).partition("\n")[0])
    return found


class Choosing(nn.Module):
    """Python code reads a value in the last block; tensors are multiples of the bytes to which the allocator rounds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.mean()
        for layer in self.layers:
            x = layer(x).tanh()
        return x.cos() if (x.abs() * given).sum() > 0 else x.sin()


def holding(rank: int, activations: str) -> dict[str, Any]:
    """The most bytes that each of some steps holds on the device, and its schedule's bytes and last block's ops."""
    simulator = load()
    simulator.reset()
    device, peaks = f"sim:{rank % 2}", list[int]()
    gc.collect()
    held = torch.accelerator.memory_allocated(device)
    torch.manual_seed(4)
    model = Choosing()
    compiled = megatrain.compile(model, device=device, process_group=dist.group.WORLD, activations=activations)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=square)
    for _ in range(3):
        batches = [torch.rand(512, 128).to(device) for _ in range(3)]
        gc.collect()
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step(batches)
        torch.accelerator.synchronize(device)
        peaks.append(torch.accelerator.max_memory_allocated(device) - held)
    step.flush()
    ops = [str(op) for op in step.schedule.ops if op.block == 4 and op.what in "FB"]
    return {"peaks": peaks, "planned": step.schedule.device_bytes, "ops": ops}


CASES = {
    "tied-spread-late": Case("tied", "spread", THREE, order="late", is_weighted=True),
    "tied-spread-late-unseen": Case("tied", "spread", THREE, order="late", edits="unseen", looks=True),
    "tied-deferred-late-graphs": Case("tied", "deferred", THREE, order="late", compile={"kernels": "graphs"}),
    "tied-serial-hooks": Case("tied", "serial_clipped", THREE, order="late but compute", hooks=True),
    "adapted-overlap-compute": Case("adapted", "overlap", THREE, order="late compute", edits="new moments"),
    "stack-deferred-clipped-bf16": Case("stack", "deferred", TWO, order="seeded", compile={"precision": "bf16"}),
    "deciding-deferred-late": Case("deciding", "deferred", TWO, order="late"),
}
USUAL = Case("tied", "spread", THREE, order="late")


def assert_parity(case: Case, devices: Processes) -> None:
    expected = devices.run(train_alone_there, case)[0]
    assert not isinstance(expected, BaseException), expected
    found = devices.run(train_there, case)
    for rank in range(len(case.deal[0])):
        assert not isinstance(found[rank], BaseException), found[rank]
        wanted = {name: value for name, value in expected.items() if name in found[rank]}
        assert_same(wanted, found[rank], f"rank {rank}")


@pytest.mark.parametrize("name", [*map(nightly, CASES)])
def test_ranks_on_devices_train_with_the_bits_of_one_process(name: str, devices: Processes):
    assert_parity(CASES[name], devices)


@pytest.mark.nightly
@given(
    task=st.sampled_from(["tied", "adapted", "stack"]),
    mode=st.sampled_from(sorted(MODES)),
    order=st.sampled_from(["late", "seeded", "late but compute", "late compute"]),
    edits=st.sampled_from(["", *EDITS]),
    kernels=st.sampled_from(["auto", "graphs"]),
    hooks=st.booleans(),
)
@draws(60, usual=6)
def test_drawn_trainings_on_devices_have_the_bits_of_one_process(devices: Processes, kernels: str, **drawn: Any):
    assert_parity(Case(deal=THREE, compile={"kernels": kernels}, **drawn), devices)


@pytest.mark.nightly
def test_ranks_copy_weights_from_locked_memory_that_all_share(devices: Processes):
    for found in devices.run(locked_there, USUAL):
        assert found == {"shares": True, "sent": True, "private": False, "copies": []}


@pytest.mark.parametrize("mode", [*map(nightly, MODES)])
def test_the_launching_thread_of_a_rank_waits_for_the_losses_alone(mode: str, devices: Processes):
    for waits in devices.run(waiting_there, Case("tied", mode, THREE, order="early")):
        # The losses go to the other ranks, and their sum comes back.
        assert len(waits) == 2, waits
        assert all(name in wait for name, wait in zip(("exchange.py", "step_run.py"), waits, strict=True)), waits


@pytest.mark.parametrize("activations", [*map(nightly, ("recompute", "keep"))])
def test_ranks_whose_last_block_reads_values_hold_what_their_schedule_says(activations: str, devices: Processes):
    for found in devices.run(holding, activations):
        assert not isinstance(found, BaseException), found
        assert found["ops"] == ["F4.0", "F4.1", "F4.2", "B4.0", "B4.1", "B4.2"]
        assert all(0.9 * found["planned"] < peak <= found["planned"] for peak in found["peaks"]), found


@pytest.mark.nightly
def test_an_evaluation_sees_what_its_rank_alone_has_written(devices: Processes):
    assert devices.run(evaluating_there, USUAL) == [[True, True]] * 3


@pytest.mark.nightly
def test_ranks_that_share_a_card_are_refused(devices: Processes):
    for text in devices.run(sharing_a_card):
        assert text.startswith("RanksError: ranks 0, 1, 2 compute on the same device"), text
        assert "LOCAL_RANK" in text


@pytest.mark.nightly
def test_a_rank_without_device_memory_ends_the_step_of_all(devices: Processes):
    found = devices.run(running_out)
    assert [texts[0] for texts in found] == [""] * 3
    assert "out of memory" in found[1][1], found[1]
    assert all("rank 1" in found[rank][1] for rank in (0, 2)), found
