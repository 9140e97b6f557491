"""Ranks on devices train with the bits of one process on one such device, in every order of the streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comparing import assert_same
from tests.ranks.processes import Processes
from tests.ranks.sides import Case, train_alone_there, train_there
from tests.ranks.test_parity import THREE, TWO
from tests.simulated_device.loading import unavailable
from tests.tiers import wide
from tests.training.parity import MODES

ORDERS = "late", "seeded", "late but compute", "late compute"
CASES = {
    "tied-spread-late": Case("tied", "spread", THREE, order="late", is_weighted=True, draws=True),
    "llama-deferred-clipped-bf16": Case("llama", "deferred", TWO, order="seeded", compile={"precision": "bf16"}),
    "adapted-overlap-late-but-compute": Case("adapted", "overlap", THREE, order="late but compute"),
}
FURTHER = {
    f"{task}-{mode}-{order}": Case(task, mode, THREE, order=order, draws=True)
    for task in ("tied", "adapted", "lora")
    for mode in MODES
    for order in ORDERS
}


@pytest.fixture(scope="module")
def devices() -> Iterator[Processes]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    made = Processes(3, simulated=True)
    yield made
    made.close()


def assert_parity(case: Case, devices: Processes) -> None:
    expected = devices.run(train_alone_there, case)[0]
    assert not isinstance(expected, BaseException), expected
    found = devices.run(train_there, case)
    for rank in range(len(case.deal[0])):
        assert not isinstance(found[rank], BaseException), found[rank]
        wanted = {name: value for name, value in expected.items() if name in found[rank]}
        assert_same(wanted, found[rank], f"rank {rank}")


@pytest.mark.parametrize("name", CASES)
def test_ranks_on_devices_train_with_the_bits_of_one_process(name: str, devices: Processes):
    assert_parity(CASES[name], devices)


@pytest.mark.parametrize("name", [*map(wide, FURTHER)])
def test_more_ranks_on_devices_train_with_the_bits_of_one_process(name: str, devices: Processes):
    assert_parity(FURTHER[name], devices)
