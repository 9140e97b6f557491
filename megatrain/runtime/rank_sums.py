"""RankSums: a block's sum of gradients on its way from rank to rank, and the total of all ranks on its way back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.ranks.channels import Channel, Room
from megatrain.ranks.ranks import Ranks
from megatrain.runtime.accumulation import ParameterGradient, added
from megatrain.runtime.call import Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.streams.events import Aborted
from megatrain.scheduler.step_kind import StepKind
from megatrain.sizes import SUM_PIECE_BYTES
from megatrain.tracer.spec import TensorSpec


class RankSums:
    """Moves sums of the gradients of a block's parameters between ranks, through host memory.

    Each method gets or gives the gradients of a block's state in its order, None where nothing flowed. They pass
    through rooms of host memory, page-locked where copies gain from that. The thread of a stream waits for its copies,
    since another rank reads or writes the room next. Where no further micro-batch follows on this rank, its gradients
    are added to each piece of the sum of the rank before on its way to the next: so ranks hand on one block at the same
    time.

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
        self._specs = [self._specs_of(block.binding) for block in program.blocks]
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
        """Takes memory of the device for a sum that will come; None for what isn't trained.

        Of a sum that passes in pieces, it is memory for one.
        """
        entries = [self._program.state[key] for key in self._keys(block)]
        device = self._device.torch_device
        if self._kind.adds_in_pieces:
            nbytes = sum(entry.spec.nbytes for entry in entries if entry.requires_grad)
            return [torch.empty(min(SUM_PIECE_BYTES, nbytes), dtype=torch.uint8, device=device)]
        # Contiguous, so that each goes from memory to memory; an update gets it in its parameter's layout.
        return [
            torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device=device) if entry.requires_grad else None
            for entry in entries
        ]

    def receive(self, call: Call, block: int) -> None:
        """Fills memory that a call has taken with the sums of the rank before; it keeps those that there are."""
        out = call.received[block]
        with self._before(block) as room:
            self._engine.bus.lock([room.arena])
            trained = [tensor for tensor in out if tensor is not None]
            for done, group in enumerate(room.groups, start=1):
                room.wait(done)
                for number, cut in group:
                    if room.present[number]:
                        self._engine.bus.to_device(trained[number][cut], room.tensors[number][cut], room.arena)
            self._device.synchronize()
        there = iter(room.present)
        call.received[block] = [tensor if tensor is not None and next(there) else None for tensor in out]

    def pass_on(self, call: Call, block: int) -> None:
        """Hands a block's sums on to the next rank."""
        given = self._given(block, call.parameter_gradients[block])
        with self._expecting(self._ranks.after).give(block, self.go_on) as room:
            self._fill(block, room, given, self._place(call, block), room.hand_over)

    @contextmanager
    def totals(self, call: Call, block: int) -> Generator[Sequence[ParameterGradient]]:
        """Gives the totals of a block, which are the sums of the last rank, to all others.

        Yields:
            The totals on the host, for the time of the body, or longer (`StepKind.keeps_totals`); on a last rank that
            has them there, the sums themselves.
        """
        channel = self._expecting(self._ranks.kept_totals if self._kind.keeps_totals else self._ranks.totals)
        if self._kind.sends:
            with channel.take(block, self.go_on) as room:
                room.wait_for_all()
                yield self._in_order(block, room)
            return
        # Ahead of all that may write into them: sums over several blocks, hooks, updates.
        sums = call.parameter_gradients[block]
        given = self._given(block, sums)
        with channel.give(block, self.go_on) as room:
            # As a whole: the rank before takes it once its `P` is over, and that sends pieces until the last is taken.
            self._fill(block, room, given, self._place(call, block), lambda _: None)
        is_here = self._device.is_host and self._kind.receives and room.kept is None
        yield sums if is_here else self._in_order(block, room)

    def _place(self, call: Call, block: int) -> torch.Tensor | None:
        """Memory of the device for pieces of a sum of the rank before; None where they don't pass through it."""
        return call.received[block][0] if self._kind.adds_in_pieces else None

    def _expecting(self, channel: Channel | None) -> Channel:
        assert channel is not None
        channel.expect(self._specs)
        return channel

    def _in_order(self, block: int, room: Room) -> list[ParameterGradient]:
        """What is in a room, in the order of a block's state. The room's memory isn't theirs."""
        tensors = room.tensors if room.kept is None else room.kept
        pairs = iter(zip(tensors, room.present, strict=True))
        found: list[ParameterGradient] = []
        for key in self._keys(block):
            tensor, is_there = next(pairs) if self._program.state[key].requires_grad else (None, False)
            found.append((tensor if is_there else None, True))
        return found

    @contextmanager
    def _before(self, block: int) -> Generator[Room]:
        """The sums of the rank before."""
        self._ranks.wait_until_agreed(self.go_on)
        with self._expecting(self._ranks.before).take(block, self.go_on) as room:
            yield room

    def _fill(
        self,
        block: int,
        room: Room,
        given: Sequence[torch.Tensor | None],
        place: torch.Tensor | None,
        hand_over: Callable[[int], None],
    ) -> None:
        """Copies gradients to a room, added to those of the rank before if that wasn't done; waits for each group."""
        bus, adds = self._engine.bus, self._kind.adding_op in ("P", "G")
        bus.lock([room.arena])
        with self._before(block) if adds else nullcontext() as before:
            room.present = [gradient is not None for gradient in given]
            if before is not None:
                bus.lock([before.arena])
                room.present = list(map(operator.or_, room.present, before.present))
            hand_over(0)
            for done, group in enumerate(room.groups, start=1):
                if before is not None:
                    before.wait(done)
                for number, cut in group:
                    gradient, out = given[number], room.tensors[number][cut]
                    own = None if gradient is None else gradient[cut]
                    if before is None or not before.present[number]:
                        if own is not None:
                            bus.to_host(out, own, room.arena)
                    else:
                        self._add(before.tensors[number][cut], own, before, out, room, place)
                self._device.synchronize()
                hand_over(done)

    def _add(
        self,
        sum_before: torch.Tensor,
        own: torch.Tensor | None,
        before: Room,
        out: torch.Tensor,
        room: Room,
        place: torch.Tensor | None,
    ) -> None:
        """Writes a piece of the sum of the rank before, and of this one's gradients, to a room."""
        if own is None:
            out.copy_(sum_before)
        elif place is None:
            torch.add(sum_before, own, out=out)
        else:
            # Pieces use this place one after the other, in the order of the stream.
            piece = place[: sum_before.nbytes].view(sum_before.dtype).view(sum_before.shape)
            self._engine.bus.to_device(piece, sum_before, before.arena)
            self._engine.bus.to_host(out, piece.add_(own), room.arena)

    def _keys(self, block: int) -> Sequence[str]:
        return self._program.blocks[block].binding

    def _specs_of(self, keys: Sequence[str]) -> list[TensorSpec]:
        state = self._program.state
        return [state[key].spec for key in keys if state[key].requires_grad]

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


def join(call: Call, block: int) -> None:
    """Adds a block's gradients of the first micro-batch to the sums of the rank before, if some were received."""
    received = call.received.get(block)
    if received is None:
        return
    own = call.parameter_gradients.get(block) or [(None, False)] * len(received)
    sums, add_in_place = added([(tensor, False) for tensor in received], own)
    add_in_place()
    call.set_sums(block, sums)
    call.drop("received", block)
