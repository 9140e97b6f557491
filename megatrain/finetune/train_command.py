"""`megatrain train`: fine-tuning from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from megatrain.finetune.fine_tuning import FineTuning, check_options
from megatrain.finetune.libraries import need_libraries
from megatrain.ranks.command_processes import CommandProcesses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `megatrain train` takes."""
    add = parser.add_argument
    add("model", help="folder of a Hugging Face model (config.json, safetensors, tokenizer), or its name on the hub")
    add(
        "data",
        help=".jsonl with `text`, `messages`, or `prompt` and `completion` in each line; .txt; or a data set: a folder "
        "or a name on the hub, with the same columns",
    )
    add("--out", required=True, help="folder of the trained model and of its checkpoints")
    _of_model(parser)
    _of_data(parser)
    _of_steps(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Trains, or goes on with a training.

    Returns:
        0; a training that is finished already is left as it is.

    Raises:
        OptionError: If an option is wrong, a file can't be read, or the folder has the training of other settings.
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
        RanksError: If another process failed; torchrun has started several of them.
        KeyboardInterrupt: Saying what is saved, if something is.
    """
    # Only what was given on the command line is there; the class has the defaults.
    given = {field.name: getattr(options, field.name) for field in fields(FineTuning) if field.name in options}
    if any(name.startswith("lora_") for name in given):
        given["lora"] = True
    with CommandProcesses.joined() as processes:
        tuning = processes.together(lambda: _tuning(given))
        # It imports transformers, which is there only now for sure, and takes seconds.
        from megatrain.finetune.training_run import train

        train(tuning, processes)
    return 0


def _tuning(given: dict[str, Any]) -> FineTuning:
    check_options(given)
    tuning = FineTuning(**given)
    need_libraries(lora=tuning.lora, data_set=tuning.is_data_set)
    return tuning


def _of_model(parser: argparse.ArgumentParser) -> None:
    _flag(parser, "--from-config", "MODEL is a config.json, or a folder with one; the weights are random")
    _add(parser, "--tokenizer", str, "folder of the tokenizer, or its name on the hub (default: the model's)")
    _flag(parser, "--lora", "train adapters of all linear layers, and leave the model's own weights as they are")
    _add(parser, "--lora-rank", int, "rank of the adapters (default: 16)")
    _add(parser, "--lora-alpha", float, "their scale times the rank (default: twice the rank)")
    _add(parser, "--lora-dropout", float, "dropout before the adapters (default: 0)")
    _add(parser, "--precision", str, "bf16, which computes in bf16 over exact fp32 masters, or fp32 (default: bf16)")
    _add(parser, "--device", str, "compute device (default: the accelerator if it has what a run needs, else the CPU)")
    _add(parser, "--memory", str, "device-memory budget, such as 10GiB (default: what is free, less a reserve)")
    _add(parser, "--block-bytes", str, "target size of a block's state, such as 64MiB (default: a repeated module)")
    _add(parser, "--chunking", str, "auto, always or never: chunks of a head's loss, tiles of tokens (default: auto)")


def _of_data(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--length", int, "most tokens of a sequence (default: 2048, or what the model takes if that is less)")
    _flag(parser, "--documents", "empty lines of a .txt separate documents (default: the file is one document)")
    _add(parser, "--data-config", str, "configuration of a data set (default: the only one)")
    _add(parser, "--split", str, "split of a data set (default: train)")
    _add(parser, "--eval", str, "another file, .jsonl or .txt, to evaluate with", "eval_data")
    _add(parser, "--eval-split", str, "another split of a data set, to evaluate with")
    _add(
        parser,
        "--eval-fraction",
        float,
        "fraction of DATA that is held out to evaluate with; 0 for none (default: 0.05)",
    )


def _of_steps(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--epochs", float, "passes over the data (default: 1)")
    _add(parser, "--steps", int, "optimizer steps, in place of epochs")
    _add(parser, "--batch", int, "sequences in a micro-batch (default: 1)")
    _add(parser, "--accumulate", int, "micro-batches in a step, of all processes together")
    _add(
        parser,
        "--tokens-per-step",
        int,
        "tokens in a step of all, in place of --accumulate (default: 16384, or so few that an epoch has 20 steps)",
    )
    _add(parser, "--lr", float, "learning rate at its peak (default: 1e-5; of adapters 2e-4)")
    _add(
        parser, "--warmup", int, "steps until the peak; the rate then falls to 0 (default: 3 of 100; 0 below 20 steps)"
    )
    _add(parser, "--save-every", int, "steps between checkpoints and evaluations (default: a tenth of all steps)")
    _add(parser, "--seed", int, "fixes the order of the data, adapters, dropout and random weights (default: 0)")


def _add(
    parser: argparse.ArgumentParser, name: str, kind: Callable[[str], object], text: str, field: str | None = None
) -> None:
    field = field or name.removeprefix("--").replace("-", "_")
    parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text, dest=field, metavar=name[2:].upper())


def _flag(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
