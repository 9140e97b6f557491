"""Limits: what is given for the plans of a model; the options of compile(), checked before any work."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from megatrain.base.checks import PATHS, Rule, count, one_of, optional
from megatrain.base.sizes import MEMORY, SIZE, format_bytes, parse_bytes
from megatrain.device import HOST, Device
from megatrain.errors import OpaqueModelWarning, OptionError, TooSmallError, TraceError
from megatrain.files.replace import present
from megatrain.files.weight_files import WeightFiles, read_paths
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import HARDWARE, machine_of
from megatrain.optim.masters.registry import Kind
from megatrain.passes.measured_runs import launch_graph_bytes
from megatrain.passes.pipeline import PASSES, Rewrite
from megatrain.passes.program import Program
from megatrain.scheduler.builder.build import STEP
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.spec import DEVICE, EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL
from megatrain.tracer.traced import TracedModule

PRECISION = replace(
    one_of("fp32", "bf16"),
    # The nearest word would be fp32.
    nearest=lambda value: (
        '{name}="bf16", which needs no scaling of the loss; fp16 isn\'t offered' if value in ("fp16", "half") else None
    ),
)
TRANSFER = one_of("auto", "copy", "bind")
CHUNKING = one_of("auto", "always", "never")
OPAQUE = ("warn", "refuse", "allow")
KERNELS = one_of("auto", "eager", "graphs", "inductor")
COMPILE: Mapping[str, Rule] = {
    "model": MODEL,
    "device": optional(DEVICE),
    "memory": optional(MEMORY),
    "precision": PRECISION,
    "activations": STEP["activations"],
    "transfer": TRANSFER,
    "block_bytes": optional(SIZE),
    "example_args": EXAMPLE_ARGS,
    "example_kwargs": EXAMPLE_KWARGS,
    "weights": optional(PATHS),
    "masters": one_of("exact", "rounded"),
    "opaque": one_of(*OPAQUE),
    "passes": PASSES,
    "chunking": CHUNKING,
    "kernels": KERNELS,
    "hardware": optional(HARDWARE),
    "lengths": optional(count(2, 2**24, 1024)),
}
"""What the options of `compile` may be, one by one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is given for the plans of a model: sizes are bytes, a machine is its rates.

    Args:
        device: Compute device.
        device_memory: Bytes that a schedule may take of it; None for what is free before the first schedule.
        precision: `"fp32"` or `"bf16"`.
        masters: Masters of bf16 parameters: `"exact"` or `"rounded"`.
        activations: What happens to saved values.
        transfer: `"copy"` or `"bind"`.
        block_bytes: Target bytes of a block's state, or None.
        passes: The user's own rewrites of captured graphs.
        chunking: When heads compute their losses in chunks of rows, and other calls run in tiles of tokens.
        hardware: The machine whose step is to be short; None weighs copies and compute as a usual one does.
        kernels: What computes a block: `"eager"`, `"graphs"` or `"inductor"`; or `"auto"`, eager's kernels launched one
            by one or, as with `"graphs"`, by one call for each block, as the plan of a step or call says.
        most_result_bytes: Bytes of kernels' results that may be kept for a backward; None is any number.
        updates_there: Whether the device may update blocks, where memory is left.
        least_spared_bytes: Bytes of the host that blocks which the device updates must spare.
        weights: Files and folders with the model's state, or None.
        opaque: What happens if the model is one opaque block: `"warn"`, `"refuse"` or `"allow"`.
        lengths: Calls have a multiple of so many tokens in a row; None leaves them as they are.
        most_park_bytes: Bytes of the host that parked values may take; others go on to a file. None is any number.
        filed: Bytes of optimizer state that may be in a file between the host's updates, by the key of the parameter.
        least_filed_bytes: Bytes of the host that state in a file must spare, the buffers for it deducted.
    """

    device: Device = HOST
    device_memory: int | None = None
    precision: str = "fp32"
    masters: str = "exact"
    activations: str = "auto"
    transfer: str = "copy"
    block_bytes: int | None = None
    passes: tuple[Rewrite, ...] = ()
    chunking: str = "auto"
    hardware: Hardware | None = None
    kernels: str = "eager"
    most_result_bytes: int | None = None
    updates_there: bool = False
    least_spared_bytes: int = 0
    weights: tuple[Path, ...] | None = None
    opaque: str = "warn"
    lengths: int | None = None
    most_park_bytes: int | None = None
    filed: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    least_filed_bytes: int = 0

    @property
    def master_kind(self) -> Kind:
        """Kind of masters: `"whole"`, which are the parameters themselves, as precision is fp32; or those asked for."""
        return "whole" if self.precision == "fp32" else "rounded" if self.masters == "rounded" else "exact"

    @property
    def launching_each(self) -> Self:
        """The same for a plan with eager's kernels, launched one by one."""
        return replace(self, kernels="eager")

    @property
    def recording(self) -> Self:
        """The same for a plan with recorded kernels, which retain no graph."""
        return replace(
            self, kernels="graphs", activations="recompute" if self.activations == "auto" else self.activations
        )

    @contextmanager
    def memory_for(self, programs: Iterable[Program], *, records: bool) -> Generator[int | None]:
        """Gives the bytes that a schedule of these programs may take: recordings of kernels take the rest.

        Args:
            programs: What runs.
            records: Whether kernels are recorded.

        Raises:
            TooSmallError: If the body does; with what recordings take.
        """
        budget = self.device_memory
        taken = launch_graph_bytes(programs) if records else 0
        if budget is None or not taken:
            yield budget
            return
        try:
            yield max(0, budget - taken)
        except TooSmallError as error:
            text = f"{error.text}\n  Recorded kernels take {format_bytes(taken)} of the {format_bytes(budget)}."
            raise TooSmallError(text, error.least_bytes, [*error.helps, 'kernels="eager"']) from None

    def resolved(self, hardware: Hardware | str | None) -> Self:
        """Resolves the options of `compile`, each checked alone.

        Afterwards only `activations` can be `"auto"` and, where kernels can be recorded, `kernels`.

        Raises:
            OptionError: If two of them exclude each other; if the device lacks something, or has less memory.
        """
        device, transfer = self.device, self.transfer
        check_masters(self.masters, self.precision)
        found = self.with_kernels(device)
        if transfer == "bind" and not device.can_bind:
            raise OptionError(
                f'transfer="bind" needs the compute device to be the host, but it is {device}.\n'
                '  Weights are used in place, in host memory.\n  Use transfer="copy" or "auto".'
            )
        _check_budget(self.device_memory, device)
        if transfer == "auto":
            # A budget on the host is a rehearsal of a device: only copies into slots can respect it.
            transfer = "bind" if device.can_bind and self.device_memory is None else "copy"
        machine = None if hardware is None else machine_of(hardware, device)
        return replace(found, transfer=transfer, hardware=machine)

    def with_kernels(self, device: Device | None) -> Self:
        """The same once it is known what computes blocks.

        Args:
            device: The device; None for a card that isn't there, which can do everything.

        Raises:
            OptionError: If the device can't do what `kernels` says, or `activations` excludes it.
        """
        if self.kernels == "inductor":
            if device is not None and not device.has_inductor:
                raise OptionError(
                    f'kernels="inductor" makes no kernels for {device}.\n  Inductor compiles for CPU and CUDA.\n'
                    "  Leave kernels out: eager's kernels run everywhere."
                )
            return self
        if self.kernels == "graphs":
            _check_graphs(device, self.activations)
            return self.recording
        can_record = (device is None or device.has_launch_graphs) and self.activations != "keep"
        return self if can_record else replace(self, kernels="eager")


