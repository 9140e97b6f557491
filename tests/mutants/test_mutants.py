"""Each planted fault has its place still; `python -m tests.mutants`, in `make nightly`, plants them all."""

from __future__ import annotations

from collections import Counter

from tests.mutants.fault import ROOT
from tests.mutants.faults import FAULTS


def test_each_fault_has_its_place_and_its_tests():
    for fault in FAULTS:
        fault.planted_in((ROOT / "megatrain" / fault.path).read_text())
        for name in fault.seen_by:
            path, _, function = name.partition("::")
            assert (ROOT / path).exists(), f"{path}, which sees: {fault.name}"
            assert not function or f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), name


def test_there_are_at_least_forty_of_all_rooms():
    assert len(FAULTS) >= 40
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    rooms = {fault.path.partition("/")[0] for fault in FAULTS}
    assert rooms >= {"tracer", "passes", "scheduler", "runtime", "optim", "planning", "training", "files"}
