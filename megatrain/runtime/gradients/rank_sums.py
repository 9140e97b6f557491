"""RankSums: a block's sum of gradients on its way from rank to rank, and the total of all ranks on its way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.errors import ExecuteError
from megatrain.memory.block_image import image, views
from megatrain.memory.host_arena import HostArena
from megatrain.passes.program import Program
from megatrain.ranks.ranks import Ranks
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.sums import ParameterGradient
from megatrain.runtime.streams.events import Aborted
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.spec import TensorSpec


class RankSums:
    """Moves sums of the gradients of a block's parameters between ranks, through host memory.

    Each method gets or gives the gradients of a block's state in its order, None where nothing flowed. On an
    accelerator a sum passes through page-locked memory, of which each stream has that of one block; the thread of the
    stream waits for each copy, since the next block takes the same memory.

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
        return self._made(block, self._device.torch_device)

    def receive(self, out: Sequence[torch.Tensor | None]) -> list[ParameterGradient]:
        """Fills tensors of the device with the sums of the rank before, and returns those that it had."""
        self._ranks.wait_until_agreed(self.go_on)
        trained = [tensor for tensor in out if tensor is not None]
        if self._device.is_host:
            return _in_order(out, trained, self._ranks.take(trained, self.go_on))
        arena, landed = self._rooms("receive", [TensorSpec.of(tensor) for tensor in trained])
        present = self._ranks.take(landed, self.go_on)
        for tensor, content, is_there in zip(trained, landed, present, strict=True):
            if is_there:
                self._engine.bus.to_device(tensor, content, arena)
        self._device.synchronize()
        return _in_order(out, trained, present)

    def pass_on(self, block: int, gradients: Sequence[ParameterGradient]) -> None:
        """Hands a block's sums on to the next rank."""
        self._ranks.pass_on(self._on_host("send", block, gradients), self._specs(block), self.go_on)

    def spread(self, block: int, gradients: Sequence[ParameterGradient]) -> list[ParameterGradient]:
        """Gives the totals of a block, which are on the last rank, to all others.

        Returns:
            Them on the host: on a device that has host memory itself, the same tensors; else until the next call.
        """
        found = self._on_host("total", block, gradients)
        self._ranks.spread(found, self._specs(block), self.go_on)
        if self._device.is_host:
            return list(gradients)
        totals = iter(found)
        return [(next(totals) if is_trained else None, False) for is_trained in self._trained(block)]

    def total(self, block: int) -> list[ParameterGradient]:
        """Gets the totals of a block from the last rank; on an accelerator they are there until the next call."""
        if self._device.is_host:
            made = self._made(block, torch.device("cpu"))
            trained = [tensor for tensor in made if tensor is not None]
        else:
            trained = self._rooms("total", self._specs(block))[1]
            rooms = iter(trained)
            made = [next(rooms) if is_trained else None for is_trained in self._trained(block)]
        return _in_order(made, trained, self._ranks.gather(trained, self.go_on))

    def _keys(self, block: int) -> Sequence[str]:
        return self._program.blocks[block].binding

    def _specs(self, block: int) -> list[TensorSpec]:
        state = self._program.state
        return [state[key].spec for key in self._keys(block) if state[key].requires_grad]

    def _trained(self, block: int) -> list[bool]:
        return [self._program.state[key].requires_grad for key in self._keys(block)]

    def _rooms(self, stream: str, specs: Sequence[TensorSpec]) -> tuple[HostArena, list[torch.Tensor]]:
        """Host memory of a stream for tensors of these shapes and dtypes, contiguous."""
        plain = [TensorSpec(spec.shape, spec.dtype) for spec in specs]
        layout = image([(str(number), spec) for number, spec in enumerate(plain)])
        arena = self._engine.sums[stream].ensure(layout.nbytes)
        return arena, views(layout, arena.tensor)

    def _made(self, block: int, place: torch.device) -> list[torch.Tensor | None]:
        entries = [self._program.state[key] for key in self._keys(block)]
        # Contiguous, so that each goes from memory to memory; an update gets it in its parameter's layout.
        return [
            torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device=place) if entry.requires_grad else None
            for entry in entries
        ]

    def _on_host(self, stream: str, block: int, gradients: Sequence[ParameterGradient]) -> list[torch.Tensor | None]:
        """The gradients of what is trained, on the host; on an accelerator until the stream's next call."""
        given = self._given(block, gradients)
        if self._device.is_host:
            return given
        arena, rooms = self._rooms(stream, self._specs(block))
        for room, gradient in zip(rooms, given, strict=True):
            if gradient is not None:
                self._engine.bus.to_host(room, gradient, arena)
        self._device.synchronize()
        return [None if gradient is None else room for room, gradient in zip(rooms, given, strict=True)]

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


def _in_order(
    all_of: Sequence[torch.Tensor | None], trained: Sequence[torch.Tensor], present: Sequence[bool]
) -> list[ParameterGradient]:
    there = {id(tensor) for tensor, is_there in zip(trained, present, strict=True) if is_there}
    return [(tensor if id(tensor) in there else None, False) for tensor in all_of]
