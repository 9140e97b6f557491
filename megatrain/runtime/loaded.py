"""Loaded: a program on an engine, with everything that its operations look up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.memory.block_image import BlockImage
from megatrain.passes.program import Program
from megatrain.runtime.block import BlockRunner
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
