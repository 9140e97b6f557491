"""Schedule: a table, with text, check, simulation and all other questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import networkx as nx

from megatrain.checks import checked, count, instance_of, optional
from megatrain.counts import counted
from megatrain.garbage import paused_collection
from megatrain.scheduler.check.instruction_rules import check_instructions
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.dependency import dependency_graph, derive_waits, resident_blocks, weight_bindings
from megatrain.scheduler.explain import diff, gantt, why
from megatrain.scheduler.instructions import Instructions, emit
from megatrain.scheduler.simulate import Costs, Simulation, simulate
from megatrain.scheduler.table import Position, Table
from megatrain.scheduler.text import parse_table, table_text
from megatrain.scheduler.workload import Workload
from megatrain.sizes import format_bytes


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
        """Lists the ops that an op waits for, back to the start of the step; see `scheduler.printed.why`.

        Raises:
            ScheduleError: If there is no such op.
        """
        return why(self, op, tick)

    @checked()
    def diff(self, other: Table) -> str:
        """Says how another schedule differs, in words and then op by op; see `scheduler.printed.diff`.

        Returns:
            A line if they are equal.
        """
        return diff(self, other)

    @checked(width=count(1, 10_000))
    def gantt(self, costs: Costs, *, width: int = 100) -> str:
        """The simulated step as text, a row per stream; see `megatrain.scheduler.explain.gantt`."""
        return gantt(self, costs, width=width)

    @checked()
    def simulate(self, costs: Costs) -> Simulation:
        """Runs the schedule on paper; see `megatrain.scheduler.simulate.simulate`."""
        return simulate(self, costs)


def schedule_of(table: Table) -> Schedule:
    """The schedule of a table."""
    return Schedule(**{part.name: getattr(table, part.name) for part in fields(table)})
