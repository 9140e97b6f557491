"""The plan of a fine-tuning's step, before any weight is read."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.device import Device
from megatrain.finetune.fine_tuning import FineTuning
from megatrain.memory.device_budget import DeviceBudget
from megatrain.planning.plan import Plan
from megatrain.planning.planning import plan
from megatrain.sizes import parse_bytes

MAX_GRAD_NORM = 1.0
"""Gradients of a larger norm are scaled down to it: the default of transformers."""


def plan_step(tuning: FineTuning, model: Any, device: Device, width: int, micro_batches: int) -> Plan:
    """Plans a step, and refuses what doesn't fit.

    Args:
        tuning: Names precision, micro-batch and budget.
        model: May be on meta.
        device: Where blocks compute.
        width: Tokens of a sequence.
        micro_batches: Micro-batches in a step.

    Raises:
        ScheduleError: If the device's memory is too small.
        ExecuteError: If the host's memory is too small.
    """
    model.train()
    model.config.use_cache = False  # as the trainer does: otherwise keys and values would be results
    given = None if tuning.memory is None else parse_bytes(tuning.memory, "memory")
    ids = torch.zeros(tuning.batch, width, dtype=torch.long, device=device.torch_device)
    trained = [p for p in model.parameters() if p.requires_grad]
    return plan(
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
