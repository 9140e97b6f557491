"""`megatrain plan`: the memory and the time of a training step, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields

from megatrain.sizing.sized import print_sizing
from megatrain.sizing.sizing_options import ALL, SizingOptions, check_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain plan` takes."""
    parser.add_argument(
        "config",
        help="config.json of a Hugging Face model, a folder with one, or module:function (or file.py:function), which "
        "returns a model, or (model, inputs); no weights are read",
    )
    _add(parser, "--hardware", str, f"a machine such as rtx-4090, or {ALL} for a table of all")
    _add(parser, "--memory", str, "device memory of a step (default: the machine's, less a reserve)")
    _add(parser, "--host-memory", str, "memory of the host, such as 128GiB (default: as much as it takes)")
    _add(parser, "--sequence", int, "tokens of a sequence (default: 4096, or what the model takes if that is less)")
    _add(parser, "--tokens-per-step", int, "tokens of a step (default: 65536)")
    _add(parser, "--micro-batch", int, "sequences in a micro-batch (default: those with the shortest step that fits)")
    _add(parser, "--host-bandwidth", str, "what the host's memory reads and writes in a second, such as 400GB")
    _add(parser, "--lora", int, "train adapters of this rank on all linear layers, and leave the model's own weights")
    _add(parser, "--optimizer", str, "an optimizer of torch.optim (default: adamw)")
    _add(parser, "--precision", str, "bf16, which computes in bf16 over fp32 masters, or fp32 (default: bf16)")
    _add(parser, "--masters", str, "exact, or rounded, which takes 2 bytes a parameter less (default: exact)")
    _flag(parser, "--no-clipping", "gradients aren't clipped by their norm, so updates don't wait for it")
    _flag(parser, "--no-overlap", "updates run after the backward")
    _add(parser, "--activations", str, "auto, keep, recompute or offload (default: auto)")
    _add(parser, "--block-bytes", str, "target size of a block's state, such as 64MiB (default: a repeated module)")
    _add(parser, "--chunking", str, "auto, always or never: chunks of a head's loss, tiles of tokens (default: auto)")
    _flag(parser, "--why", "also say why the plan is as it is, and what 1 GiB more would buy")
    _flag(parser, "--alternatives", "also print other budgets, micro-batches, precisions and updates")
    _add(parser, "--largest", str, "also find the largest micro_batch, sequence or depth that fits")
    _add(parser, "--report", str, "also draw the step on one page of HTML, this file")
    _add(parser, "--trace", str, "also write its trace for https://ui.perfetto.dev here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plans, and prints the plan.

    Returns:
        0.

    Raises:
        OptionError: If an option is wrong, or the model can't be made.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
    """
    # Only what was given on the command line is there; the class has the defaults.
    given = {field.name: getattr(options, field.name) for field in fields(SizingOptions) if field.name in options}
    check_options(given)
    print_sizing(SizingOptions(**given))
    return 0


def _add(parser: argparse.ArgumentParser, name: str, kind: Callable[[str], object], text: str) -> None:
    field = name.removeprefix("--").replace("-", "_")
    parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text, dest=field, metavar=name[2:].upper())


def _flag(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
