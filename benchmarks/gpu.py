"""What to run on a machine with a GPU: five parts of at most nine minutes, each with its report. See docs/gpu.md."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatrain.base.sizes import format_bytes
from megatrain.device import find
from megatrain.device.kinds import fault

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


MODELS = {"1.5B": "qwen2.5-1.5b", "3B": "qwen2.5-3b", "4B": "qwen3-4b", "tiny": "qwen2-tiny"}
"""The harness's names of the sizes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all parts need to know.

    Args:
        device: Where the models run.
        harness: The folder of the harness that trains other trainers; None leaves these out.
        is_small: Only to show that the commands work: tiny models, one step.
    """

    device: str
    harness: Path | None = None
    is_small: bool = False

    def measured(self, title: str, limit_s: float, size: str, *arguments: str, **variables: str) -> Stage:
        """Steps of a model of ours in some way; `variables` are of the environment."""
        size = "tiny" if self.is_small else size
        environment = ("env", *(f"{name}={value}" for name, value in variables.items())) if variables else ()
        command = (*environment, *_PYTHON, "benchmarks.measured", "--device", self.device, "--sizes", size, *arguments)
        return Stage(title, (*command, "--steps", "1" if self.is_small else "3"), limit_s)

    def peers(self, limit_s: float, size: str, clip: str, tokens: tuple[int, int], *names: str) -> Iterator[Stage]:
        """Whole bf16 steps of other trainers and of ours; `tokens` is the batch size and the tokens of a sequence."""
        if self.harness is None:
            return
        size, tokens = ("tiny", (2, 32)) if self.is_small else (size, tokens)
        names = tuple(name for name in names if not (self.is_small and name in _OF_CARDS))
        fixed = ("--dtypes", "bf16", "--clips", clip, "--rounds", "1", "--limit", "180", "--device", self.device)
        shape = ("--model-config", MODELS[size], "--batch", str(tokens[0]), "--seq", str(tokens[1]))
        steps = ("--steps", "1", "--warmup", "1") if self.is_small else ("--steps", "6", "--warmup", "2")
        yield Stage(
            f"{size}, {tokens[0]} x {tokens[1]} tokens, " + ("not clipped" if clip == "0" else f"clipped at {clip}"),
            (*_PYTHON, "benchmarks.peers", "--harness", str(self.harness), "--peers", *names, *fixed, *shape, *steps),
            limit_s,
        )


_PYTHON = (sys.executable, "-m")
_OF_CARDS = ("deepspeed", "ours-graphs")
"""Trainers that a machine without a card hasn't, or that take minutes there."""


def correctness(options: Options) -> Iterator[Stage]:
    """A: the machine's rates, and whether its numbers are right."""
    yield Stage("The card", ("nvidia-smi",), 20)
    yield Stage("The host", ("lscpu",), 20)
    if options.harness is not None and not options.is_small:
        yield Stage("The link", (sys.executable, str(options.harness / "bench_link.py")), 60)
        host = (sys.executable, str(options.harness / "bench_host.py"), "--params", "400000000", "--rounds", "2")
        yield Stage("Host memory", (*host, "--threads", "1,4,8,13,16", "--opts", "fused"), 80)
    rates = f"import megatrain; print(megatrain.Hardware.measure({options.device!r}))"
    yield Stage("Rates, as plans use them", (sys.executable, "-c", rates), 60)
    tests = (*_PYTHON, "pytest", "tests/gpu", "-q", "-ra", "-p", "no:cacheprovider", "-m", "nightly or not nightly")
    yield Stage("Tests that need an accelerator", (*tests, *(() if options.is_small else ("-n", "8"))), 300)


def headline(options: Options) -> Iterator[Stage]:
    """B: 1.5B against other trainers."""
    ours = ("ours-default", "ours-graphs")
    yield from options.peers(330, "1.5B", "1", (8, 1024), "eager", "fsdp2", "deepspeed", *ours)
    yield from options.peers(210, "1.5B", "0", (8, 1024), "fsdp2", *ours)
    if options.harness is None:
        yield options.measured("1.5B, each way to update", 270, "1.5B", "--micro-batches", "4", "8")
        yield options.measured("8B", 270, "8B", "--micro-batches", "8", "--ways", "spread", "deferred, clipped")