def given_bytes(size: int | str | None, name: str) -> int | None:
    """Reads the bytes of an option that may be left out.

    Raises:
        OptionError: If it is no size.
    """
    return None if size is None else parse_bytes(size, name)


def given_paths(weights: WeightFiles | None) -> tuple[Path, ...] | None:
    """The files that are given; of a save that was ended between its two renames, those next to the final place."""
    return None if weights is None else tuple(present(path) for path in read_paths(weights))


def _check_graphs(device: Device | None, activations: str) -> None:
    if device is not None and not device.has_launch_graphs:
        raise OptionError(
            f'kernels="graphs" is impossible on {device}.\n'
            "  CUDA graphs launch many kernels of a GPU at once; other devices have none, nor has a GPU whose memory "
            "another allocator gives than torch's own (PYTORCH_ALLOC_CONF).\n"
            "  Leave kernels out: eager's kernels run everywhere."
        )
    if activations == "keep":
        raise OptionError(
            'kernels="graphs" with activations="keep" is impossible.\n'
            "  Recorded kernels compute a forward again in the backward, and retain no graph.\n"
            "  Leave one of the two out."
        )


def check_masters(masters: str, precision: str) -> None:
    """Refuses a kind of masters for parameters that have none.

    Raises:
        OptionError: With both ways out.
    """
    if masters == "rounded" and precision != "bf16":
        raise OptionError(
            'masters="rounded" needs precision="bf16".\n'
            "  The option says how updates of bf16 parameters are rounded; fp32 parameters are their own masters.\n"
            '  Give precision="bf16" as well, or leave masters out.'
        )


def _check_budget(budget: int | None, device: Device) -> None:
    """Refuses a budget that no state of the device could meet; on the host a budget is a rehearsal of any device."""
    if budget is None or device.can_bind:
        return
    total = device.memory().total
    if budget > total:
        raise OptionError(
            f"memory={format_bytes(budget)} is more than {device} has: {format_bytes(total)}.\n"
            "  The budget bounds what blocks, activations and gradients take of the device's memory.\n"
            "  Give at most that, or leave memory= out to take what is free."
        )


def check_opaque(traced: TracedModule, opaque: str, heard: set[str]) -> None:
    """Warns of a capture whose outermost module is opaque, or refuses it.

    Args:
        traced: The capture.
        opaque: One of `OPAQUE`.
        heard: Reasons of earlier warnings; this reason is added.

    Raises:
        TraceError: If `opaque` says so.
    """
    targets = (node.target for node in traced.graph.nodes)
    reason = next((t.reason for t in targets if isinstance(t, Opaque) and not t.name), None)
    if reason is None or opaque == "allow" or (opaque == "warn" and reason in heard):
        return
    heard.add(reason)
    text = (
        f"the whole model is one opaque block: it {reason}.\n"
        "  No graph can repeat this code: the outermost module runs its own code, and all weights must fit on the "
        "device.\n"
        "  Move this code into an inner module, or out of the model"
    )
    if opaque == "refuse":
        raise TraceError(f"{text}.")
    warnings.warn(f'{text}; opaque="allow" silences this warning.', OpaqueModelWarning, stacklevel=2)
