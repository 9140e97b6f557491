"""Loaded: a program on an engine, with everything that its operations look up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatrain.errors import ExecuteError
from megatrain.memory.block_image import BlockImage
from megatrain.passes.program import Program
from megatrain.runtime.block import HIDDEN_DRAWS, BlockRunner
from megatrain.runtime.draws import Draws
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.flow import Facts
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A program whose state is in the host store of an engine.

    Args:
        program: The blocks.
        images: Layout of each block's state.
        runners: The runner of each block.
        facts: Where gradients flow.
        names: The values' names, by index.
        specs: The values' shapes and dtypes, by index.
        written_buffers: The value with which a buffer enters, by the value that it is given.
        draws: The random calls of a forward; None if they can't be made without it.
    """

    program: Program
    images: Sequence[BlockImage]
    runners: list[BlockRunner]
    facts: Facts
    names: Sequence[str]
    specs: Sequence[TensorSpec]
    written_buffers: Mapping[str, str]
    draws: Draws | None

    @staticmethod
    def of(program: Program, engine: Engine, *, is_training: bool) -> Loaded:
        """Brings a program onto an engine.

        Raises:
            ExecuteError: See `Engine.adopt`.
            WeightsError: See `Engine.adopt`.
        """
        return Loaded(
            program=program,
            images=engine.adopt(program),
            runners=[engine.runner(program.templates[b.template]) for b in program.blocks],
            facts=Facts.of(program, is_training=is_training),
            names=list(program.values),
            specs=[value.spec for value in program.values.values()],
            written_buffers={new: name for name, key in program.buffers for k, new in program.commits if k == key},
            draws=Draws.of(program) if is_training else None,
        )

    def check_recomputed(self, saves: Collection[int]) -> None:
        """Checks that a second run of each block that is recomputed draws the random numbers of its first.

        Args:
            saves: Blocks whose graph is kept.

        Raises:
            ExecuteError: Naming the block whose random numbers nothing repeats.
        """
        for block in self.program.blocks:
            is_recomputed = block.index not in saves and any(self.facts.needs_grad[block.index])
            if is_recomputed and self.program.templates[block.template].hides_draws:
                raise ExecuteError(HIDDEN_DRAWS.format(f"block {block.index} {block.name}, which is recomputed, has"))
