"""Each planted fault has its place still; `python -m tests.mutants`, in `make nightly`, plants them all."""

from __future__ import annotations

from tests.mutants.fault import ROOT
from tests.mutants.faults import FAULTS


def test_each_fault_has_its_place_and_its_tests():
    for fault in FAULTS:
        fault.planted_in((ROOT / "megatrain" / fault.path).read_text())
        for name in fault.seen_by:
            path, _, function = name.partition("::")
            assert (ROOT / path).exists(), f"{path}, which sees: {fault.name}"
            assert not function or f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), name
