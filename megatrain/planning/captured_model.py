"""captured(): a model as a program, without its weights: the capture of a plan."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatrain.device import Device
from megatrain.garbage import paused_collection
from megatrain.interrupts import Interrupts
from megatrain.opaque_model import check_opaque
from megatrain.passes.pipeline import Rewrite, lower
from megatrain.passes.program import Program
from megatrain.planning.host_plan import narrow_entries
from megatrain.runtime.block import outer_hooks_off
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
    device: Device,
) -> tuple[TracedModule, Program]:
    """Captures a call and cuts it into blocks; model and generators stay as they were.

    Args:
        model: May be on meta.
        arguments: Of the call.
        precision: With `"bf16"`, fp32 weights are replaced by stand-ins without values.
        block_bytes: As in `lower`.
        passes: The user's rewrites.
        device: Whose layout of weights counts.

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
    with Interrupts() as interrupts, swapped, interrupts.released(), paused_collection(), outer_hooks_off():
        with torch.autograd.set_detect_anomaly(False), torch.enable_grad():
            traced = trace(model, args, kwargs, device=device.torch_device)
            check_opaque(traced, "warn", set())
            return traced, lower(traced, block_bytes=block_bytes, rewrites=passes, alignment=device.alignment)


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
