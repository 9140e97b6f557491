"""FineTuning: what `megatrain train` is asked for, checked before any work."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.checks import PATH, TEXT, Rule, checked, count, number, optional
from megatrain.errors import OptionError
from megatrain.options import CHUNKING, PRECISION
from megatrain.scheduler.builder.build import STEP
from megatrain.sizes import SIZE
from megatrain.tracer.given import DEVICE

LENGTH = 2048
TOKENS_PER_STEP = 16384
EVAL_FRACTION = 0.05
_MOST = 2**31 - 1
_FORMATS = (".jsonl", ".txt")
# Two ways to say the same; each has a default of its own, so both must not be given.
_EITHER = (
    ("steps", "epochs"),
    ("accumulate", "tokens_per_step"),
    ("eval_data", "eval_fraction"),
    ("eval_data", "eval_split"),
    ("eval_split", "eval_fraction"),
)
_OF_DATA_SET = ("data_config", "split", "eval_split")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


RULES: Mapping[str, Rule] = {
    "model": PATH,
    "data": PATH,
    "out": PATH,
    "tokenizer": optional(PATH),
    "lora_rank": count(1, 2**16),
    "lora_alpha": optional(number(above=0, below=math.inf, example=32.0)),
    "lora_dropout": number(least=0, below=1, example=0.05),
    "precision": PRECISION,
    "device": optional(DEVICE),
    "memory": optional(SIZE),
    "block_bytes": optional(SIZE),
    "chunking": CHUNKING,
    "length": optional(count(2, 2**24)),
    "data_config": optional(TEXT),
    "split": optional(TEXT),
    "eval_data": optional(PATH),
    "eval_split": optional(TEXT),
    "eval_fraction": optional(number(least=0, below=1, example=0.05)),
    "epochs": optional(number(above=0, below=10_000, example=1.0)),
    "steps": optional(count(1, _MOST)),
    "batch": count(1, 2**16),
    "accumulate": optional(STEP["micro_batches"]),
    "tokens_per_step": optional(count(1, 2**40)),
    "lr": optional(number(above=0, below=math.inf, example=1e-5)),
    "warmup": optional(count(0, _MOST)),
    "save_every": optional(count(1, _MOST)),
    "seed": count(0, 2**32 - 1),
}


@checked(**RULES)
@dataclass(frozen=True, slots=True)
class FineTuning:
    """What is trained, on which data, for how long, and where it goes.

    Args:
        model: Folder of a Hugging Face model, or its name on the hub; with `from_config` a configuration.
        data: A .jsonl or .txt file; or a data set: a folder, or a name on the hub.
        out: Folder of the trained model and of its checkpoints.
        from_config: The weights are random.
        tokenizer: Folder or name of the tokenizer; None takes the model's.
        lora: Adapters are trained, not the weights.
        lora_rank: Rank of the adapters.
        lora_alpha: Their scale times the rank; None is twice the rank.
        lora_dropout: Dropout before the adapters.
        precision: `"bf16"` or `"fp32"`.
        device: Compute device; None takes the accelerator if it has what a run needs, else the CPU.
        memory: Device-memory budget; None takes what is free, less a reserve.
        block_bytes: Target size of a block's state, for budgets that a whole layer or embedding doesn't fit into.
        chunking: When the head computes its loss in chunks of rows, and layers run in tiles of tokens.
        length: Most tokens of a sequence; None is 2048, or what the model takes if that is less.
        documents: Empty lines of a .txt separate documents.
        data_config: Configuration of the data set; None takes the only one.
        split: Split of the data set; None is `"train"`.
        eval_data: Another file to evaluate with.
        eval_split: Another split of the data set to evaluate with.
        eval_fraction: Fraction of the data that is held out to evaluate with; None is 0.05 if nothing else is there.
        epochs: Passes over the data; None is 1 if there are no `steps`.
        steps: Optimizer steps.
        batch: Sequences in a micro-batch.
        accumulate: Micro-batches in a step.
        tokens_per_step: Tokens in a step; None is 16384 if there is no `accumulate`, less where an epoch had few steps.
        lr: Learning rate at its peak; None is 1e-5, of adapters 2e-4.
        warmup: Steps until the peak; None is 3 of 100, and 0 below 20 steps.
        save_every: Steps between checkpoints; None is a tenth of all steps.
        seed: Fixes the order of the data and all random numbers.

    Raises:
        OptionError: If an option is wrong, or two of them exclude each other.
    """

    model: str
    data: str
    out: str
    from_config: bool = False
    tokenizer: str | None = None
    lora: bool = False
    lora_rank: int = 16
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    precision: str = "bf16"
    device: str | None = None
    memory: int | str | None = None
    block_bytes: int | str | None = None
    chunking: str = "auto"
    length: int | None = None
    documents: bool = False
    data_config: str | None = None
    split: str | None = None
    eval_data: str | None = None
    eval_split: str | None = None
    eval_fraction: float | None = None
    epochs: float | None = None
    steps: int | None = None
    batch: int = 1
    accumulate: int | None = None
    tokens_per_step: int | None = None
    lr: float | None = None
    warmup: int | None = None
    save_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for one, other in _EITHER:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise OptionError(
                    f"{flag(one)} and {flag(other)} are both given.\n  Each says the same in another way.\n"
                    f"  Leave out one of them."
                )
        if self.lora and self.from_config:
            raise OptionError(
                "adapters over random weights are of no use: --lora and --from-config are both given.\n"
                "  An adapter is saved without the weights that it belongs to, and random ones are nowhere.\n"
                "  Leave out one of them."
            )
        if self.is_data_set:
            _check_name(self.data)
        else:
            _check_file(self.data)
            self._check_no_data_set()
        if self.eval_data is not None:
            _check_file(self.eval_data)

    @property
    def is_data_set(self) -> bool:
        """The data is read by the `datasets` library."""
        return Path(self.data).suffix not in _FORMATS and not Path(self.data).is_file()

    @property
    def learning_rate(self) -> float:
        """The rate at its peak."""
        return self.lr if self.lr is not None else 2e-4 if self.lora else 1e-5

    @property
    def alpha(self) -> float:
        """Scale of the adapters, times their rank."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def held_out(self) -> float:
        """The fraction of the data that is held out; 0 if another file or split is evaluated."""
        if self.eval_data is not None or self.eval_split is not None:
            return 0.0
        return EVAL_FRACTION if self.eval_fraction is None else self.eval_fraction

    def _check_no_data_set(self) -> None:
        for name in _OF_DATA_SET:
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{flag(name)} is of a data set, and `{self.data}` is a file.\n"
                    "  A file has no configurations and no splits.\n"
                    f"  Leave {flag(name)} out; --eval names another file to evaluate with."
                )


