"""SizingOptions: what `megatrain plan` is asked for, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatrain.checks import PATH, Rule, count, one_of, optional
from megatrain.counts import counted
from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.options import COMPILE, PRECISION
from megatrain.planning.advice import Spelling, size
from megatrain.planning.host_plan import DEPTH, LORA, MICRO_BATCH, SEQUENCE
from megatrain.scheduler.builder.build import STEP
from megatrain.sizes import SIZE

ALL = "all"
LENGTH, TOKENS_PER_STEP = 4096, 65536
_OPTIMIZERS: Mapping[str, str] = {
    name.lower(): name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
"""Those of torch by their names in small letters."""

RULES: Mapping[str, Rule] = {
    "config": PATH,
    "hardware": optional(one_of(ALL, *Hardware.presets())),
    "memory": optional(SIZE),
    "host_memory": optional(SIZE),
    "sequence": optional(count(2, 2**24)),
    "tokens_per_step": count(1, 2**40),
    "host_bandwidth": optional(SIZE),
    "micro_batch": optional(count(1, 2**16)),
    "lora": count(0, 2**16),
    "optimizer": one_of(*_OPTIMIZERS),
    "precision": PRECISION,
    "masters": COMPILE["masters"],
    "activations": STEP["activations"],
    "block_bytes": optional(SIZE),
    "chunking": COMPILE["chunking"],
    "largest": optional(one_of(MICRO_BATCH, SEQUENCE, DEPTH)),
    "report": optional(PATH),
    "trace": optional(PATH),
}

IN_COMMAND: Spelling = {
    "device_memory": lambda value: f"--memory {size(value)}",
    "block_bytes": lambda value: f"--block-bytes {size(value)}",
    "micro_batches": lambda value: f"{counted(value, 'micro-batch')} a step",
    "precision": lambda value: f"--precision {value}",
    "masters": lambda value: f"--masters {value}",
    "max_grad_norm": lambda value: "--no-clipping",
    "overlap": lambda value: "" if value else "--no-overlap",
    "activations": lambda value: f"--activations {value}",
    "optimizer": lambda value: f"--optimizer {value.lower()}",
    MICRO_BATCH: lambda value: f"--micro-batch {value}",
    SEQUENCE: lambda value: f"--sequence {value}",
    LORA: lambda value: f"--lora {value}" if value else "no --lora",
}
"""Options of a plan as the command has them."""


@dataclass(frozen=True, slots=True)
class SizingOptions:
    """Which model is planned for which machine.

    Args:
        config: A `config.json`, a folder with one, or `module:function`.
        hardware: A machine of the table, or `"all"`; None plans for `memory` alone.
        memory: Device memory of the step; None is what the machine has, less a reserve.
        host_memory: Memory of the host; None is as much as it takes.
        sequence: Tokens of a sequence; None is 4096, or what the model takes if that is less.
        tokens_per_step: Tokens of a step.
        micro_batch: Sequences in a micro-batch; None takes the number with the shortest step.
        host_bandwidth: Bytes a second that the host's memory reads and writes; None is that of the machine.
        lora: Rank of adapters; 0 trains all weights.
        optimizer: A class of torch.optim, in small letters.
        precision: `"bf16"` or `"fp32"`.
        masters: As for `compile`.
        no_clipping: Gradients aren't clipped.
        no_overlap: Updates run after the backward.
        activations: As for `compile`.
        block_bytes: As for `compile`.
        chunking: As for `compile`.
        why: Reasons are printed.
        alternatives: A table of alternatives is.
        largest: The largest of this size that fits is.
        report: The page on which the step is drawn, or None.
        trace: The file of its trace for Perfetto, or None.

    Raises:
        OptionError: If an option is wrong, or two of them exclude each other.
    """

    config: str
    hardware: str | None = None
    memory: int | str | None = None
    host_memory: int | str | None = None
    sequence: int | None = None
    tokens_per_step: int = TOKENS_PER_STEP
    micro_batch: int | None = None
    host_bandwidth: int | str | None = None
    lora: int = 0
    optimizer: str = "adamw"
    precision: str = "bf16"
    masters: str = "exact"
    no_clipping: bool = False
    no_overlap: bool = False
    activations: str = "auto"
    block_bytes: int | str | None = None
    chunking: str = "auto"
    why: bool = False
    alternatives: bool = False
    largest: str | None = None
    report: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.hardware is None and self.memory is None:
            raise OptionError(
                "there is nothing to plan for.\n  A plan is for a machine, or for so much memory of a device.\n"
                "  Give --hardware rtx-4090 (or all), or --memory 20GiB."
            )
        if self.hardware == ALL and (self.why or self.alternatives or self.largest is not None):
            raise OptionError(
                "--why, --alternatives and --largest are of one plan, and --hardware all has many.\n"
                f"  The machines are {', '.join(Hardware.presets())}.\n  Name one of them with --hardware."
            )
        drawn = "--trace" if self.report is None else "--report"
        if (self.report, self.trace) != (None, None) and self.hardware in (None, ALL):
            raise OptionError(
                f"{drawn} draws the step of one machine in time.\n"
                "  The seconds of its ops follow from the rates of a machine.\n"
                f"  Name one with --hardware, such as rtx-4090; or leave out {drawn}."
            )
        if self.trace is not None and self.report is None:
            raise OptionError("--trace goes with --report.\n  Both draw the same step.\n  Give --report FILE as well.")
        if self.host_bandwidth is not None and self.hardware is None:
            raise OptionError(
                "--host-bandwidth without --hardware says nothing.\n"
                "  Only a plan for a machine has seconds.\n  Name one with --hardware."
            )
        if self.masters == "rounded" and self.precision != "bf16":
            raise OptionError(
                f"--masters rounded and --precision {self.precision} exclude each other.\n"
                "  fp32 parameters are their own masters.\n  Leave out one of them."
            )

    @property
    def torch_optimizer(self) -> str:
        """The name of the optimizer's class."""
        return _OPTIMIZERS[self.optimizer]


def check_options(given: Mapping[str, object]) -> None:
    """Checks options of the command, by the names of fields, in the words of the command.

    Raises:
        OptionError: Naming the option as it is written on the command line.
    """
    for name, value in given.items():
        if name in RULES:
            flag = name if name == "config" else f"--{name.replace('_', '-')}"
            RULES[name].check_flag(flag, value, has_default=name != "config")
