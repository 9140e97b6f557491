"""Several ranks train as one process does with one micro-batch each, and in a fixed order with several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes
from tests.ranks.sides import Case, eager, train, train_here
from tests.training.parity import MODES

TWO, THREE = ((1, 1),) * 3, ((1, 1, 1),) * 3
CASES = {
    "tied-spread-bf16": Case("tied", "spread", THREE, compile={"precision": "bf16"}, looks=True),
    "adapted-serial-sum": Case("adapted", "serial", TWO, optimizer="sgd", options={"reduce": "sum"}),
    "branching-overlap-norm": Case("branching", "overlap", THREE, options={"report_norm": True}, chaos=7),
    "deciding-deferred": Case("deciding", "deferred", THREE, compile={"transfer": "copy"}, chaos=8),
    "tied-8bit": Case("tied", "spread", THREE, optimizer="8 bit", compile={"precision": "bf16"}, looks=True),
    "tied-deferred-hooks": Case("tied", "deferred", THREE, hooks=True, looks=True),
    "stack-cut": Case("stack", "serial_clipped", THREE, compile={"transfer": "copy", "block_bytes": "100B"}),
    "stack-cut-deferred": Case("stack", "deferred", THREE, compile={"block_bytes": "100B"}, looks=True),
}
"""What the random models of `test_drawn_models.py` don't have."""
OTHER_DEALS = ((2, 1, 3), (1, 2, 1), (2, 2, 2))
ORDERED = {
    "stack-deferred-weighted-dropout": Case("stack", "deferred", OTHER_DEALS, is_weighted=True, draws=True),
    "branching-spread": Case("branching", "spread", OTHER_DEALS, compile={"transfer": "copy"}, looks=True),
    "lora": Case("lora", "spread", OTHER_DEALS, is_weighted=True, draws=True),
}


def assert_trained(case: Case, expected: Mapping[str, Any], processes: Processes) -> None:
    found = processes.run(train_here, case)
    for rank in range(len(case.deal[0])):
        assert not isinstance(found[rank], BaseException), found[rank]
        names = expected.keys() & found[rank].keys()
        assert {"losses", "norms", "parameters", "optimizers"} <= names
        assert_same({n: expected[n] for n in names}, {n: found[rank][n] for n in names}, f"rank {rank}")


@pytest.mark.parametrize("name", ["tied-spread-bf16", *map(nightly, [*CASES][1:])])
def test_ranks_with_a_micro_batch_each_have_the_bits_of_one_process(name: str, three: Processes):
    assert_trained(CASES[name], train(CASES[name], None, None), three)


@pytest.mark.parametrize("name", ["stack-deferred-weighted-dropout", *map(nightly, [*ORDERED][1:])])
def test_ranks_with_several_add_their_own_and_then_all_in_the_order_of_ranks(name: str, three: Processes):
    assert_trained(ORDERED[name], eager(ORDERED[name]), three)


@pytest.mark.parametrize("mode", [*map(nightly, MODES)])
def test_the_same_run_twice_has_the_same_bits(mode: str, three: Processes):
    case = Case("tied", mode, OTHER_DEALS, draws=True, chaos=3)
    first, second = (three.run(train_here, case) for _ in range(2))
    assert_same(first, second)
