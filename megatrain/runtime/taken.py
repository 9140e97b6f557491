"""Taken: the calls that instructions run on, and who takes the training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from megatrain.runtime.call import Call
from megatrain.runtime.call_start import Versions
from megatrain.scheduler.items import Item
from megatrain.sizes import Section


class StepTrainer(Protocol):
    """The trainer of a step: computes losses from outputs, takes gradients, and updates."""

    has_loss: bool
    """Whether the user's code makes losses."""

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

    def update(self, block: int, section: Section | None = None) -> None:
        """Updates the parameters that belong to a block, or a section of them.

        Sections come in their order. Once one is over it must hold its final values, and may hold those of later ones.
        """

    def wait(self, block: int, go_on: Callable[[], object]) -> None:
        """Waits until other ranks have updated their parts of a block; on a thread of its own.

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
    for kind, number, micro_batch, _ in items:
        call = calls[micro_batch]
        name = call.loaded.names[number] if kind in _OF_VALUES else number
        if name is not None:  # otherwise it is a value of other micro-batches
            call.drop(kind, name)


_OF_VALUES = ("value", "gradient", "original", "returned")
