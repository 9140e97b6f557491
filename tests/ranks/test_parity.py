"""Several ranks train as one process does with one micro-batch each, and in a fixed order with several."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes
from tests.ranks.sides import EDITS, Case, eager, train, train_here
from tests.training.parity import MODES

TWO, THREE = ((1, 1),) * 3, ((1, 1, 1),) * 3
CASES = {"tied-spread-bf16": Case("tied", "spread", THREE, compile={"precision": "bf16"}, looks=True)}
MORE = {
    f"{task}-{mode}-{transfer}": Case(task, mode, THREE, compile={"transfer": transfer}, looks=transfer == "copy")
    for task, mode, transfer in product(("stack", "tied", "adapted"), MODES, ("bind", "copy"))
} | {
    f"tied-{mode}-{edit}-bf16": Case("tied", mode, THREE, compile={"precision": "bf16"}, edits=edit)
    for mode, edit in product(("overlap", "spread", "deferred", "serial_clipped"), EDITS)
} | {
    f"{task}-{mode}-chaos": Case(task, mode, THREE, compile={"transfer": "copy"}, chaos=10 + number)
    for number, (task, mode) in enumerate(product(("tied", "adapted", "branching", "deciding"), MODES))
} | {
    f"{task}-{mode}-{transfer}-hooks": Case(task, mode, THREE, compile={"transfer": transfer}, hooks=True)
    for task, mode, transfer in product(("stack", "tied"), MODES, ("bind", "copy"))
} | {
    "adapted-serial-sum": Case("adapted", "serial", TWO, optimizer="sgd", options={"reduce": "sum"}),
    "tied-overlap-norm": Case("tied", "overlap", THREE, options={"report_norm": True}),
    "tied-8bit": Case("tied", "spread", THREE, optimizer="8 bit", compile={"precision": "bf16"}, looks=True),
    "tied-rounded": Case("tied", "overlap", THREE, compile={"precision": "bf16", "masters": "rounded"}),
    "stack-cut": Case("stack", "serial_clipped", THREE, compile={"transfer": "copy", "block_bytes": "100B"}),
    "stack-cut-deferred": Case("stack", "deferred", THREE, compile={"block_bytes": "100B"}, looks=True),
}  # fmt: skip
OTHER_DEALS = ((2, 1, 3), (1, 2, 1), (2, 2, 2))
ORDERED = {
    "stack-deferred-weighted-dropout": Case("stack", "deferred", OTHER_DEALS, is_weighted=True, draws=True),
}
MORE_ORDERED = {
    f"{task}-{mode}-{transfer}": Case(
        task, mode, OTHER_DEALS, compile={"transfer": transfer}, is_weighted=transfer == "bind", looks=True
    )
    for task, mode, transfer in product(("stack", "branching"), MODES, ("bind", "copy"))
} | {task: Case(task, "spread", OTHER_DEALS, is_weighted=True, draws=True) for task in ("llama", "lora")}


def assert_trained(case: Case, expected: Mapping[str, Any], processes: Processes) -> None:
    found = processes.run(train_here, case)
    for rank in range(len(case.deal[0])):
        assert not isinstance(found[rank], BaseException), found[rank]
        names = expected.keys() & found[rank].keys()
        assert {"losses", "norms", "parameters", "optimizers"} <= names
        assert_same({n: expected[n] for n in names}, {n: found[rank][n] for n in names}, f"rank {rank}")


@pytest.mark.parametrize("name", [*CASES, *map(nightly, MORE)])
def test_ranks_with_a_micro_batch_each_have_the_bits_of_one_process(name: str, three: Processes):
    case = {**CASES, **MORE}[name]
    assert_trained(case, train(case, None, None), three)


@pytest.mark.parametrize("name", [*ORDERED, *map(nightly, MORE_ORDERED)])
def test_ranks_with_several_add_their_own_and_then_all_in_the_order_of_ranks(name: str, three: Processes):
    case = {**ORDERED, **MORE_ORDERED}[name]
    assert_trained(case, eager(case), three)


@pytest.mark.parametrize("mode", [*map(nightly, MODES)])
def test_the_same_run_twice_has_the_same_bits(mode: str, three: Processes):
    case = Case("tied", mode, OTHER_DEALS, draws=True, chaos=3)
    first, second = (three.run(train_here, case) for _ in range(2))
    assert_same(first, second)
