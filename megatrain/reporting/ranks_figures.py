"""RanksFigures: everything that a report says of a step of several ranks, in any form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.counts import counted
from megatrain.passes.split.dealt_program import DealtProgram
from megatrain.planning.what_if.devices_plan import DevicesPlan
from megatrain.reporting.drawn_ops import Drawn, sources_of
from megatrain.reporting.step_figures import compared
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.schedule import Schedule, schedule_of
from megatrain.scheduler.timing.bands import format_s
from megatrain.scheduler.timing.costs import Hardware
from megatrain.scheduler.timing.dealt_waits import waits_of
from megatrain.scheduler.timing.rank_waits import books_of_ranks
from megatrain.scheduler.timing.ranks_band import RanksBand, ranks_band
from megatrain.scheduler.timing.ranks_run import RanksRun
from megatrain.scheduler.timing.simulate_devices import ONE_HOST, DevicesSimulation, Hosts, simulate_devices

_MODELLED = "modelled from the rates of a machine"


@dataclass(frozen=True)
class RanksFigures:
    """A step of several ranks in figures.

    Args:
        name: Of the model.
        ranks: What each of them runs; ranks with one table have one.
        plan: The step on paper, or None.
        measured: The step as it ran, or None. There is at least one of the two.
        devices: The plan of which the step is; None for a measured one.
        clocks: How the clocks of the ranks are set, in words; empty for a step on paper.
    """

    name: str
    ranks: tuple[Drawn, ...]
    plan: RanksBand | None
    measured: RanksBand | None
    devices: DevicesPlan | None = None
    clocks: str = ""

    @property
    def bands(self) -> tuple[RanksBand, ...]:
        """The plan and the measured step, those that there are."""
        return tuple(band for band in (self.plan, self.measured) if band is not None)

    @property
    def verdict(self) -> tuple[str, ...]:
        """How long a step takes, and what holds it up, in words."""
        lines: list[str] = []
        for band in self.bands:
            lines += [f"{band.name}: {format_s(band.step_s)} a step of {self._who(band)}", *band.words()]
        if self.plan is not None and self.measured is not None:
            lines.append(f"the measured step took {compared(self.measured.step_s, self.plan.step_s)}")
        return (*lines, self.clocks) if self.clocks else tuple(lines)

    def _who(self, band: RanksBand) -> str:
        if self.devices is None or band is not self.plan:
            return counted(len(self.ranks), "rank")
        rate = self.devices.tokens_per_s
        tokens = "" if rate is None else f", {rate:.0f} tokens/s"
        number = counted(len(self.ranks), "device")
        return f"{number}{tokens}, {self.devices.efficiency:.2f} of what as many devices alone would do"


def figures_of_plan(devices: DevicesPlan) -> RanksFigures:
    """The figures of a step on paper."""
    tables = [each.schedule for each in devices.ranks]
    program = devices.ranks[0].program
    program = program.whole if isinstance(program, DealtProgram) else devices.alone.program
    books = books_of_ranks(tables)
    band = _planned(books, devices.simulation, devices.hosts)
    return RanksFigures(program.name, _tables(books, sources_of(program)), band, None, devices)


def figures_of_run(name: str, sources: tuple[str, ...], run: RanksRun, hardware: Hardware | None) -> RanksFigures:
    """The figures of a measured step.

    Args:
        name: Of the model.
        sources: As in `Drawn`.
        run: Of all ranks.
        hardware: A machine on which the same tables are simulated; None draws the measured step alone.
    """
    tables: list[Schedule] = []
    for schedule in run.schedules:
        # Ranks with equal tables have one; dealt blocks are others on each rank.
        known = [] if schedule.kind.is_dealt else tables
        tables.append(next((table for table in known if table == schedule), schedule_of(schedule)))
    books = books_of_ranks(tables)
    waits, origin = waits_of(books, run.hosts), "one training step of a real run"
    measured = ranks_band("measured", origin, books, waits, run.timelines)
    plan = None if hardware is None else _planned(books, simulate_devices(tables, hardware))
    return RanksFigures(name, _tables(books, sources), plan, measured, clocks=run.clocks)


def _planned(books: Sequence[Books], simulation: DevicesSimulation, hosts: Hosts = ONE_HOST) -> RanksBand:
    waits, timelines, stood_s = waits_of(books, hosts.of(len(books))), simulation.timelines, simulation.stood_s
    return ranks_band("plan", _MODELLED, books, waits, timelines, stood_s)


def _tables(books: Sequence[Books], sources: tuple[str, ...]) -> tuple[Drawn, ...]:
    made = {id(its): Drawn(schedule_of(its.table), _own(sources, its), dict(its.ops)) for its in books}
    return tuple(made[id(its)] for its in books)


def _own(sources: tuple[str, ...], its: Books) -> tuple[str, ...]:
    """The lines of a rank's blocks, of those of all blocks."""
    numbers = its.workload.numbers
    return tuple(sources[number] for number in numbers) if numbers and sources else sources
