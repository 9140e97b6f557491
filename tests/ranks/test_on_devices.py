"""Ranks on devices train with the bits of one process on one such device, in every order of the streams."""

from __future__ import annotations

import pytest

from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes
from tests.ranks.sides import EDITS, Case
from tests.ranks.test_parity import THREE, TWO
from tests.ranks.there import (
    evaluating_there,
    holding,
    locked_there,
    running_out,
    sharing_a_card,
    train_alone_there,
    train_there,
    waiting_there,
)
from tests.training.parity import MODES

ORDERS = "late", "seeded", "late but compute", "late compute"
CASES = {"tied-spread-late": Case("tied", "spread", THREE, order="late", is_weighted=True)}
FURTHER = (
    {
        "stack-deferred-clipped-bf16": Case("stack", "deferred", TWO, order="seeded", compile={"precision": "bf16"}),
        "deciding-deferred-late": Case("deciding", "deferred", TWO, order="late"),
        "tied-spread-late-unseen": Case("tied", "spread", THREE, order="late", edits="unseen", looks=True),
    }
    | {
        f"{task}-{mode}-{order}": Case(task, mode, THREE, order=order)
        for task in ("tied", "adapted")
        for mode in MODES
        for order in ORDERS
    }
    | {
        f"tied-{mode}-{edit}": Case("tied", mode, THREE, order="late", edits=edit)
        for mode in ("spread", "deferred")
        for edit in EDITS
    }
    | {
        f"tied-{mode}-late-graphs": Case("tied", mode, THREE, order="late", compile={"kernels": "graphs"})
        for mode in MODES
    }
    | {f"tied-{mode}-late-hooks": Case("tied", mode, THREE, order="late", hooks=True) for mode in MODES}
)
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


@pytest.mark.parametrize("name", [*map(nightly, FURTHER)])
def test_more_ranks_on_devices_train_with_the_bits_of_one_process(name: str, devices: Processes):
    assert_parity(FURTHER[name], devices)


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
