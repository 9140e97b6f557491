"""RankSums: a block's sum of gradients on its way from rank to rank, and the total of all ranks on its way back."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.ranks.channel import Channel, Room
from megatrain.ranks.ranks import Ranks
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.sums import ParameterGradient
from megatrain.runtime.streams.events import Aborted
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.spec import TensorSpec


class RankSums:
    """Moves sums of the gradients of a block's parameters between ranks, through host memory.

    Each method gets or gives the gradients of a block's state in its order, None where nothing flowed. They pass
    through rooms of host memory, page-locked where copies gain from that. The thread of a stream waits for each copy,
    since another rank reads or writes the room next.

    Args:
        engine: Has the ranks, and the streams.
        program: What runs.
        kind: Of the step; a step of one process moves nothing here.

    Raises:
        ExecuteError: If the schedule is that of another rank.
    """

    def __init__(self, engine: Engine, program: Program, kind: StepKind):
        place = "alone" if engine.ranks is None else engine.ranks.place
        if kind.ranks not in ("alone", place):
            raise ExecuteError(
                f"the schedule is that of the {kind.ranks} rank, but this one is {place}.\n"
                "  Sums of gradients go from rank to rank in one order.\n"
                "  Run it with a TrainStep of a model that was compiled with process_group=."
            )
        self._engine = engine
        self._program = program
        self._kind = kind
        self._device = engine.device

    @property
    def _ranks(self) -> Ranks:
        assert self._engine.ranks is not None
        return self._engine.ranks

    def go_on(self) -> None:
        """Gives a transfer up if the step has failed meanwhile."""
        if self._engine.streams.failure is not None:
            raise Aborted("a transfer between ranks")

    def empty(self, block: int) -> list[torch.Tensor | None]:
        """Takes memory of the device for a sum that will come; None for what isn't trained."""
        entries = [self._program.state[key] for key in self._keys(block)]
        device = self._device.torch_device
        # Contiguous, so that each goes from memory to memory; an update gets it in its parameter's layout.
        return [
            torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device=device) if entry.requires_grad else None
            for entry in entries
        ]

    def receive(self, block: int, out: Sequence[torch.Tensor | None]) -> list[ParameterGradient]:
        """Fills tensors of the device with the sums of the rank before, and returns those that it had."""
        self._ranks.wait_until_agreed(self.go_on)
        with self._expecting(self._ranks.before).take(self._specs(block), self.go_on) as room:
            self._engine.bus.lock([room.arena])
            trained = [tensor for tensor in out if tensor is not None]
            for tensor, content, is_there in zip(trained, room.tensors, room.present, strict=True):
                if is_there:
                    self._engine.bus.to_device(tensor, content, room.arena)
            self._device.synchronize()
        there = iter(room.present)
        return [(tensor if tensor is not None and next(there) else None, False) for tensor in out]

    def pass_on(self, block: int, gradients: Sequence[ParameterGradient]) -> None:
        """Hands a block's sums on to the next rank."""
        given = self._given(block, gradients)
        with self._expecting(self._ranks.after).give(self._specs(block), self.go_on) as room:
            self._fill(room, given)

    @contextmanager
    def totals(
        self, block: int, sums: Mapping[int, Sequence[ParameterGradient]]
    ) -> Generator[Sequence[ParameterGradient]]:
        """Gives the totals of a block, which are the sums of the last rank, to all others.

        Args:
            block: The block.
            sums: Those of this rank, by block.

        Yields:
            The totals on the host, for the time of the body; on a last rank that computes there, the sums themselves.
        """
        channel = self._expecting(self._ranks.totals)
        if self._kind.sends:
            with channel.take(self._specs(block), self.go_on) as room:
                yield self._in_order(block, room)
            return
        # Ahead of all that may write into them: sums over several blocks, hooks, updates.
        given = self._given(block, sums[block])
        with channel.give(self._specs(block), self.go_on) as room:
            self._fill(room, given)
        yield sums[block] if self._device.is_host else self._in_order(block, room)

    def _expecting(self, channel: Channel | None) -> Channel:
        assert channel is not None
        channel.expect([self._specs(block.index) for block in self._program.blocks])
        return channel

    def _in_order(self, block: int, room: Room) -> list[ParameterGradient]:
        """What is in a room, in the order of a block's state. The room's memory isn't theirs."""
        pairs = iter(zip(room.tensors, room.present, strict=True))
        found: list[ParameterGradient] = []
        for key in self._keys(block):
            tensor, is_there = next(pairs) if self._program.state[key].requires_grad else (None, False)
            found.append((tensor if is_there else None, True))
        return found

    def _fill(self, room: Room, given: Sequence[torch.Tensor | None]) -> None:
        """Copies gradients to a room, and waits for the copies."""
        self._engine.bus.lock([room.arena])
        for place, gradient in zip(room.tensors, given, strict=True):
            if gradient is not None:
                self._engine.bus.to_host(place, gradient, room.arena)
        self._device.synchronize()
        room.present = [gradient is not None for gradient in given]

    def _keys(self, block: int) -> Sequence[str]:
        return self._program.blocks[block].binding

    def _specs(self, block: int) -> list[TensorSpec]:
        state = self._program.state
        return [state[key].spec for key in self._keys(block) if state[key].requires_grad]

    def _given(self, block: int, gradients: Sequence[ParameterGradient]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for key, (gradient, _) in zip(self._keys(block), gradients, strict=True):
            entry = self._program.state[key]
            if not entry.requires_grad:
                continue
            if gradient is not None and (gradient.layout != torch.strided or gradient.dtype != entry.spec.dtype):
                raise ExecuteError(
                    f"the gradient of `{key}` is {gradient.dtype}, {gradient.layout}.\n"
                    f"  Between ranks go dense gradients of their parameter's dtype, {entry.spec.dtype}.\n"
                    "  Build an embedding with sparse=False, or train it in one process."
                )
            found.append(gradient)
        return found
