"""MicroBatchGenerators: what a micro-batch of a training step draws from.

A loop over micro-batches draws in the order of its forwards. A training step runs the blocks of all micro-batches in
turns, so each micro-batch draws from generators of its own: they begin where the forward before it ends.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

from megatrain.device import Device
from megatrain.errors import DrawsError
from megatrain.runtime.drawing.draws import Draws
from megatrain.runtime.rng import OwnGenerators, RngState, kept_generators, micro_batch_seed
from megatrain.tracer.recording.random_numbers import HostRng

_ONLY_AS_A_LOOP: ContextVar[bool] = ContextVar("_ONLY_AS_A_LOOP", default=False)


@contextmanager
def only_as_a_loop() -> Generator[None]:
    """Refuses steps in the body whose micro-batches would draw other numbers than a loop does."""
    before = _ONLY_AS_A_LOOP.set(True)
    try:
        yield
    finally:
        _ONLY_AS_A_LOOP.reset(before)


@dataclass(slots=True)
class MicroBatchGenerators:
    """What a micro-batch of a training step draws from.

    Args:
        forward: Its forward; None for the global generators.
        loss: Its loss; None for the global generators.
        ends_at: Where its forward must end, because the next one begins there; None if none does.
        host: Where Python's and NumPy's generators must stay, because nobody knows of draws from them; None if they may
            move.
    """

    forward: OwnGenerators | None = None
    loss: OwnGenerators | None = None
    ends_at: RngState | None = None
    host: HostRng | None = None

    @staticmethod
    def of(draws: Sequence[Draws | None], are_random: Sequence[bool], device: Device) -> Sequence[MicroBatchGenerators]:
        """Divides the random numbers of a step that begins now among its micro-batches.

        If a forward draws, all draw as in a loop over micro-batches, and their losses from seeded generators: a loop's
        order has the loss of one ahead of the forward of the next. Forwards that can't be drawn ahead (of opaque
        modules) have seeded generators as well; the first of them has the global ones.

        Args:
            draws: The random calls of each micro-batch.
            are_random: Which of them draw.
            device: Compute device.

        Raises:
            DrawsError: If a forward draws from a state that torch doesn't show; or, in `only_as_a_loop`, can't be drawn
                ahead.
        """
        count = len(draws)
        if count == 1 or not any(are_random):
            return [MicroBatchGenerators() for _ in draws]
        if any(each is not None and each.are_hidden for each in draws):
            raise DrawsError(
                "the model has an RNN with dropout, whose random numbers come from a state inside of cuDNN.\n"
                "  Micro-batches of a step draw in the order of a loop, so their generators must be known ahead.\n"
                "  Give TrainStep a single micro-batch; or give the RNN dropout=0, and its layers nn.Dropout."
            )

        def seeded(number: int) -> OwnGenerators:
            return OwnGenerators.seeded(micro_batch_seed(number, device), device)

        found = [MicroBatchGenerators(loss=seeded(count + number)) for number in range(count)]
        if any(each is None for each in draws):
            if _ONLY_AS_A_LOOP.get():
                raise DrawsError(
                    "a module that runs its own code draws random numbers.\n"
                    "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
                    "  Give TrainStep a single micro-batch; print(compiled.program) says why the module is opaque."
                )
            for number, each in enumerate(found[1:], start=1):
                each.forward = seeded(number)
            return found
        if any(each is not None and each.are_opaque for each in draws):
            host = HostRng.now()
            for each in found:
                each.host = host
        with kept_generators(device):
            for each, (earlier, later) in zip(draws, pairwise(found), strict=False):
                assert each is not None
                each.make(device)
                earlier.ends_at = RngState.now(device)
                later.forward = OwnGenerators(earlier.ends_at, device)
        return found

    def check(self, device: Device) -> None:
        """Checks that the forward, which is over, drew as many numbers as were drawn ahead.

        Raises:
            DrawsError: If it drew others.
        """
        now = RngState.now(device) if self.forward is None else self.forward.state
        has_moved = self.host is not None and self.host != HostRng.now()
        if has_moved or (self.ends_at is not None and not self.ends_at.is_same(now)):
            raise DrawsError(
                "the model drew another number of random values than the shapes of its tensors say.\n"
                "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
                "  Give TrainStep a single micro-batch, or draw the values (torch.poisson, gamma) outside of the model."
            )

    def drawing(self, block: int | None) -> AbstractContextManager[None]:
        """Lets the body draw as a block of the forward does; None is the loss."""
        own = self.loss if block is None else self.forward
        return nullcontext() if own is None else own.drawing()

    def leave(self, device: Device) -> None:
        """Sets the global generators to the end of this forward, the last of a step."""
        if self.forward is not None and not self.forward.is_seeded:
            self.forward.state.restore(device)
