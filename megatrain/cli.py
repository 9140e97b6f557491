"""The command line: `megatrain train`, `plan`, `demo`, `verify`, `report`, `--version`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatrain import __version__, demo
from megatrain.command_options import Option, add_options, given_options
from megatrain.errors import MegatrainError
from megatrain.finetune import train_options
from megatrain.finetune.pretrained import need_libraries
from megatrain.finetune.train_options import TrainOptions
from megatrain.reporting import report_command
from megatrain.sizing import plan_command, sizing_options
from megatrain.verification import command as verify_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows the program's name; None takes it from the shell.

    Returns:
        The exit status: 0 if all went well, 1 if the command found a fault, 2 if it was used wrongly, 130 if
        it was interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except MegatrainError as error:
        print("\n".join([f"megatrain: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        # If a command has saved something, the interrupt's text says so.
        outcome = str(interrupt) or "nothing was saved, and nothing is still running."
        print(f"\nmegatrain: interrupted; {outcome}", file=sys.stderr)
        return 130


def _train(**given: Any) -> int:
    """Trains, or goes on with a training; returns 0. One that is finished already is left as it is."""
    if any(name.startswith("lora_") for name in given):
        given["lora"] = True
    options = TrainOptions(**given)
    need_libraries("train", "transformers", "accelerate", "datasets", "trl", *(["peft"] if options.lora else []))
    # It imports transformers, which is there only now for sure, and takes seconds.
    from megatrain.finetune.training_run import train

    train(options)
    return 0


_COMMANDS: Mapping[str, tuple[str, Mapping[str, Option], Callable[..., int]]] = {
    "train": ("fine-tune a Hugging Face model, and go on after an interruption", train_options.OPTIONS, _train),
    "plan": (
        "say what a training step takes on a machine, and how long, without weights",
        sizing_options.OPTIONS,
        plan_command.run,
    ),
    "demo": (
        "train a small language model through the whole compiler, and show what ran",
        demo.OPTIONS,
        demo.demonstrate,
    ),
    "verify": (
        "compare a model with eager PyTorch, and find the first block that differs",
        verify_command.OPTIONS,
        verify_command.run,
    ),
    "report": (
        "draw a training step as planned and as measured, on one page of HTML",
        report_command.OPTIONS,
        report_command.run,
    ),
}
"""What `--help` says, the options, and what runs with those that are given."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatrain", description="A compiler that trains PyTorch models larger than device memory."
    )
    # A report of a fault needs all three.
    versions = f"megatrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions, help="print the versions and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for name, (text, options, run) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add_options(command, options)
        command.set_defaults(run=lambda given, options=options, run=run: run(**given_options(options, given)))
    return parser


if __name__ == "__main__":
    sys.exit(main())
