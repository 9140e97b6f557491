"""Turning: between a micro-batch's forward and its backward, its outputs become a loss."""

from __future__ import annotations

import torch

from megatrain.runtime.call import Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.taken import StepTrainer


def turn(call: Call, micro_batch: int, trainer: StepTrainer, engine: Engine) -> None:
    """Hands the trainer a micro-batch's outputs, and takes their gradients, ahead of its first B."""
    # The trainer may use outputs freely, but not write into them.
    call.remember_versions(call.loaded.facts.watched)
    outputs = call.loaded.program.outputs
    call.generators.check(engine.device)
    with call.generators.drawing(None):
        gradients = trainer.differentiate(micro_batch, [_output(call, engine, ref.kind, ref.name) for ref in outputs])
    call.check_versions()
    for ref, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            call.add_gradient(ref.name, gradient)


def _output(call: Call, engine: Engine, kind: str, name: str) -> torch.Tensor:
    tensor = call.values[name] if kind == "value" else engine.tensors[name].to(engine.device.torch_device)
    return tensor.detach()