def by_size(options: Options) -> Iterator[Stage]:
    """C: other sizes, and more tokens."""
    for size in ("3B", "4B"):
        yield from options.peers(190, size, "1", (8, 1024), "fsdp2", "deepspeed", "ours-default")
    yield from options.peers(160, "1.5B", "1", (16, 2048), "eager", "fsdp2", "ours-default")
    if options.harness is None:
        for size in ("3B", "4B"):
            yield options.measured(size, 270, size, "--micro-batches", "8", "--ways", "spread", "deferred, clipped")


def attribution(options: Options) -> Iterator[Stage]:
    """D: where a step of 1.5B with short kernels takes its time; and an 8B."""
    short = ("--micro-batches", "4", "--ways", "spread")
    yield options.measured("Default kernels", 45, "1.5B", *short)
    yield options.measured("Eager's kernels, profiled", 60, "1.5B", *short, "calls", "--kernels", "eager", "--profile")
    passive = options.measured(
        "Threads that sleep", 45, "1.5B", *short, "--kernels", "eager", OMP_WAIT_POLICY="passive"
    )
    yield passive
    for threads in () if options.is_small else ("6", "8"):
        few = options.measured(f"{threads} threads", 45, "1.5B", *short, "--kernels", "eager", OMP_NUM_THREADS=threads)
        yield few
    if not options.is_small:
        yield options.measured("Recorded kernels", 60, "1.5B", *short, "--kernels", "graphs")
    yield options.measured("8B", 240, "8B", "--micro-batches", "1", "8", "--ways", "spread")


def breadth(options: Options) -> Iterator[Stage]:
    """E: models with recorded kernels, and an 8B in the memory of a small card."""
    zoo = (*_PYTHON, "tests.zoo", "--device", options.device, "--jobs", "1", "--only")
    families = ("handwritten",) if options.is_small else ("causal,encoders",)
    recorded = () if options.is_small else ("--kernels", "graphs")
    yield Stage("Models", (*zoo, *families, *recorded), 270)
    memory = () if options.is_small else ("--memory", "24GB")
    yield options.measured("8B in 24 GB", 270, "8B", "--micro-batches", "8", "--ways", "spread", *memory)


PARTS: dict[str, Callable[[Options], Iterator[Stage]]] = {
    "B": headline,
    "A": correctness,
    "D": attribution,
    "C": by_size,
    "E": breadth,
}
"""By name, those that say the most first; see the docstring of each."""


def run(stage: Stage) -> Outcome:
    """Runs a command to its end, or to its time limit; one that isn't on this machine says so."""
    start = time.perf_counter()
    if shutil.which(stage.command[0]) is None:
        return Outcome(0, 0.0, f"{stage.command[0]} is not on this machine")
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


def write(part: str, options: Options, report: Path) -> int:
    """Runs a part, and writes its report anew after each command; returns the first status that isn't 0."""
    lines = [f"# {part}: {(PARTS[part].__doc__ or '')[3:].strip()}", "", machine(options.device)]
    worst, end = 0, time.monotonic() + LIMIT_S
    for stage in PARTS[part](options):
        text = shlex.join(stage.command)
        print(f"{stage.title}: {text}", flush=True)
        outcome = run(replace(stage, limit_s=max(1.0, min(stage.limit_s, end - time.monotonic()))))
        worst = worst or (1 if outcome.status is None else outcome.status)
        lines += ["", f"## {stage.title}", "", f"`{text}`", "", str(outcome)]
        # After each stage: the machine may go before the last.
        report.write_text("\n".join(lines) + "\n")
        print(f"  {outcome.seconds:.0f} s, status {outcome.status}", flush=True)
    print(f"written: {report}")
    return worst


LIMIT_S = 540.0
"""Of a part: all of its commands together."""


def main() -> None:
    """Writes a report for each part; the status is 0 if all commands pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="in the given order")
    parser.add_argument("--reports", type=Path, default=Path("gpu-report"), help="a folder; each part has a file there")
    parser.add_argument("--harness", type=Path, help="folder of the harness that trains other trainers")
    parser.add_argument("--small", action="store_true", help="only shows that all commands work")
    given = parser.parse_args()
    if (reason := fault(given.device)) is not None:
        sys.exit(f"device {given.device!r} {reason}.\n  The report is of a machine with a GPU; see docs/gpu.md.")
    options = Options(given.device, given.harness, given.small)
    given.reports.mkdir(parents=True, exist_ok=True)
    statuses = [write(part, options, given.reports / f"{part}.md") for part in given.part]
    sys.exit(next((status for status in statuses if status), 0))


if __name__ == "__main__":
    main()
