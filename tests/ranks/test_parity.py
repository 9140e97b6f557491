"""Several ranks train with the bits of one process that has all of their micro-batches, in the order of the ranks."""

from __future__ import annotations

from itertools import product

import pytest

from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes
from tests.ranks.sides import EDITS, Case, train, train_here
from tests.training.parity import MODES

TWO = ((1, 1), (2, 1), (1, 3))
THREE = ((1, 1, 1), (2, 1, 3), (1, 2, 1))
CASES = {
    "adapted-serial-sum": Case("adapted", "serial", TWO, optimizer="sgd", options={"reduce": "sum"}),
    "tied-overlap-chaos": Case(
        "tied", "overlap", THREE, compile={"transfer": "copy"}, chaos=1, options={"report_norm": True}
    ),
    "tied-deferred-clipped-bf16": Case("tied", "deferred", THREE, compile={"precision": "bf16"}, looks=True),
    "tied-spread": Case("tied", "spread", THREE, looks=True),
    "adapted-overlap-in-place": Case("adapted", "overlap", TWO, edits="in place"),
    "tied-spread-unseen-bf16": Case("tied", "spread", THREE, compile={"precision": "bf16"}, edits="unseen"),
    "branching-spread": Case("branching", "spread", [*THREE, THREE[1]]),
    "deciding-spread": Case("deciding", "spread", [*THREE, THREE[0]], is_weighted=True, looks=True),
    "broad-deferred": Case("broad", "deferred", ((1, 1, 1), (2, 1, 1)), optimizer="sgd"),
    "stack-serial-clipped": Case("stack", "serial_clipped", THREE, compile={"transfer": "copy", "block_bytes": "100B"}),
}
HOOKED = {
    f"{task}-{mode}-{transfer}-hooks": Case(task, mode, THREE, compile={"transfer": transfer}, hooks=True)
    for task in ("stack", "tied")
    for mode in MODES
    for transfer in ("bind", "copy")
}
CASES["tied-deferred-bind-hooks"] = HOOKED.pop("tied-deferred-bind-hooks")
LONGER = {
    "tied-overlap-bf16": Case("tied", "overlap", THREE, compile={"precision": "bf16"}, options={"report_norm": True}),
    "tied-spread-longer": Case("tied", "spread", [*THREE, *THREE], looks=True),
    "branching-spread-longer": Case("branching", "spread", [*THREE, *THREE]),
    "deciding-deferred-clipped": Case("deciding", "deferred", [(2, 3)] * 5, compile={"transfer": "copy"}, chaos=3),
    "deciding-spread-longer": Case("deciding", "spread", [*THREE, *THREE], is_weighted=True, looks=True),
    "stack-spread-looks": Case("stack", "spread", [*TWO, *TWO], looks=True),
}
FURTHER = {
    f"{task}-{mode}-{transfer}": Case(task, mode, THREE, compile={"transfer": transfer})
    for task in ("stack", "tied", "adapted")
    for mode in MODES
    for transfer in ("bind", "copy")
}
DISTURBED = {
    f"{task}-{mode}-chaos-{seed}": Case(task, mode, THREE, compile={"transfer": "copy"}, chaos=10 * seed)
    for seed, (task, mode) in enumerate(product(("tied", "adapted", "branching", "deciding"), MODES), start=1)
}
ONE_BY_ONE = {
    "tied-spread-weighted": Case("tied", "spread", THREE, is_weighted=True),
    "tied-deferred-of-two": Case("tied", "deferred", TWO, compile={"transfer": "copy"}),
}
ROUNDED = {"tied-rounded": Case("tied", "overlap", THREE, compile={"precision": "bf16", "masters": "rounded"})}
EDITED = {
    f"tied-{mode}-{edit}-bf16": Case("tied", mode, THREE, compile={"precision": "bf16"}, edits=edit)
    for mode in ("overlap", "spread", "deferred", "serial_clipped")
    for edit in EDITS
}
FOUR = {f"tied-{mode}": Case("tied", mode, [(1, 2, 1, 1), (2, 1, 1, 3), (1, 1, 1, 1)], looks=True) for mode in MODES}
LARGE = {task: Case(task, "spread", TWO, is_weighted=True) for task in ("gpt", "llama", "t5", "lora")}
LARGE["broad"] = Case("broad", "overlap", ((1, 1, 1), (1, 2, 1)), optimizer="sgd")
MORE = FURTHER | LARGE | DISTURBED | ROUNDED | EDITED | HOOKED | ONE_BY_ONE | LONGER


def assert_parity(case: Case, processes: Processes) -> None:
    found = processes.run(train_here, case)
    expected = train(case, None, None)
    for rank in range(len(case.deal[0])):
        assert not isinstance(found[rank], BaseException), found[rank]
        wanted = {name: value for name, value in expected.items() if name in found[rank]}
        assert_same(wanted, found[rank], f"rank {rank}")


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_with_the_bits_of_one_process(name: str, three: Processes):
    assert_parity(CASES[name], three)


@pytest.mark.parametrize("name", [*map(nightly, MORE)])
def test_more_ranks_train_with_the_bits_of_one_process(name: str, three: Processes):
    assert_parity(MORE[name], three)


@pytest.mark.parametrize("name", [*map(nightly, FOUR)])
def test_four_ranks_train_with_the_bits_of_one_process(name: str, four: Processes):
    assert_parity(FOUR[name], four)
