"""Loaded: a program on an engine, with everything that its operations look up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatrain.counts import counted
from megatrain.errors import ExecuteError
from megatrain.memory.block_image import BlockImage
from megatrain.passes.interpret import looks_in_backward
from megatrain.passes.kept_results import kept_results
from megatrain.passes.program import Program, shared_templates
from megatrain.runtime.block import HIDDEN_DRAWS, BlockRunner
from megatrain.runtime.engine import Engine
from megatrain.runtime.gradients.flow import Facts
from megatrain.runtime.random_calls import Draws
from megatrain.scheduler.from_program import merge_programs
from megatrain.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A program whose state is in the host store of an engine.

    Args:
        program: The blocks.
        images: Layout of each block's state.
        runners: The runner of each block.
        facts: Where gradients flow.
        names: The values' names, by their index in the schedule's workload; None for those of other micro-batches.
            Behind the program's values come the results that blocks may keep.
        entering: The value with which each buffer that the forward writes begins.
        written: The buffers that take a value, by the value's name.
        draws: The random calls of a whole forward, on all devices; None if they can't be made without it.
        results: The names of the results that each block may keep; blocks that have none are missing.
        looking: Blocks in whose backward the user's code may look at buffers, if the forward writes any.
    """

    program: Program
    images: Sequence[BlockImage]
    runners: list[BlockRunner]
    facts: Facts
    names: Sequence[str | None]
    entering: Mapping[str, str]
    written: Mapping[str, Sequence[str]]
    draws: Draws | None
    results: Mapping[int, Sequence[str]]
    looking: frozenset[int]

    @staticmethod
    def of_each(
        programs: Sequence[Program], merged: Sequence[Program] | None, engine: Engine, *, is_training: bool
    ) -> list[Loaded]:
        """Brings the programs of a step's micro-batches onto an engine, each once.

        Args:
            programs: One per micro-batch.
            merged: The same, in the order in which their workloads were merged; None is that of first use.
            engine: Holds the state.
            is_training: The schedule has a backward.

        Raises:
            ExecuteError: See `Engine.adopt`.
            WeightsError: See `Engine.adopt`.
            ScheduleError: If they can't share blocks.
        """
        merged = programs if merged is None else merged
        distinct = {id(program): program for program in merged}
        if distinct.keys() != {id(program) for program in programs}:
            raise ExecuteError(
                "merged has other programs than the micro-batches.\n"
                "  A schedule serves the programs that it was made for.\n"
                "  Give the programs that run, or None."
            )
        places = dict(zip(map(id, merged), merge_programs(merged).places, strict=True))
        known = {
            key: Loaded._of(program, places[key], engine, is_training=is_training) for key, program in distinct.items()
        }
        return [known[id(program)] for program in programs]

    @staticmethod
    def _of(program: Program, places: Sequence[int | None], engine: Engine, *, is_training: bool) -> Loaded:
        results = {block.index: [name for name, _ in found] for block, found in kept_results(program)}
        names = [*program.values, *chain.from_iterable(results.values())]
        shared = shared_templates(program)
        return Loaded(
            program=program,
            images=engine.adopt(program),
            runners=[
                engine.runner(program.templates[b.template], is_shared=b.template in shared) for b in program.blocks
            ],
            facts=Facts.of(program, is_training=is_training),
            names=[None if place is None else names[place] for place in places],
            entering={key: name for name, key in program.buffers},
            written={new: [key for key, name in program.commits if name == new] for _, new in program.commits},
            draws=Draws.of(program) if is_training else None,
            results=results,
            looking=frozenset(
                b.index
                for b in program.blocks
                if program.commits and looks_in_backward(program.templates[b.template].graph)
            ),
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


def check_fits(programs: Sequence[Program], schedule: Schedule) -> None:
    """Checks that a schedule is one of these programs.

    Raises:
        ExecuteError: If it has other micro-batches or blocks.
    """
    if len(programs) != schedule.kind.micro_batches:
        raise ExecuteError(
            f"the schedule has {counted(schedule.kind.micro_batches, 'micro-batch')}; programs: {len(programs)}.\n"
            "  Each micro-batch runs a program; several may run the same program.\n  Give one program per micro-batch."
        )
    for program in programs:
        if schedule.num_blocks != len(program.blocks):
            raise ExecuteError(
                f"the schedule has {counted(schedule.num_blocks, 'block')}, the program has {len(program.blocks)}.\n"
                "  A schedule runs the program that it was made for.\n  Give megatrain.schedule(program)."
            )
