"""The options of compile(), read and checked before any work."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatrain.checks import PATHS, Rule, one_of, optional
from megatrain.device import Device, usable
from megatrain.errors import OpaqueModelWarning, OptionError, TooSmallError, TraceError
from megatrain.files.replace import present
from megatrain.files.weight_files import WeightFiles, read_paths
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import HARDWARE, machine_of
from megatrain.optim.masters.registry import Kind
from megatrain.passes.measuring.runs import launch_graph_bytes
from megatrain.passes.pipeline import PASSES, Rewrite
from megatrain.passes.program import Program
from megatrain.scheduler.builder.build import STEP
from megatrain.sizes import SIZE, format_bytes, parse_bytes
from megatrain.tracer.recording.opaque import Opaque
from megatrain.tracer.spec import DEVICE, EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL
from megatrain.tracer.traced import TracedModule

PRECISION = one_of("fp32", "bf16")
TRANSFER = one_of("auto", "copy", "bind")
CHUNKING = one_of("auto", "always", "never")
OPAQUE = ("warn", "refuse", "allow")
KERNELS = one_of("eager", "graphs", "inductor")
COMPILE: Mapping[str, Rule] = {
    "model": MODEL,
    "device": optional(DEVICE),
    "memory": optional(SIZE),
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
}
"""What the options of `compile` may be, one by one."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options, resolved: only `activations` can still be "auto".

    Args:
        device: Compute device.
        memory: Device-memory budget in bytes, as given; None for what is free before the first schedule.
        precision: `"fp32"` or `"bf16"`.
        activations: What happens to saved values.
        transfer: `"copy"` or `"bind"`.
        block_bytes: Target bytes of a block's state, or None.
        weights: Files and folders with the model's state, or None.
        masters: Kind of masters of bf16 parameters: `"whole"` (none, as precision is fp32), `"exact"` or `"rounded"`.
        opaque: What happens if the model is one opaque block: `"warn"`, `"refuse"` or `"allow"`.
        passes: The user's own rewrites of captured graphs.
        hardware: The machine for which training steps are planned; None weighs copies and compute as a usual one does.
        chunking: When heads compute their losses in chunks of rows, and other calls run in tiles of tokens.
        kernels: What computes a block: `"eager"`, `"graphs"` or `"inductor"`.
    """

    device: Device
    memory: int | None
    precision: str
    activations: str
    transfer: str
    block_bytes: int | None
    weights: tuple[Path, ...] | None = None
    masters: Kind = "whole"
    opaque: str = "warn"
    passes: tuple[Rewrite, ...] = ()
    hardware: Hardware | None = None
    chunking: str = "auto"
    kernels: str = "eager"

    @property
    def keeps_results(self) -> bool:
        """Whether results of a block's kernels may be kept for its backward: other kernels than eager's return none."""
        return self.kernels == "eager"

    @contextmanager
    def memory_for(self, budget: int, programs: Iterable[Program]) -> Generator[int]:
        """Gives the bytes of a budget that a schedule of these programs may take: recordings of kernels take the rest.

        Raises:
            TooSmallError: If the body does; with what recordings take.
        """
        taken = launch_graph_bytes(programs) if self.kernels == "graphs" else 0
        try:
            yield max(0, budget - taken)
        except TooSmallError as error:
            if not taken:
                raise
            text = f"{error.text}\n  Recorded kernels take {format_bytes(taken)} of the {format_bytes(budget)}."
            raise TooSmallError(text, error.least_bytes, [*error.helps, 'kernels="eager"']) from None

    @staticmethod
    def read(
        device: Device | torch.device | str | None,
        memory: int | str | None,
        precision: str,
        activations: str,
        transfer: str,
        block_bytes: int | str | None,
        weights: WeightFiles | None = None,
        masters: str = "exact",
        opaque: str = "warn",
        passes: Sequence[Rewrite] = (),
        hardware: Hardware | str | None = None,
        chunking: str = "auto",
        kernels: str = "eager",
    ) -> Options:
        """Resolves the options of `compile`; each option has been checked alone.

        Raises:
            OptionError: If two of them exclude each other; if the device isn't there, lacks something, or has less
                memory.
        """
        target = usable(device)
        check_masters(masters, precision)
        if kernels == "inductor" and not target.has_inductor:
            raise OptionError(
                f'kernels="inductor" makes no kernels for {target}.\n  Inductor compiles for CPU and CUDA.\n'
                '  Leave kernels out: "eager" runs everywhere.'
            )
        if kernels == "graphs":
            _check_graphs(target, activations)
            activations = "recompute" if activations == "auto" else activations
        if transfer == "bind" and not target.can_bind:
            raise OptionError(
                f'transfer="bind" needs the compute device to be the host, but it is {target}.\n'
                '  Weights are used in place, in host memory.\n  Use transfer="copy" or "auto".'
            )
        budget = None if memory is None else parse_bytes(memory, "memory")
        _check_budget(budget, target)
        if transfer == "auto":
            # A budget on the host is a rehearsal of a device: only copies into slots can respect it.
            transfer = "bind" if target.can_bind and budget is None else "copy"
        size = None if block_bytes is None else parse_bytes(block_bytes, "block_bytes")
        # If a save was ended between its two renames, the checkpoint is next to its final place.
        paths = None if weights is None else tuple(present(path) for path in read_paths(weights))
        kind: Kind = "whole" if precision == "fp32" else "rounded" if masters == "rounded" else "exact"
        machine = None if hardware is None else machine_of(hardware, target)
        if machine is not None and kernels == "graphs":
            machine = replace(machine, issue_s=0.0)  # blocks whose kernels Python launches one by one have few
        return Options(
            target,
            budget,
            precision,
            activations,
            transfer,
            size,
            paths,
            kind,
            opaque,
            tuple(passes),
            machine,
            chunking,
            kernels,
        )


def _check_graphs(device: Device, activations: str) -> None:
    if not device.has_launch_graphs:
        raise OptionError(
            f'kernels="graphs" is impossible on {device}.\n'
            "  CUDA graphs launch many kernels of a GPU at once; other devices have none, nor has a GPU whose memory "
            "another allocator gives than torch's own (PYTORCH_ALLOC_CONF).\n"
            '  Leave kernels out: "eager" runs everywhere.'
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