def check_options(given: Mapping[str, object]) -> None:
    """Checks options of the command, by the names of fields, in the words of the command.

    Raises:
        OptionError: Naming the option as it is written on the command line.
    """
    for name, value in given.items():
        if name in RULES:
            is_position = name in ("model", "data")
            has_default = not is_position and name != "out"
            RULES[name].check_flag(name if is_position else flag(name), value, has_default=has_default)


def flag(name: str) -> str:
    """Returns an option as it is written on the command line."""
    return "--eval" if name == "eval_data" else f"--{name.replace('_', '-')}"


def _check_name(text: str) -> None:
    if not Path(text).is_dir() and (_HUB_NAME.fullmatch(text) is None or text.startswith(".")):
        raise OptionError(
            f"there is no file and no folder `{text}`.\n"
            "  Data is a .jsonl or .txt file, or a data set: a folder, or a name on the hub such as owner/data.\n"
            "  Check the path; it is relative to the current folder."
        )


def _check_file(text: str) -> None:
    path = Path(text)
    if path.suffix not in _FORMATS:
        raise OptionError(
            f"`{text}` is neither a .jsonl nor a .txt file.\n"
            "  Lines of a .jsonl have `text`, `messages`, or `prompt` and `completion`; a .txt is plain text.\n"
            "  Other formats (CSV, Parquet) are read as a data set: give the folder that has the file."
        )
    if not path.is_file():
        raise OptionError(f"there is no file `{text}`.\n  A path is relative to the current folder.\n  Check the path.")
    if path.stat().st_size == 0:
        raise OptionError(f"`{text}` is empty.\n  There must be text to train on.\n  Check what has written the file.")
