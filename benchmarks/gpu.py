"""Everything to run on a machine with a GPU, in order, within 45 minutes; writes one report. See docs/gpu.md."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.device import find
from megatrain.device.kinds import fault
from megatrain.sizes import format_bytes

_KEPT_LINES = 400


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of the report.

    Args:
        title: Its heading.
        command: What runs, from the root of the repository.
        limit_s: It is ended after so many seconds.
    """

    title: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Args:
        status: Of its process; None if the time limit ended it.
        seconds: How long it ran.
        output: What it printed, both streams.
    """

    status: int | None
    seconds: float
    output: str

    def __str__(self) -> str:
        ended = "ended by its time limit" if self.status is None else f"status {self.status}"
        lines = self.output.splitlines()
        left = len(lines) - _KEPT_LINES
        kept = lines if left <= 0 else [f"({left} lines before)", *lines[-_KEPT_LINES:]]
        return "\n".join([f"{ended}, {self.seconds:.0f} s", "", "```", *kept, "```"])


def stages(device: str, sizes: list[str], harness: str | None, *, is_small: bool) -> Iterator[Stage]:
    """The commands, the most important first."""
    python = (sys.executable, "-m")
    yield Stage(
        "Tests that need an accelerator",
        (*python, "pytest", "tests/gpu", "-q", "-ra", "-m", "nightly or not nightly"),
        600,
    )
    if is_small:
        shape, rounds = ("--depth", "2", "--width", "64", "--vocabulary", "256", "--context", "32"), ("--rounds", "1")
    else:
        shape = ("--depth", "16", "--width", "2048", "--vocabulary", "32000", "--context", "1024", "--batch-size", "4")
        rounds = ("--rounds", "3")
    steps = (*python, "benchmarks.steps", "--device", device, *shape, *rounds)
    yield Stage("Whole steps, and what the simulator of schedules says of them", steps, 480)
    if sizes:
        table = (*python, "benchmarks.measured", "--device", device, "--sizes", *sizes)
        yield Stage("Steps of large models; compare with the modelled table in docs/benchmarks.md", table, 720)
    yield Stage("Calls against eager", (*python, "benchmarks.bench", "--device", device, *shape, *rounds), 360)
    if harness is not None:
        yield Stage("Other trainers", (*python, "benchmarks.peers", "--harness", harness), 540)


def run(stage: Stage) -> Outcome:
    """Runs a command to its end, or to its time limit."""
    start = time.perf_counter()
    # A group of its own: what the command has started must not use the GPU beside the next one.
    with subprocess.Popen(
        stage.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            found, _ = process.communicate(timeout=stage.limit_s)
            status: int | None = process.returncode
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            found, _ = process.communicate()
            status = None
    return Outcome(status, time.perf_counter() - start, found.decode(errors="replace"))


def machine(device: str) -> str:
    """What the report is of."""
    place = find(device)
    name = torch.cuda.get_device_name(place.torch_device) if place.kind == "cuda" else str(place)
    memory = "" if place.is_host else f", {format_bytes(place.memory().total)}"
    return f"{name}{memory}; torch {torch.__version__}, Python {sys.version.split()[0]}"


def main() -> None:
    """Writes the report; the status is that of the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--sizes", nargs="*", default=["1.5B", "3B"], help="18 bytes of host memory a parameter")
    parser.add_argument("--harness", help="folder of the harness that trains other trainers")
    parser.add_argument("--small", action="store_true", help="only shows that all commands work")
    options = parser.parse_args()
    if (reason := fault(options.device)) is not None:
        sys.exit(f"device {options.device!r} {reason}.\n  The report is of a machine with a GPU; see docs/gpu.md.")
    lines = ["# Report of a machine with a GPU", "", machine(options.device)]
    worst = 0
    for stage in stages(options.device, options.sizes, options.harness, is_small=options.small):
        print(f"{stage.title}: {shlex.join(stage.command)}", flush=True)
        outcome = run(stage)
        worst = worst or (1 if outcome.status is None else outcome.status)
        lines += ["", f"## {stage.title}", "", f"`{shlex.join(stage.command[1:])}`", "", str(outcome)]
        # After each stage: the machine may go before the last.
        options.report.write_text("\n".join(lines) + "\n")
        print(f"  {outcome.seconds:.0f} s, status {outcome.status}", flush=True)
    print(f"written: {options.report}")
    sys.exit(worst)


if __name__ == "__main__":
    main()
