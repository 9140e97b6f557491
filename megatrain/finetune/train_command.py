"""`megatrain train`: fine-tuning from the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from megatrain.finetune.pretrained import need_libraries
from megatrain.finetune.train_options import TrainOptions, flag

_KINDS = {"int": int, "float": float, "str": str}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain train` takes."""
    for each in fields(TrainOptions):
        kind, text = TrainOptions.__annotations__[each.name].partition(" ")[0], each.metadata["help"]
        # A default is the class's: only what was given is in the namespace.
        if each.name in ("model", "data"):
            parser.add_argument(each.name, help=text)
        elif kind == "bool":
            parser.add_argument(flag(each.name), action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            options: dict[str, Any] = {"required": True} if each.name == "out" else {"default": argparse.SUPPRESS}
            parser.add_argument(flag(each.name), type=_KINDS[kind], help=text, **options)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Trains, or goes on with a training.

    Returns:
        0; a training that is finished already is left as it is.

    Raises:
        OptionError: If an option is wrong, or a file can't be read.
        CheckpointError: If the folder has the training of other settings.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
        KeyboardInterrupt: Saying what is saved, if something is.
    """
    values = {each.name: getattr(given, each.name) for each in fields(TrainOptions) if each.name in given}
    for each in fields(TrainOptions):
        if each.name in values and each.metadata["rule"] is not None:
            is_position = each.name in ("model", "data")
            name, has_default = each.name if is_position else flag(each.name), not is_position and each.name != "out"
            each.metadata["rule"].check_flag(name, values[each.name], has_default=has_default)
    if any(name.startswith("lora_") for name in values):
        values["lora"] = True
    options = TrainOptions(**values)
    need_libraries("train", "transformers", "accelerate", "datasets", "trl", *(["peft"] if options.lora else []))
    # It imports transformers, which is there only now for sure, and takes seconds.
    from megatrain.finetune.training_run import train

    train(options)
    return 0
