"""Ranks on devices train with the bits of one process on one such device, in every order of the streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import megatrain
from tests.comparing import assert_same
from tests.draws import draws
from tests.ranks.processes import Processes, refused
from tests.ranks.sides import EDITS, Case, train, train_here
from tests.ranks.test_parity import THREE
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


def assert_parity(case: Case, devices: Processes) -> None:
    expected = devices.run(train_alone_there, case)[0]
    assert not isinstance(expected, BaseException), expected
    found = devices.run(train_there, case)
    for rank in range(len(case.deal[0])):
        assert not isinstance(found[rank], BaseException), found[rank]
        wanted = {name: value for name, value in expected.items() if name in found[rank]}
        assert_same(wanted, found[rank], f"rank {rank}")


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
def test_a_rank_without_device_memory_ends_the_step_of_all(devices: Processes):
    found = devices.run(running_out)
    assert [texts[0] for texts in found] == [""] * 3
    assert "out of memory" in found[1][1], found[1]
    assert all("rank 1" in found[rank][1] for rank in (0, 2)), found
