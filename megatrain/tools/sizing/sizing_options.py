"""SizingOptions: what `megatrain plan` is asked for, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatrain.base.checks import PATH, Rule, count, one_of, optional
from megatrain.base.sizes import MEMORY, SIZE
from megatrain.errors import OptionError
from megatrain.hardware.presets import PRESETS
from megatrain.tools.command_options import Option, flag, of_compile

ALL = "all"
LENGTH, TOKENS_PER_STEP = 4096, 65536


def _optimizers() -> Mapping[str, str]:
    """Names of optimizers by these in small letters."""
    from megatrain.optim.need import names

    return {name.lower(): name for name in names()}


def _of(
    default: object,
    rule: Rule | Callable[[], Rule] | None,
    text: str,
    kind: type = str,
    *,
    is_position: bool = False,
    alone: Any = None,
) -> Any:
    option = Option(rule, text, kind, is_position=is_position, alone=alone)
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, slots=True)
class SizingOptions:
    """Which model is planned for which machine.

    Raises:
        OptionError: If two options exclude each other.
    """

    config: str = _of(
        "", PATH, "a well-known model such as Qwen/Qwen3-8B, config.json, a folder with one, or module:function "
        "(or file.py:function), which returns a model, or (model, inputs); no weights are read", is_position=True,
    )  # fmt: skip
    hardware: str | None = _of(
        None, optional(one_of(ALL, *PRESETS)), f"a machine such as rtx-4090, or {ALL} for a table of all"
    )
    memory: int | str | None = _of(
        None, optional(MEMORY), "device memory of a step (default: the machine's, less a reserve)"
    )
    host_memory: int | str | None = _of(
        None, optional(MEMORY), "memory of the host, such as 128GiB (default: as much as it takes)"
    )
    sequence: int | None = _of(
        None, optional(count(2, 2**24)),
        f"tokens of a sequence (default: {LENGTH}, or what the model takes if that is less)", int,
    )  # fmt: skip
    tokens_per_step: int = _of(TOKENS_PER_STEP, count(1, 2**40), f"tokens of a step (default: {TOKENS_PER_STEP})", int)
    micro_batch: int | None = _of(
        None, optional(count(1, 2**16)),
        "sequences in a micro-batch (default: those with the shortest step that fits)", int,
    )  # fmt: skip
    host_bandwidth: int | str | None = _of(
        None, optional(SIZE), "what the host's memory reads and writes in a second, such as 400GB"
    )
    disk_bandwidth: int | str | None = _of(
        None,
        optional(SIZE),
        "what the disk reads in a second, such as 7GB, where weights or optimizer state are in files",
    )
    disk_rating: int | str | None = _of(
        None, optional(SIZE), "what may be written to the drive in its life (TBW), such as 1200TB"
    )
    locked_memory: int | str | None = _of(
        None, optional(MEMORY), "memory that the host's system page-locks: 1GiB on WSL2, half of all on Windows "
        "(default: all)",
    )  # fmt: skip
    lora: int = _of(
        0, count(0, 2**16),
        "train adapters of this rank (16, if none is given) on all linear layers, and leave the model's own weights",
        int, alone=16,
    )  # fmt: skip
    optimizer: str = _of(
        "adamw", lambda: one_of(*_optimizers()), "an optimizer of torch.optim, or adamw8bit (default: adamw)"
    )
    precision: str = _of(
        "bf16", of_compile("precision"), "bf16, which computes in bf16 over fp32 masters, or fp32 (default: bf16)"
    )
    masters: str = _of(
        "exact", of_compile("masters"), "exact, or rounded, which takes 2 bytes a parameter less (default: exact)"
    )
    offload: bool = _of(
        False, None, "the optimizer's state is in a file between updates, and memory has that of two blocks"
    )
    no_clipping: bool = _of(False, None, "gradients aren't clipped by their norm, so updates don't wait for it")
    no_overlap: bool = _of(False, None, "updates run after the backward")
    activations: str = _of("auto", of_compile("activations"), "auto, keep, recompute or offload (default: auto)")
    block_bytes: int | str | None = _of(
        None, optional(SIZE), "target size of a block's state, such as 64MiB (default: a repeated module)"
    )
    chunking: str = _of(
        "auto",
        of_compile("chunking"),
        "auto, always or never: chunks of a head's loss, tiles of tokens (default: auto)",
    )
    kernels: str = _of(
        "auto", of_compile("kernels"),
        "eager, graphs (recorded), inductor (compiled), or auto: the faster of the first two (default: auto)",
    )  # fmt: skip
    why: bool = _of(False, None, "also say why the plan is as it is, and what 1 GiB more would buy")
    alternatives: bool = _of(False, None, "also print other budgets, micro-batches, precisions and updates")
    largest: str | None = _of(
        None, optional(one_of("micro_batch", "sequence", "depth")),
        "also find the largest micro_batch, sequence or depth that fits",
    )  # fmt: skip
    report: str | None = _of(None, optional(PATH), "also draw the step on one page of HTML, this file")
    trace: str | None = _of(None, optional(PATH), "also write its trace for https://ui.perfetto.dev here")

    def __post_init__(self) -> None:
        if self.hardware is None and self.memory is None:
            raise OptionError(
                "there is nothing to plan for.\n  A plan is for a machine, or for so much memory of a device.\n"
                "  Give --hardware rtx-4090 (or all), or --memory 20GiB."
            )
        if self.hardware == ALL and (self.why or self.alternatives or self.largest is not None):
            raise OptionError(
                "--why, --alternatives and --largest are of one plan, and --hardware all has many.\n"
                f"  The machines are {', '.join(PRESETS)}.\n  Name one of them with --hardware."
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
        for name in ("host_bandwidth", "disk_bandwidth", "disk_rating", "locked_memory"):
            if getattr(self, name) is not None and self.hardware is None:
                raise OptionError(
                    f"{flag(name)} without --hardware says nothing.\n"
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
        return _optimizers()[self.optimizer]


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(SizingOptions)}
