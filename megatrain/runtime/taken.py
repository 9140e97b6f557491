"""Taken: the calls that instructions run on, and who takes the training step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import nn

from megatrain.errors import ExecuteError
from megatrain.runtime.call import Call
from megatrain.runtime.call_start import version
from megatrain.runtime.engine import Engine
from megatrain.runtime.exchange import Exchange
from megatrain.scheduler.instructions import Instructions
from megatrain.scheduler.items import Item
from megatrain.scheduler.table import Position


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


class Versions:
    """How often some of the model's state was written before the user's code runs in a step.

    Args:
        engine: Holds the state.
        keys: What is watched.
    """

    def __init__(self, engine: Engine, keys: Iterable[str]):
        self._engine = engine
        self._known = {key: _stamp(engine.tensors[key]) for key in keys if key in engine.tensors}

    @contextmanager
    def allowing(self, key: str) -> Generator[None]:
        """Lets the body write one of them, because nothing of the step reads it any more."""
        tensor = self._engine.tensors[key]
        is_known = self._known.get(key) == _stamp(tensor)
        yield
        if is_known:
            self._known[key] = _stamp(tensor)

    def check(self, writer: str) -> None:
        """Checks that nobody has written or replaced any since.

        Args:
            writer: Whose code has run, for the message.

        Raises:
            ExecuteError: Naming the tensor.
        """
        if self._known:
            self._engine.find_replaced()
        for key, known in self._known.items():
            tensor = self._engine.tensors[key]
            if _stamp(tensor) != known:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise ExecuteError(
                    f"{writer} writes {kind} `{key}`, which the rest of the step reads.\n"
                    "  All micro-batches run through a block before the next block does, and some blocks are computed\n"
                    "  again in the backward, so some would read the old values and some the new ones.\n"
                    "  Write it in the model's forward, or when the call of the step has returned."
                )


def _stamp(tensor: torch.Tensor) -> tuple[int, int, int]:
    return id(tensor), version(tensor), tensor.data_ptr()


class StepTrainer(Protocol):
    """The trainer of a step: computes losses from outputs, takes gradients, and updates."""

    has_loss: bool
    """Whether the user's code makes losses."""
    exchange: Exchange
    """Who else has gradients of the step's blocks."""

    def before_compute(self, micro_batch: int) -> None:
        """Called before each F and B, on the caller's thread; an error in it stops the step."""

    def before_backward(self) -> None:
        """Called before the first B of all, on the caller's thread, ahead of what the B waits for."""

    def differentiate(self, micro_batch: int, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of a micro-batch's outputs, in their order; on the caller's thread."""
        ...

    def begin_backward(self, state: Versions) -> None:
        """All losses are made. `state` is what the rest of the step reads of the model: hooks may not write it."""

    def receive(self, key: str, gradient: torch.Tensor) -> None:
        """Takes a parameter's whole gradient, on the host; on a transfer's thread."""

    def squares(self, keys: Sequence[str]) -> None:
        """Sums the squares of some whole gradients; on the host stream's thread, like `norm` and `update`."""

    def norm(self) -> None:
        """Takes the norm of all gradients, from their squares."""

    def update(self, block: int) -> None:
        """Updates the parameters that belong to a block."""

    def wait(self, block: int, go_on: Callable[[], object]) -> None:
        """Waits until all processes have updated their parts of a block; on a thread of its own.

        Args:
            block: The block.
            go_on: Called now and then; raises an error to give the wait up.
        """


class Taken(NamedTuple):
    """The calls that instructions run on, one per micro-batch, and the trainer of a training step."""

    calls: Sequence[Call]
    trainer: StepTrainer | None = None

    @property
    def step_trainer(self) -> StepTrainer:
        """The trainer, which a training step has."""
        assert self.trainer is not None
        return self.trainer


def release(calls: Sequence[Call], items: Sequence[Item]) -> None:
    """Lets go of items."""
    for kind, number, micro_batch in items:
        call = calls[micro_batch]
        name = call.loaded.names[number] if kind in _OF_VALUES else number
        if name is not None:  # otherwise it is a value of other micro-batches
            call.drop(kind, name)


def without_offload(instructions: Instructions) -> dict[int, Position]:
    """The last B of each block that has no G: its gradients stay where they are made, or have no elements."""
    offloaded = {each.op.block for each in instructions.all if each.op.what == "G"}
    backwards = [each for each in instructions.all if each.op.what == "B" and each.op.block not in offloaded]
    return {each.op.block: each.position for each in backwards}


_OF_VALUES = ("value", "gradient", "original", "returned")
