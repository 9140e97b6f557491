"""The table of all machines: on which a step fits, with what, and how long it takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.device.reserve import of_card
from megatrain.hardware.presets import GIB, PRESETS
from megatrain.planning.what_if.largest import missing
from megatrain.scheduler.timing.bands import format_s
from megatrain.sizes import format_bytes
from megatrain.sizing.best_batch import StepSplit

_HEADS = ("machine", "memory", "micro-batches", "device", "host", "a step", "tokens/s", "bound by")


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A step on one machine.

    Args:
        machine: Its name.
        batch: The best that was found; None if nothing could be planned.
        refused: Why not, in a line.
    """

    machine: str
    batch: StepSplit | None
    refused: str = ""

    def lacks(self) -> str:
        """What the step lacks on this machine; empty if it fits."""
        if self.batch is None:
            return self.refused
        plan, machine = self.batch.plan, PRESETS[self.machine]
        if machine.is_unified and not plan.fits:
            memory = int(machine.gib * GIB)
            needed = plan.schedule.device_bytes + plan.host.total_bytes + of_card(memory)
            if needed > memory:
                return f"{format_bytes(needed - memory)} of the memory are missing"
        return missing(plan) or ""

    def cells(self) -> tuple[str, ...]:
        """The row as text; where the step doesn't fit, what is missing."""
        memory = format_bytes(int(PRESETS[self.machine].gib * GIB))
        if self.batch is None:
            return self.machine, memory, self.refused
        plan, lacks = self.batch.plan, self.lacks()
        if lacks:
            return self.machine, memory, f"doesn't fit: {lacks}"
        assert plan.simulation is not None
        step_s, tokens = plan.simulation.step_s, plan.tokens_per_step
        busy = plan.simulation.busy[plan.simulation.bound]
        return (
            self.machine,
            memory,
            f"{self.batch.count} x {self.batch.size}",
            format_bytes(plan.schedule.device_bytes),
            format_bytes(plan.host.total_bytes),
            format_s(step_s),
            "" if tokens is None else f"{tokens / step_s:.0f}",
            f"{plan.simulation.bound} {busy:.0%}",
        )


def table_text(rows: Sequence[MachineRow]) -> str:
    """The rows under each other; a text that takes the place of figures runs over their columns."""
    cells = [_HEADS, *(row.cells() for row in rows)]
    whole = [row for row in cells if len(row) == len(_HEADS)]
    widths = [max(len(row[i]) for row in (whole if i > 1 else cells)) for i in range(len(_HEADS))]
    right = range(3, len(_HEADS) - 1)
    return "\n".join(
        "  ".join(
            text.rjust(widths[i]) if i in right and len(row) > i else text.ljust(widths[i])
            for i, text in enumerate(row)
        ).rstrip()
        for row in cells
    )
