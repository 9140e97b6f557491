"""Schedule: a table, with text, check, simulation and all other questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import networkx as nx

from megatrain.base.checks import checked, count, instance_of, optional
from megatrain.base.counts import counted
from megatrain.base.garbage import paused_collection
from megatrain.base.sizes import format_bytes
from megatrain.scheduler.check.instruction_rules import check_instructions
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.dependency import dependency_graph, derive_waits, resident_blocks, weight_bindings
from megatrain.scheduler.explain import diff, gantt, why
from megatrain.scheduler.instructions import Instructions, emit
from megatrain.scheduler.simulate import Costs, Simulation, simulate
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.text import parse_table, table_text
from megatrain.scheduler.workload import Workload


class Schedule(Table):
    """Everything one step does, in order, and the bytes it takes; made by `schedule`, printed by `str`.

    `Table` documents its fields.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return table_text(self)

    def __repr__(self) -> str:
        shape = f"{counted(self.num_blocks, 'block')}, {counted(len(self.ticks), 'tick')}"
        return f"<Schedule: {shape}, {self.kind.mode}, peak {format_bytes(self.peak_bytes)}>"

    @staticmethod
    def parse(text: str, workload: Workload | None = None) -> Schedule:
        """Reads what `str` wrote; the result equals the original.

        Raises:
            ScheduleError: If the text isn't a schedule, with the number of the line.
        """
        return schedule_of(parse_table(text, workload))

    @property
    @paused_collection()
    def instructions(self) -> Instructions:
        """The checked instructions for the runtime: every op with its waits, its bytes and its frees.

        Raises:
            ScheduleError: If the schedule doesn't know its workload, or isn't safe for it.
        """
        made = emit(self)
        self.check(instructions=made)
        return made

    def bindings(self) -> dict[Position, Position]:
        """For each op of compute of a block with state, the position of the `W` whose slot it reads."""
        return weight_bindings(self)

    def resident(self) -> tuple[int, ...]:
        """Blocks whose weights stay on the device from their forward to their backward: both read one `W`."""
        return resident_blocks(self)

    def waits(self) -> Mapping[Position, tuple[Position, ...]]:
        """For each op, the ops of other streams whose completion it waits for; none follows from another."""
        return derive_waits(self)

    def to_networkx(self) -> nx.DiGraph[Position]:
        """The dependency graph over positions; see `dependency_graph`."""
        return dependency_graph(self)

    @checked()
    @paused_collection()
    def check(self, workload: Workload | None = None, *, instructions: Instructions | None = None) -> None:
        """Proves that the schedule is safe for its workload, or for another one; see `check_schedule`.

        Args:
            workload: The workload that it should run; None is its own.
            instructions: Instructions to check as well.

        Raises:
            ScheduleError: With the rule that is broken, and the rows around the place.
        """
        workload = self.known_workload() if workload is None else workload
        check_schedule(self, workload)
        if instructions is not None:
            check_instructions(instructions, self, workload)

    @checked(op=instance_of(str), tick=optional(count()))
    def why(self, op: str, tick: int | None = None) -> str:
        """Lists the ops that an op waits for, latest first, then those that the latest waits for, back to the start.

        Args:
            op: The op as the table prints it, without a star: `"B3"`, `"W3@1"`, `"A1.0"`.
            tick: Its tick, if the op occurs several times; None takes the first.

        Raises:
            ScheduleError: If there is no such op (at that tick).
        """
        return why(self, op, tick)

    @checked()
    def diff(self, other: Table) -> str:
        """Says how another differs: first how much, in words and bytes, then which ops. Equal ones take a line.

        An op has moved if it shares a tick with another op of the compute stream, or has another order with it: one
        more tick at the beginning moves no op.
        """
        return diff(self, other)

    @checked(width=count(1, 10_000))
    def gantt(self, costs: Costs, *, width: int = 100) -> str:
        """Draws the streams of a simulated step: the letter of the op that takes most of each of `width` slices.

        `.` is where none runs. Capitals are ops of the longest chain of dependencies, which is why the step takes that
        long.

        Raises:
            ScheduleError: If the schedule doesn't know its workload, or the measurement is of another one.
        """
        return gantt(self, costs, width=width)

    @checked()
    @paused_collection()
    def simulate(self, costs: Costs) -> Simulation:
        """Runs every op on paper as soon as its stream is free and its dependencies are done.

        Raises:
            ScheduleError: If the schedule doesn't know its workload, or the measurement is of another one.
        """
        return simulate(self, costs)


def schedule_of(table: Table) -> Schedule:
    """The schedule of a table."""
    return Schedule(**{part.name: getattr(table, part.name) for part in fields(table)})
