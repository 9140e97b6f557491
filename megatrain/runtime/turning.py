"""Turning: between a micro-batch's forward and its backward, its outputs become a loss."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch

from megatrain.runtime.call import Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.taken import StepTrainer, Versions


def turn(calls: Sequence[Call], micro_batch: int, trainer: StepTrainer, engine: Engine) -> None:
    """Hands the trainer a micro-batch's outputs, and takes their gradients, ahead of its first B.

    Raises:
        ExecuteError: If the loss writes what the rest of the step reads.
    """
    call = calls[micro_batch]
    call.write_buffers(engine)
    # The trainer may use outputs freely, but not write into them.
    facts = call.loaded.facts
    call.remember_versions({*facts.watched, *facts.returned_buffers})
    outputs = call.loaded.program.outputs
    call.generators.check(engine.device)
    is_only, is_last = len(calls) == 1, call is calls[-1]
    read = Versions(engine, _read_later(call, is_last=is_last) if trainer.has_loss else ())
    with call.generators.drawing(None):
        gradients = trainer.differentiate(micro_batch, [_output(call, engine, ref.kind, ref.name) for ref in outputs])
    call.check_versions()
    if trainer.has_loss:
        read.check("the loss")
    if is_last:
        trainer.begin_backward(Versions(engine, _read_later(call, is_last=is_only)))
    for ref, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            call.add_gradient(ref.name, gradient)


@contextmanager
def showing(calls: Sequence[Call], micro_batch: int, block: int, engine: Engine) -> Generator[None]:
    """Has buffers in the body, a block's B, as the micro-batch's forward left them, if hooks may look at them.

    Raises:
        ExecuteError: If the body writes one: the forwards of later micro-batches are over.
    """
    call = calls[micro_batch]
    if call is calls[-1] or block not in call.loaded.looking:
        yield
        return
    with call.showing_buffers(engine.buffers):
        shown = Versions(engine, call.written)
        yield
        shown.check("a hook in the backward")


def _read_later(call: Call, *, is_last: bool) -> Iterable[str]:
    """Keys of the model's state that a step still reads; with other micro-batches all that their forwards read too."""
    if is_last:
        return call.loaded.facts.read_backward
    return dict.fromkeys([*(entry.owner for entry in call.loaded.program.state.values()), *call.written])


def _output(call: Call, engine: Engine, kind: str, name: str) -> torch.Tensor:
    key = call.loaded.facts.returned_buffers.get(name) if engine.device.is_host else None
    if kind == "value" and key is None:
        return call.values[name].detach()
    return engine.tensors[key or name].to(engine.device.torch_device).detach()
