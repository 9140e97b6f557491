"""The command line: `megatrain train`, `plan`, `demo`, `verify`, `report`, `--version`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

import torch

from megatrain import __version__, demo
from megatrain.errors import MegatrainError
from megatrain.finetune import train_command as train_command
from megatrain.reporting import report_command as report_command
from megatrain.sizing import plan_command as plan_command
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatrain", description="A compiler that trains PyTorch models larger than device memory."
    )
    # A report of a fault needs all three.
    versions = f"megatrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions, help="print the versions and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    train_command.add_arguments(
        commands.add_parser("train", help="fine-tune a Hugging Face model, and go on after an interruption")
    )
    plan_command.add_arguments(
        commands.add_parser("plan", help="say what a training step takes on a machine, and how long, without weights")
    )
    demo.add_arguments(
        commands.add_parser("demo", help="train a small language model through the whole compiler, and show what ran")
    )
    verify_command.add_arguments(
        commands.add_parser("verify", help="compare a model with eager PyTorch, and find the first block that differs")
    )
    report_command.add_arguments(
        commands.add_parser("report", help="draw a training step as planned and as measured, on one page of HTML")
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
