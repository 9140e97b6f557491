"""The plan of a fine-tuning's step, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatrain.counts import counted
from megatrain.device import Device
from megatrain.errors import ExecuteError
from megatrain.finetune.fine_tuning import FineTuning
from megatrain.memory.available import available_bytes
from megatrain.memory.device_budget import DeviceBudget
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.planning import plan
from megatrain.sizes import format_bytes, parse_bytes

MAX_GRAD_NORM = 1.0
"""Gradients of a larger norm are scaled down to it: the default of transformers."""
_OF_EACH = ("slab", "parks", "values on the host", "device memory", "update scratch", "constants")
"""Rows of a host plan that each of several processes has of its own.

The processes share the other rows: also the gradients, since this step is clipped.
"""


def plan_step(
    tuning: FineTuning, model: Any, device: Device, width: int, micro_batches: int, place: str = "alone"
) -> PlannedStep:
    """Plans a step.

    Args:
        tuning: Names precision, micro-batch and budget.
        model: May be on meta.
        device: Where blocks compute.
        width: Tokens of a sequence.
        micro_batches: Micro-batches in a step of one process.
        place: Where this process stands among several, by a name of `StepKind`.
    """
    model.train()
    model.config.use_cache = False  # as the trainer does: otherwise keys and values would be results
    given = None if tuning.memory is None else parse_bytes(tuning.memory, "memory")
    ids = torch.zeros(tuning.batch, width, dtype=torch.long, device=device.torch_device)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = plan(
        model,
        device=device,
        device_memory=DeviceBudget(device, given).nbytes,
        optimizer=torch.optim.AdamW(trained, fused=True),  # as the trainer makes it
        precision=tuning.precision,
        micro_batches=micro_batches,
        max_grad_norm=MAX_GRAD_NORM,
        block_bytes=tuning.block_bytes,
        chunking=tuning.chunking,
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    if place == "alone":
        return found
    assert found.asked is not None
    return found.asked.again({"ranks": place})


def host_of_several(
    host: HostPlan, model: Any, processes: int, available: Callable[[], int] = available_bytes
) -> list[str]:
    """Says what all processes of a host take together, and refuses what can't be.

    Args:
        host: Of one of them.
        model: May be on meta; its parameters have the dtype in which they are read.
        processes: How many there are on the host.
        available: Bytes that are free.

    Returns:
        Lines; none for a single process.

    Raises:
        ExecuteError: If the host has less memory than that.
    """
    if processes == 1:
        return []
    own = sum(host.bytes_of(name) for name in _OF_EACH)
    total = host.total_bytes + (processes - 1) * own
    # They share one copy from the first step on. Until then each has the weights that it has read.
    read = processes * sum(p.numel() * p.element_size() for p in model.parameters())
    has, most = available(), max(total, read)
    said = f"{format_bytes(total)}, of which each has {format_bytes(own)} of its own"
    if most > has:
        raise ExecuteError(
            f"{counted(processes, 'process')} of this host need {format_bytes(most)} of host memory, "
            f"{format_bytes(has)} are available.\n"
            f"  Steps take {said}. Until the first step each has its own weights, {format_bytes(read)} in all.\n"
            "  Start fewer processes on this host, or end what else uses its memory."
        )
    return [f"{processes} processes of this host: {said}; until the first step {format_bytes(read)} of weights"]
