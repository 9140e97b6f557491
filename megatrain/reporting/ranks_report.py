"""RanksReport: a step of several ranks in one picture."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatrain.checks import PATH, checked
from megatrain.counts import counted
from megatrain.reporting.ranks_figures import RanksFigures
from megatrain.reporting.ranks_page import ranks_page_text
from megatrain.reporting.ranks_trace import ranks_trace_text
from megatrain.reporting.report_file import write_report


@dataclass(frozen=True, slots=True, repr=False)
class RanksReport:
    """A step of several ranks in pictures; made by `report`, printed by `str`.

    Args:
        figures: Everything that it says.
    """

    figures: RanksFigures

    @property
    def verdict(self) -> tuple[str, ...]:
        """How long the step takes, which stream of which rank holds it up, and which one waits longest for others."""
        return self.figures.verdict

    @checked(path=PATH)
    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the page.

        Raises:
            OptionError: If the file can't be written.
        """
        write_report(path, ranks_page_text(self.figures))

    @checked(path=PATH)
    def perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes the same as a trace that https://ui.perfetto.dev opens: Chrome's JSON format.

        Each rank is a process and each stream a thread in it. Arrows lead from each `W` to the ops that read its
        weights, from each `G` to its `U`, and from an op to the one of another rank that needs its sum, its total or
        its update.

        Raises:
            OptionError: If the file can't be written.
        """
        write_report(path, ranks_trace_text(self.figures))

    def __str__(self) -> str:
        ranks = self.figures.ranks
        number = counted(sum(len(each.schedule.ops) for each in ranks), "op")
        blocks = counted(ranks[0].schedule.num_blocks, "block")
        head = f"report: {self.figures.name}, {counted(len(ranks), 'rank')}, {blocks}, {number}"
        return "\n".join([head, *("  " + line.replace("; ", "\n    ") for line in self.verdict)])

    def __repr__(self) -> str:
        bands = " and ".join(band.name for band in self.figures.bands)
        return f"<RanksReport {self.figures.name}: {bands}, {counted(len(self.figures.ranks), 'rank')}>"
