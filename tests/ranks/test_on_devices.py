"""Ranks on devices train with the bits of one process on one such device, in every order of the streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import megatrain
from megatrain.device import find
from tests.comparing import assert_same
from tests.draws import draws
from tests.nightly import nightly
from tests.ranks.processes import Processes, refused
from tests.ranks.sides import EDITS, Case, begin, moved, take, train, train_here
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


CASES = {
    "tied-spread-late": Case("tied", "spread", THREE, order="late", is_weighted=True),
    "tied-spread-late-unseen": Case("tied", "spread", THREE, order="late", edits="unseen", looks=True),
    "tied-deferred-late-graphs": Case("tied", "deferred", THREE, order="late", compile={"kernels": "graphs"}),
    "tied-serial-hooks": Case("tied", "serial_clipped", THREE, order="late but compute", hooks=True),
    "adapted-overlap-compute": Case("adapted", "overlap", THREE, order="late compute", edits="new moments"),
    "stack-deferred-clipped-bf16": Case("stack", "deferred", TWO, order="seeded", compile={"precision": "bf16"}),
    "deciding-deferred-late": Case("deciding", "deferred", TWO, order="late"),
}


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


@pytest.mark.parametrize("mode", [*map(nightly, MODES)])
def test_the_launching_thread_of_a_rank_waits_for_the_losses_alone(mode: str, devices: Processes):
    for waits in devices.run(waiting_there, Case("tied", mode, THREE, order="early")):
        # The losses go to the other ranks, and their sum comes back.
        assert len(waits) == 2, waits
        assert all(name in wait for name, wait in zip(("exchange.py", "step_run.py"), waits, strict=True)), waits


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
