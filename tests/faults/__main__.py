"""`python -m tests.faults`: the campaign; prints a table, and ends with status 1 if anything did not hold."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.faults.configurations import configurations
from tests.faults.kills import kills
from tests.faults.lines import BEGUN, lines_of_beginnings, lines_of_operations
from tests.faults.tally import Tally
from tests.faults.world import CASES
from tests.simulated_device.loading import load

OPERATIONS = ("step", "flush", "read", "save", "load")
BEGINNINGS = ("compile", "first step")
# How many trials; of lines, every so-maniest of each case: cases take turns, so that each line has its trial.
COUNTS = {"kills": 300, "lines": len(CASES), "beginnings": 8 * len(BEGUN), "configurations": 2000}
SMALL = {"kills": 3, "lines": 200, "configurations": 8}
SMALL_CASES = ("fp32 clipped", "bf16 overlap")
"""What `make test` tries, in one process; of lines, every other kind of operation in one run, the rest in the other."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", choices=COUNTS, nargs="+", default=list(COUNTS), help="parts of the campaign")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="what is drawn at random")
    parser.add_argument("--first", type=int, default=0, help="where to go on")
    parser.add_argument(
        "--simulated", action="store_true", help="configurations on the simulated device, kernels recorded"
    )
    parser.add_argument("--small", action="store_true", help="a small part of the campaign, in a minute")
    parser.add_argument("--count", type=int, help="how many trials; of lines: every so-maniest")
    parser.add_argument("--cases", nargs="+", help="runs whose lines are interrupted; the names are those of a report")
    parser.add_argument("--kinds", nargs="+", help="operations whose lines are interrupted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulated:
        load()
    print(f"seed {options.seed}", flush=True)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for part in SMALL if options.small else options.only:
            began = time.perf_counter()
            run(part, tally, Path(folder) / part, options)
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    print(tally)
    return int(tally.has_failed)


def run(part: str, tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    first, count = options.first, options.count or (SMALL if options.small else COUNTS)[part]
    if part == "kills":
        kills(tally, folder, seed=options.seed, first=first, count=count)
    elif part == "lines":
        names, kinds = options.cases or tuple(CASES), options.kinds or OPERATIONS
        parts = [(names, kinds)]
        if options.small:
            parts = [((SMALL_CASES[i],), kinds[(i + first) % 2 :: 2]) for i in range(2)]
        for names, kinds in parts:
            lines_of_operations(tally, folder, first=first, stride=count, kinds=kinds, names=names)
    elif part == "beginnings":
        names, kinds = options.cases or BEGUN, options.kinds or BEGINNINGS
        lines_of_beginnings(tally, folder, first=first, stride=count, kinds=kinds, names=names)
    else:
        configurations(tally, seed=options.seed, first=first, count=count)


if __name__ == "__main__":
    sys.exit(main())
