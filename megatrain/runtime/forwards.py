"""A forward without a graph, of which results are kept for the backward."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from megatrain.errors import DeviceMemoryWarning
from megatrain.passes.program import Block
from megatrain.runtime.blocks.block import Tensors
from megatrain.runtime.call import Call
from megatrain.scheduler.instructions import Instruction


def forward_without_graph(
    call: Call, block: Block, instruction: Instruction, inputs: Tensors, state: Tensors
) -> Sequence[torch.Tensor]:
    """Runs a forward whose backward will repeat it, and keeps the results that the schedule wants.

    If other kernels run than those that were planned, nothing is kept: the backward computes all of it again.
    """
    runner, needs_grad = call.loaded.runners[block.index], call.loaded.facts.needs_grad[block.index]
    names = call.loaded.results.get(block.index, ()) if instruction.keeps else ()
    notes = runner.noting() if names else None
    if notes is None:
        outputs = runner.forward(inputs, state, needs_grad)
    else:
        outputs = runner.forward(inputs, state, needs_grad, notes=notes)
    kept = None if notes is None else runner.kept(notes)
    if names and kept is None:
        warnings.warn(_OTHER_KERNELS.format(block.index, block.name), DeviceMemoryWarning, stacklevel=2)
    call.keep_results(block.index, kept, names)
    return outputs


_OTHER_KERNELS = (
    "block {} ({}) ran other kernels of attention than it was planned with, and keeps no results: its backward "
    "computes attention again, and may take more memory than the plan says.\n"
    "  Which kernels run depends on torch.backends and torch.nn.attention.sdpa_kernel.\n"
    "  Have the same kernels allowed when a step is planned and when it runs."
)
