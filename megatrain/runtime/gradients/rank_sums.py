"""RankSums: a block's sum of gradients on its way from rank to rank, and the total of all ranks on its way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.ranks.ranks import Ranks
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.sums import ParameterGradient
from megatrain.runtime.streams.events import Aborted
from megatrain.scheduler.step_kind import StepKind
from megatrain.tracer.spec import TensorSpec


class RankSums:
    """Moves sums of the gradients of a block's parameters between ranks, through host memory.

    Each method gets or gives the gradients of a block's state in its order, None where nothing flowed.

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
        landed = trained if self._device.is_host else [torch.empty_like(t, device="cpu") for t in trained]
        present = self._ranks.take(landed, self.go_on)
        for tensor, content, is_there in zip(trained, landed, present, strict=True):
            if is_there and content is not tensor:
                tensor.copy_(content)
        return _in_order(out, trained, present)

    def pass_on(self, block: int, gradients: Sequence[ParameterGradient]) -> None:
        """Hands a block's sums on to the next rank."""
        self._ranks.pass_on(self._given(block, gradients), self._specs(block), self.go_on)

    def spread(self, block: int, gradients: Sequence[ParameterGradient]) -> None:
        """Gives the totals of a block, which are on the last rank, to all others."""
        self._ranks.spread(self._given(block, gradients), self._specs(block), self.go_on)

    def total(self, block: int) -> list[ParameterGradient]:
        """Gets the totals of a block from the last rank, in new host memory."""
        made = self._made(block, torch.device("cpu"))
        trained = [tensor for tensor in made if tensor is not None]
        return _in_order(made, trained, self._ranks.gather(trained, self.go_on))

    def _keys(self, block: int) -> Sequence[str]:
        return self._program.blocks[block].binding

    def _specs(self, block: int) -> list[TensorSpec]:
        state = self._program.state
        return [state[key].spec for key in self._keys(block) if state[key].requires_grad]

    def _made(self, block: int, place: torch.device) -> list[torch.Tensor | None]:
        entries = [self._program.state[key] for key in self._keys(block)]
        # Contiguous, so that each goes from memory to memory; an update gets it in its parameter's layout.
        return [
            torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device=place) if entry.requires_grad else None
            for entry in entries
        ]

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
            if gradient is not None and not self._device.is_host:
                gradient = self._device.to_host(gradient)
            found.append(gradient)
        return found


def _in_order(
    all_of: Sequence[torch.Tensor | None], trained: Sequence[torch.Tensor], present: Sequence[bool]
) -> list[ParameterGradient]:
    there = {id(tensor) for tensor, is_there in zip(trained, present, strict=True) if is_there}
    return [(tensor if id(tensor) in there else None, False) for tensor in all_of]
