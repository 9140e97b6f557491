"""`megatrain demo`: the demo from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from megatrain.checks import PATH
from megatrain.demo.course import FOLDER, Course
from megatrain.demo.demo_processes import DemoProcesses
from megatrain.demo.demonstrate import demonstrate
from megatrain.demo.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain demo` takes."""
    add = parser.add_argument
    add("--folder", type=Path, default=FOLDER, help=f"folder of the checkpoint (default: {FOLDER})")
    add("--resume", action="store_true", help="continue from the checkpoint, with its recipe")
    text = "press Ctrl-C after this part of the steps, between 0 and 1; under torchrun, kill one process"
    add("--interrupt-at", type=float, metavar="PART", help=text)
    _add("--device", str, "compute device; None is the accelerator if it has what a run needs", parser)
    _add("--memory", str, "device-memory budget", parser)
    _add("--steps", int, "optimizer steps", parser)
    _add("--seconds", float, "training ends after this many seconds at the latest", parser)
    _add("--micro-batches", int, "micro-batches per step", parser)
    _add("--batch-size", int, "windows of text per micro-batch", parser)
    _add("--context", int, "bytes per window", parser)
    _add("--width", int, "hidden states, a multiple of 64", parser)
    _add("--depth", int, "decoder layers", parser)
    _add("--sample-bytes", int, "length of the sample", parser)
    _add("--seed", int, "fixes weights, batches and sample", parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Begins or resumes the demo.

    Returns:
        0 if all it shows holds, 1 if not.

    Raises:
        CheckpointError: If the folder holds no checkpoint to resume, or something else than one to replace.
        OptionError: If an option contradicts the checkpoint.
    """
    # Only what was given on the command line is there: a resumed run has its own.
    given = {f.name: getattr(options, f.name) for f in fields(Recipe) if f.name in options}
    PATH.check_flag("--folder", options.folder)
    with DemoProcesses.joined() as several:
        resumes = options.resume or (several.is_again and Course.exists(options.folder))
        course = Course.resume(options.folder, given) if resumes else Course.begin(Recipe(**given), options.folder)
        several.check(course.recipe.micro_batches)
        several.wait()  # one of them may replace what the others have looked at
        interrupt_at = None if several.is_again else options.interrupt_at
        return 0 if demonstrate(course, interrupt_at=interrupt_at, several=several) else 1


def _add(name: str, kind: Callable[[str], object], text: str, parser: argparse.ArgumentParser) -> None:
    default = getattr(Recipe(), name.removeprefix("--").replace("-", "_"))
    parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=f"{text} (default: {default})")
