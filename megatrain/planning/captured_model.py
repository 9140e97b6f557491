"""captured(): a model as a program, without its weights: the capture of a plan."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from megatrain.device import Device
from megatrain.interrupts import Interrupts
from megatrain.options import check_opaque
from megatrain.passes.measuring.known_costs import KnownCosts
from megatrain.passes.pipeline import Rewrite
from megatrain.passes.program import Program
from megatrain.passes.rewrites.loss_only import loss_only
from megatrain.planning.host_plan import narrow_entries
from megatrain.planning.step_programs import Pieces, StepPrograms, lowered_for, undisturbed
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.capture.sandbox import swapped_state
from megatrain.tracer.inventory import inventory
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule


def captured(
    model: nn.Module,
    arguments: Arguments,
    precision: str,
    block_bytes: int | None,
    passes: Sequence[Rewrite],
    chunking: str,
    device: Device,
    *,
    is_own_loss: bool,
    costs: KnownCosts,
) -> tuple[TracedModule, StepPrograms]:
    """Captures a call and cuts it into blocks; model and generators stay as they were.

    Args:
        model: May be on meta.
        arguments: Of the call.
        precision: With `"bf16"`, fp32 weights are replaced by stand-ins without values.
        block_bytes: As in `lower`.
        passes: The user's rewrites.
        chunking: As in `compile`.
        device: Whose layout of weights counts.
        is_own_loss: Whether the step differentiates the model's own loss, and needs no other result.
        costs: Known ones of templates.

    Raises:
        TraceError: If the model can't be captured faithfully.
        LowerError: If one of `passes` breaks a rule.
    """
    tensors = list(arguments.tensors)
    entries, state = inventory(model)
    narrow = narrow_entries(entries) if precision == "bf16" else entries
    replaced = {key for key, entry in entries.items() if narrow[key].spec.dtype != entry.spec.dtype}
    if replaced:
        tensors = [t.to(torch.bfloat16) if t.dtype == torch.float32 else t for t in tensors]
    args, kwargs = arguments.rebuild(tensors)
    # Swapped state comes back whole, wherever Ctrl-C comes.
    swapped = _in_bf16(model, {key: state[key] for key in replaced})
    with Interrupts() as interrupts, swapped, interrupts.released(), undisturbed():
        with torch.enable_grad():
            traced = trace(model, args, kwargs, device=device.torch_device)
            check_opaque(traced, "warn", set())
    traced = loss_only(traced) if is_own_loss else traced

    lower = partial(lowered_for, traced, block_bytes, passes, chunking, device.alignment, costs=costs)

    def finer(size: int, pieces: Pieces | None) -> Program:
        return lowered_for(traced, size, passes, chunking, device.alignment, pieces, costs=costs)

    programs = StepPrograms(chunking, lower, finer=finer, may_cut=block_bytes is None)
    programs.at(0)  # raises errors of the model now
    return traced, programs


@contextmanager
def _in_bf16(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Replaces these parameters by bf16 parameters without memory."""
    stand_ins: dict[int, torch.Tensor] = {}
    for parameter in parameters.values():
        values = torch.empty_like(parameter, dtype=torch.bfloat16, device="meta", requires_grad=False)
        stand_in = stand_ins[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(stand_in).update(vars(parameter))
    with swapped_state(model, stand_ins):
        yield
