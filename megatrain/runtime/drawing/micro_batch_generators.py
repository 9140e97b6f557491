"""MicroBatchGenerators: what a micro-batch of a training step draws from.

A loop over micro-batches draws in the order of its forwards. A training step runs the blocks of all micro-batches in
turns, so each micro-batch draws from generators of its own: they begin where the forward before it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

from megatrain.device import Device
from megatrain.errors import DrawsError
from megatrain.runtime.drawing.draws import Draws
from megatrain.runtime.rng import GlobalGenerators, OwnGenerators, RngState, kept_generators
from megatrain.tracer.recording.random_numbers import HostRng


@dataclass(slots=True)
class MicroBatchGenerators:
    """What a micro-batch of a training step draws from.

    Args:
        forward: Its forward; None for the global generators.
        quiet_on: The compute device, if its loss may not draw: the model draws, and the next forward comes later in the
            loop, and earlier in the step. None if the loss draws from the global generators.
        ends_at: Where its forward must end, because the next one begins there; None if none does.
        host: Where Python's and NumPy's generators must stay, because nobody knows of draws from them; None if they may
            move.
        still_on: The compute device, if no block may draw: opaque modules drew nothing when they were captured. None if
            blocks may, or there are no opaque modules.
    """

    forward: OwnGenerators | None = None
    quiet_on: Device | None = None
    ends_at: RngState | None = None
    host: HostRng | None = None
    still_on: Device | None = None

    @staticmethod
    def of(draws: Sequence[Draws | None], are_random: Sequence[bool], device: Device) -> Sequence[MicroBatchGenerators]:
        """Divides the random numbers of a step that begins now among its micro-batches.

        If a forward draws, all draw as in a loop over micro-batches.

        Args:
            draws: The random calls of each micro-batch.
            are_random: Which of them draw.
            device: Compute device.

        Raises:
            DrawsError: If a forward can't be drawn ahead: it draws in an opaque module or a hook, or from a state that
                torch doesn't show.
        """
        count = len(draws)
        if count == 1 or not any(are_random):
            has_opaque = count > 1 and any(each is not None and each.are_opaque for each in draws)
            return [MicroBatchGenerators(still_on=device if has_opaque else None) for _ in draws]
        if any(each is not None and each.are_hidden for each in draws):
            raise DrawsError(
                "the model has an RNN with dropout, whose random numbers come from a state inside of cuDNN.\n"
                "  Micro-batches of a step draw in the order of a loop, so their generators must be known ahead.\n"
                "  Give TrainStep a single micro-batch; or give the RNN dropout=0, and its layers nn.Dropout."
            )
        if any(each is None for each in draws):
            raise DrawsError(
                "a module or a hook that runs its own code draws random numbers.\n"
                "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
                "  Give TrainStep a single micro-batch, or write the loop yourself; print(compiled.program) says why "
                "code is opaque."
            )
        found = [MicroBatchGenerators(quiet_on=device) for _ in draws]
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
            raise _drew_otherwise()

    def drawing(self, block: int | None) -> AbstractContextManager[None]:
        """Lets the body draw as a block of the forward does; None is the loss.

        Raises:
            DrawsError: If a loss or a block draws that may not.
        """
        if block is None:
            return nullcontext() if self.quiet_on is None else _without_draws(self.quiet_on, _loss_draws)
        if self.still_on is not None:
            return _without_draws(self.still_on, _drew_otherwise)
        return nullcontext() if self.forward is None else self.forward.drawing()

    def leave(self, device: Device) -> None:
        """Sets the global generators to the end of this forward, the last of a step."""
        if self.forward is not None:
            self.forward.state.restore(device)


@contextmanager
def _without_draws(device: Device, refusal: Callable[[], DrawsError]) -> Generator[None]:
    """Runs a loss or a block.

    Raises:
        DrawsError: If it draws, or seeds; the generators are as they were.
    """
    with kept_generators(device):
        before = GlobalGenerators.now(device)
        yield
        is_quiet = before.is_same(GlobalGenerators.now(device))
    if not is_quiet:
        raise refusal()


def _drew_otherwise() -> DrawsError:
    return DrawsError(
        "the model drew another number of random values than the shapes of its tensors say.\n"
        "  Micro-batches of a step draw in the order of a loop, so what each draws must be known ahead.\n"
        "  Give TrainStep a single micro-batch, or draw the values (torch.poisson, gamma) outside of the model."
    )


def _loss_draws() -> DrawsError:
    return DrawsError(
        "the loss draws random numbers, and so does the model.\n"
        "  In a loop over micro-batches a loss draws before the next forward; a step runs the forwards in turns.\n"
        "  Draw in the model, give TrainStep a single micro-batch, or write the loop yourself."
    )
