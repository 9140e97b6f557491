"""`python -m tests.mutants`: plants each fault in turn; ends with status 1 if the tests of one don't fail."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.fault import copied, tried
from tests.mutants.faults import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of faults, or of paths")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(part in f"{fault.name} {fault.path}" for part in options.only)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder))
        for fault in chosen:
            began = time.perf_counter()
            is_seen, said = tried(fault, place)
            missed += not is_seen
            verdict = "seen" if is_seen else "NOT SEEN"
            print(f"{verdict:8} {time.perf_counter() - began:5.0f} s  {fault.path}: {fault.name}; {said}", flush=True)
    print(f"{len(chosen)} faults, {missed} not seen")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
