"""`python -m tests.seeds`: every hypothesis test with several random seeds, a process and a line for each seed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent


def files() -> list[str]:
    """The files that have hypothesis tests, so that no others are collected."""
    found = (path for path in sorted(TESTS.rglob("test_*.py")) if "\n@given" in path.read_text())
    return [str(path.relative_to(TESTS.parent)) for path in found]


def failure(seed: int, names: list[str]) -> str | None:
    """Runs all tests once; returns what pytest says of those that fail."""
    drawn = ["--hypothesis-profile=seeds", f"--hypothesis-seed={seed}"]  # all examples of each test
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", *drawn, *names]
    # CI would repeat the same draws; a database would begin with what failed before.
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stdout[-8000:] + done.stderr[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeds", description=__doc__)
    parser.add_argument("names", nargs="*", help="files or folders; all that have hypothesis tests, if none is named")
    parser.add_argument("--first", type=int, default=int(time.time()) % 10**6, help="the first seed")
    parser.add_argument("--count", type=int, default=20, help="how many seeds")
    options = parser.parse_args()
    failed: list[int] = []
    for seed in range(options.first, options.first + options.count):
        began = time.perf_counter()
        text = failure(seed, options.names or files())
        print(f"seed {seed}: {'failed' if text else 'passed'} in {time.perf_counter() - began:.0f} s", flush=True)
        if text is not None:
            failed.append(seed)
            print(text, flush=True)
    print(f"{options.count - len(failed)} of {options.count} seeds passed; failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
