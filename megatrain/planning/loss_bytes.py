"""measure_loss(): the device memory that a training step's own loss takes, found out without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.device import Device
from megatrain.interrupts import Interrupts
from megatrain.passes.exact_fakes import exact_fakes
from megatrain.passes.measuring.live_bytes import LiveBytes
from megatrain.passes.program import Program
from megatrain.runtime.rng import kept_generators
from megatrain.torch_private import pytree
from megatrain.tracer.python.holders import Attributes
from megatrain.tracer.python.outer import Outer
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import TracedModule

Loss = Callable[[Any, Any], torch.Tensor]
"""Makes a scalar of the model's result and the micro-batch."""
# Of a loss that can't be measured: results in fp32, their log-softmax, its gradient, and that of the results in fp32.
_COPIES = 4


def measure_loss(
    program: Program, traced: TracedModule, inputs: Sequence[torch.Tensor], batch: Any, loss: Loss, device: Device
) -> int:
    """Runs a loss and its backward on tensors without values, and leaves no trace of that.

    Args:
        program: The program of the capture.
        traced: The capture; it makes the result of the model's tensors.
        inputs: The tensors of the call.
        batch: The micro-batch, the loss's second argument.
        loss: The caller's function.
        device: The compute device.

    Returns:
        The most device bytes beyond the model's outputs and their gradients. If the loss doesn't run on such tensors
        (it reads a value, say), those of four fp32 copies of the outputs.
    """
    holder = nn.Module()  # what a module's code and its hooks hold can be put back
    if isinstance(loss, nn.Module):
        holder.add_module("loss", loss)
    else:
        holder._forward_hooks[0] = loss  # pyright: ignore[reportArgumentType]
    before = Attributes(holder, Outer.of(holder))
    try:
        # An error that leaves a dispatch mode called from C++ ends the process.
        with Interrupts(), kept_generators(device):
            return _measured(program, traced, inputs, batch, loss)
    except Exception:  # the bound stands for any failure, and a real one comes again in the step
        return _bound(program)
    finally:
        before.restore()


def _measured(program: Program, traced: TracedModule, inputs: Sequence[torch.Tensor], batch: Any, loss: Loss) -> int:
    with (
        exact_fakes(allow_non_fake_inputs=True) as mode,
        torch.autograd.set_detect_anomaly(False),
    ):
        given, fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (batch, list(inputs)))
        outputs = [_output(program, ref.kind, ref.name) for ref in program.outputs]
        results = [t for t in outputs if t.requires_grad]
        known = [t for t in pytree.tree_leaves((given, fakes, outputs)) if isinstance(t, torch.Tensor)]
        with torch.enable_grad(), LiveBytes(known, program.device) as live:
            found = loss(traced.result(outputs, fakes), given)
            gradients: Any = torch.autograd.grad(found.reshape(()), results, allow_unused=True)
            made = sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
    return max(0, live.peak - made)


def _output(program: Program, kind: str, name: str) -> torch.Tensor:
    """A stand-in of an output; a loss may write into it, so it isn't a leaf."""
    value = program.values[name] if kind == "value" else None
    spec: TensorSpec = program.state[name].spec if value is None else value.spec
    strides = torch.empty(spec.shape, device="meta").stride() if spec.stride is None else spec.stride
    made = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=program.device)
    return made.requires_grad_().clone() if value is not None and value.requires_grad else made


def _bound(program: Program) -> int:
    values = (program.values[ref.name] for ref in program.outputs if ref.kind == "value")
    return _COPIES * 4 * sum(value.spec.numel for value in values if value.requires_grad)
