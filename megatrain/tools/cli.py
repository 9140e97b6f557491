"""The command line: `megatrain train`, `plan`, `demo`, `doctor`, `verify`, `report`, `--version`.

`--help` answers at once: torch is imported by the command that runs, not by the table of commands.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from megatrain import __version__
from megatrain.base.checks import PATH, count, number
from megatrain.base.garbage import paused_collection
from megatrain.base.sizes import MEMORY
from megatrain.errors import MegatrainError
from megatrain.tools.command_options import OF_COMPILE, Option, add_options, flag, given_options, rule_of
from megatrain.tools.finetune import train_options
from megatrain.tools.sizing import sizing_options
from megatrain.tools.sizing.known_models import check_found, known


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows the program's name; None takes it from the shell.

    Returns:
        The exit status: 0 if all went well, 1 if the command found a fault, 2 if it was used wrongly, 130 if
        it was interrupted.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unknown(unknown, options.flags))
    try:
        return options.run(options)
    except MegatrainError as error:
        print("\n".join([f"megatrain: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads the output has read enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        # If a command has saved something, the interrupt's text says so.
        outcome = str(interrupt) or "nothing was saved, and nothing is still running."
        print(f"\nmegatrain: interrupted; {outcome}", file=sys.stderr)
        return 130


def _train(**given: Any) -> int:
    """Trains, or goes on with a training; returns 0. One that is finished already is left as it is."""
    from megatrain.tools.finetune.pretrained import need_libraries

    if any(name.startswith("lora_") for name in given):
        given["lora"] = True
    options = train_options.TrainOptions(**given)
    check_found(options.model)
    need_libraries(
        "train",
        "transformers",
        "accelerate",
        "datasets",
        "trl",
        *(["peft"] if options.lora else []),
        *([options.report_to] if options.report_to else []),
    )
    # It imports transformers, which is there only now for sure, and takes seconds.
    from megatrain.tools.finetune.training_run import train

    train(options)
    return 0


def _plan(**given: Any) -> int:
    """Plans and prints; returns 0."""
    options = sizing_options.SizingOptions(**given)
    if ":" not in options.config and known(options.config) is None:
        check_found(options.config)
    with paused_collection():  # it imports torch and transformers: a great many objects, which all stay
        from megatrain.tools.sizing.plan_command import print_sizing

    print_sizing(options)
    return 0


def _late(module: str, name: str) -> Callable[..., int]:
    """A function that imports its module, and torch with it, when it runs."""
    return lambda **given: getattr(import_module(module), name)(**given)


_DEMO: Mapping[str, Option] = {
    "folder": Option(PATH, "folder of the checkpoint (default: megatrain-demo)"),
    "resume": Option(None, "continue from the checkpoint"),
    "interrupt_at": Option(
        number(above=0, below=1, example=0.5), "press Ctrl-C after this part of the steps, between 0 and 1", float
    ),
    "device": Option(
        rule_of("megatrain.tracer.spec", "DEVICE_NAME"),
        "compute device (default: the accelerator if it has what a run needs)",
    ),
    "memory": Option(MEMORY, "device-memory budget (default: less than the weights)"),
    "steps": Option(count(1), "training steps (default: about a minute's)", int),
}

_VERIFY: Mapping[str, Option] = {
    "target": Option(
        None, "module:function or path/to/file.py:function; the function returns (model, inputs)", is_position=True
    ),
    **OF_COMPILE,
    **{
        name: Option(rule_of("megatrain.tools.verification.side_by_side", "CALL", name), text, kind)
        for name, text, kind in (
            ("steps", "training steps (default: 2)", int),
            ("seed", "seed of the steps (default: 0)", int),
            ("tolerance", "relative difference that counts as equal (default: by dtype)", float),
        )
    },
    "json": Option(None, "print the report as JSON"),
}

_DOCTOR: Mapping[str, Option] = {
    "device": Option(
        rule_of("megatrain.tracer.spec", "DEVICE"), "device to look at (default: the accelerator, else the CPU)"
    ),
}

_REPORT: Mapping[str, Option] = {
    "target": Option(None, "module:function or file.py:function, which returns (model, inputs)", is_position=True),
    "page": Option(PATH, "the HTML file to write", is_position=True),
    "trace": Option(PATH, "also write the trace for https://ui.perfetto.dev here"),
    "steps": Option(count(1, 10_000), "training steps, of which the last is measured (default: 3)", int),
    **OF_COMPILE,
}

_COMMANDS: Mapping[str, tuple[str, Mapping[str, Option], Callable[..., int]]] = {
    "train": ("fine-tune a Hugging Face model, and go on after an interruption", train_options.OPTIONS, _train),
    "plan": (
        "say what a training step takes on a machine, and how long, without weights",
        sizing_options.OPTIONS,
        _plan,
    ),
    "demo": (
        "train a small language model through the whole compiler, and show what ran",
        _DEMO,
        _late("megatrain.tools.finetune.demo", "demonstrate"),
    ),
    "doctor": (
        "say what this machine has of what a step uses, and what each finding costs",
        _DOCTOR,
        _late("megatrain.tools.sizing.doctor", "run"),
    ),
    "verify": (
        "compare a model with eager PyTorch, and find the first block that differs",
        _VERIFY,
        _late("megatrain.tools.verification.side_by_side", "run"),
    ),
    "report": (
        "draw a training step as planned and as measured, on one page of HTML",
        _REPORT,
        _late("megatrain.tools.reporting.step_report", "run"),
    ),
}
"""What `--help` says, the options, and what runs with those that are given."""


class _Versions(argparse.Action):
    """Prints what a report of a fault needs, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        print(f"megatrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        parser.exit()


# What other trainers, and `megatrain.plan()`, call an option.
_ELSEWHERE = {
    "--device-memory": "--memory",
    "--learning-rate": "--lr",
    "--num-train-epochs": "--epochs",
    "--max-steps": "--steps",
    "--gradient-accumulation-steps": "--accumulate",
    "--per-device-train-batch-size": "--batch",
    "--max-length": "--length",
    "--max-seq-length": "--length",
    "--output-dir": "--out",
    "--save-steps": "--save-every",
    "--warmup-steps": "--warmup",
}


def _unknown(given: Sequence[str], flags: Sequence[str]) -> str:
    """What is said of options that a command doesn't have: the nearest one by spelling, or by another name."""
    name = given[0].partition("=")[0].replace("_", "-")
    meant = [_ELSEWHERE[name]] if _ELSEWHERE.get(name) in flags else difflib.get_close_matches(name, flags, 1)
    return f"unrecognized arguments: {' '.join(given)}" + "".join(f"\n  Did you mean {each}?" for each in meant)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatrain", description="A compiler that trains PyTorch models larger than device memory."
    )
    parser.add_argument("--version", action=_Versions, nargs=0, help="print the versions and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for name, (text, options, run) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add_options(command, options)
        command.set_defaults(flags=[flag(each) for each in options])
        command.set_defaults(run=lambda given, options=options, run=run: run(**given_options(options, given)))
    return parser


if __name__ == "__main__":
    sys.exit(main())
