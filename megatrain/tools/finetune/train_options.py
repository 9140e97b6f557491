"""TrainOptions: the options of `megatrain train`, each with the rule that it keeps and the words of `--help`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatrain.base.checks import PATH, TEXT, Rule, count, number, one_of, optional
from megatrain.base.sizes import MEMORY, SIZE
from megatrain.errors import OptionError
from megatrain.scheduler.step_kind import KIND_RULES
from megatrain.tools.command_options import Option, flag, of_compile

_MOST = 2**31 - 1
# Two ways to say the same; each has a default of its own, so both must not be given.
_EITHER = (
    ("steps", "epochs"),
    ("accumulate", "tokens_per_step"),
    ("eval", "eval_fraction"),
    ("eval", "eval_split"),
    ("eval_split", "eval_fraction"),
)


def _option(default: Any, rule: Rule | Callable[[], Rule] | None, text: str) -> Any:
    return field(default=default, metadata={"rule": rule, "help": text})


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What is trained, on which data, for how long, and where it goes; each field is an option of the command."""

    model: str = _option("", PATH, "folder of a Hugging Face model (config.json, safetensors), or its name on the hub")
    data: str = _option(
        "",
        PATH,
        ".jsonl with `text`, `messages`, `prompt` and `completion`, ShareGPT's `conversations`, or Alpaca's "
        "`instruction` and `output` in each line; .txt; or a data set of the `datasets` library with these columns: a "
        "folder, or a name on the hub",
    )
    out: str = _option("", PATH, "folder of the trained model and of its checkpoints")
    tokenizer: str | None = _option(None, optional(PATH), "folder or name of the tokenizer (default: the model's)")
    lora: bool = _option(False, None, "train adapters of all linear layers, and leave the weights as they are")
    lora_rank: int = _option(16, count(1, 2**16), "rank of the adapters (default: 16)")
    lora_alpha: float | None = _option(
        None, optional(number(above=0, below=math.inf, example=32.0)), "their scale times the rank (default: twice it)"
    )
    lora_dropout: float = _option(0.0, number(least=0, below=1, example=0.05), "dropout before them (default: 0)")
    precision: str = _option("bf16", of_compile("precision"), "bf16, over exact fp32 masters, or fp32 (default: bf16)")
    device: str | None = _option(
        None, of_compile("device"), "compute device (default: the accelerator if it has what a run needs, else the CPU)"
    )
    memory: str | None = _option(None, optional(MEMORY), "device-memory budget (default: what is free, less a reserve)")
    block_bytes: str | None = _option(None, optional(SIZE), "target size of a block's state, such as 64MiB")
    chunking: str = _option(
        "auto", of_compile("chunking"), "auto, always or never: chunks of a head's loss, tiles of tokens"
    )
    optimizer: str = _option(
        "adamw", one_of("adamw", "adamw8bit"), "adamw, or adamw8bit: moments of 2 bytes a parameter (default: adamw)"
    )
    offload: str | None = _option(
        None, optional(PATH), "a folder on a fast disk for the optimizer state that the host has no room for"
    )
    host_memory: str | None = _option(
        None,
        optional(MEMORY),
        "memory of the host for a step (default: what is free; with --offload nine tenths of it)",
    )
    kernels: str = _option("auto", of_compile("kernels"), "auto, eager, graphs (recorded) or inductor (compiled)")
    length: int | None = _option(
        None, optional(count(2, 2**24)), "most tokens of a sequence (default: 2048, or what the model takes if less)"
    )
    lengths: int | None = _option(
        None,
        of_compile("lengths"),
        "pad micro-batches to a multiple of so many tokens, such as 256 (default: to the longest sequence)",
    )
    documents: bool = _option(False, None, "empty lines of a .txt separate documents (default: it is one document)")
    data_config: str | None = _option(None, optional(TEXT), "configuration of a data set (default: the only one)")
    split: str | None = _option(None, optional(TEXT), "split of a data set (default: train)")
    eval: str | None = _option(None, optional(PATH), "another file, .jsonl or .txt, to evaluate with")
    eval_split: str | None = _option(None, optional(TEXT), "another split of a data set, to evaluate with")
    eval_fraction: float | None = _option(
        None, optional(number(least=0, below=1, example=0.05)), "fraction that is held out; 0: none (default: 0.05)"
    )
    epochs: float | None = _option(
        None, optional(number(above=0, below=10_000, example=1.0)), "passes over the data (default: 1)"
    )
    steps: int | None = _option(None, optional(count(1, _MOST)), "optimizer steps, in place of epochs")
    batch: int | None = _option(
        None,
        optional(count(1, 2**16)),
        "sequences in a micro-batch (default: the shortest step's on a card; 1 on the CPU and with --accumulate)",
    )
    accumulate: int | None = _option(None, optional(KIND_RULES["micro_batches"]), "micro-batches in a step")
    tokens_per_step: int | None = _option(
        None,
        optional(count(1, 2**40)),
        "tokens in a step, in place of --accumulate (default: 16384, or so few that an epoch has 20 steps)",
    )
    lr: float | None = _option(
        None,
        optional(number(above=0, below=math.inf, example=1e-5)),
        "learning rate at its peak (default: 1e-5; of adapters 2e-4)",
    )
    warmup: int | None = _option(
        None, optional(count(0, _MOST)), "steps until the peak (default: 3 of 100; 0 below 20 steps)"
    )
    save_every: int | None = _option(
        None, optional(count(1, _MOST)), "steps between checkpoints and evaluations (default: a tenth of all)"
    )
    report_to: str | None = _option(
        None, optional(one_of("tensorboard", "wandb", "trackio", "mlflow")),
        "also log losses there, by its installed library (losses.jsonl in the folder has them always)",
    )  # fmt: skip
    seed: int = _option(0, count(0, 2**32 - 1), "fixes the order of the data, adapters and dropout (default: 0)")

    def __post_init__(self) -> None:
        for one, other in _EITHER:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise OptionError(
                    f"{flag(one)} and {flag(other)} are both given.\n  Each says the same in another way.\n"
                    f"  Leave out one of them."
                )
        if Path(self.model).is_file():
            raise OptionError(
                f"`{self.model}` is a file, and a model is a folder.\n  A folder has config.json, the weights as "
                "safetensors, and the tokenizer.\n  Give the folder."
            )
        is_file = Path(self.data).suffix in (".jsonl", ".txt")
        for path in filter(None, (self.data if is_file else None, self.eval)):
            if not Path(path).is_file():
                raise OptionError(
                    f"there is no file `{path}`.\n  A path is relative to the current folder.\n  Check the path."
                )
        of_sets = [flag(name) for name in ("data_config", "split", "eval_split") if getattr(self, name) is not None]
        if is_file and of_sets:
            raise OptionError(
                f"{of_sets[0]} is of a data set, and `{self.data}` is a file.\n  A file has no configurations and no "
                f"splits.\n  Leave {of_sets[0]} out; --eval names another file to evaluate with."
            )


_KINDS = {"int": int, "float": float, "bool": bool, "str": str}
OPTIONS: Mapping[str, Option] = {
    each.name: Option(
        each.metadata["rule"],
        each.metadata["help"],
        _KINDS[TrainOptions.__annotations__[each.name].partition(" ")[0]],
        is_needed=each.name == "out",
        is_position=each.name in ("model", "data"),
    )
    for each in fields(TrainOptions)
}
