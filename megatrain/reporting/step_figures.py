"""StepFigures: everything that a report says of a step, in any form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatrain.reporting.address_maps import AddressMap, address_maps
from megatrain.reporting.drawn_ops import Drawn
from megatrain.reporting.memory_curve import Curve, curve, held_on_device, held_on_host
from megatrain.reporting.peak_holders import AtPeak, at_peak
from megatrain.scheduler.instructions import Instructions
from megatrain.scheduler.items import Effect
from megatrain.scheduler.lifetimes.books import Books
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.bands import Band


@dataclass(frozen=True)
class StepFigures:
    """A step in figures: as planned, and as measured.

    Args:
        name: Of the model.
        schedule: What runs.
        sources: The user's line with which each block begins, `model.py:41: ...`; empty where none is known.
        instructions: Of the schedule.
        plan: The step on paper.
        measured: The step as it ran, or None.
    """

    name: str
    schedule: Schedule
    sources: tuple[str, ...]
    instructions: Instructions
    plan: Band
    measured: Band | None

    @property
    def bands(self) -> tuple[Band, ...]:
        """The plan, and the measured step if there is one."""
        return (self.plan,) if self.measured is None else (self.plan, self.measured)

    @property
    def verdict(self) -> tuple[str, ...]:
        """What bounds the step, in words: a line for the plan, and two for the measured step."""
        lines = [self.plan.words()]
        if self.measured is not None:
            lines.append(self.measured.words())
            lines.append(f"the measured step took {compared(self.measured.step_s, self.plan.step_s)}")
        return tuple(lines)

    @cached_property
    def peak(self) -> AtPeak:
        """What takes the device's memory at the peak."""
        return at_peak(self.schedule, self._books)

    @cached_property
    def device_curves(self) -> tuple[Curve, ...]:
        """Of each band, the bytes that live on the device: planned sizes at the moments of the band."""
        held = held_on_device(self._books, self.instructions)
        return tuple(curve(held, band) for band in self.bands)

    @cached_property
    def host_curves(self) -> tuple[Curve, ...]:
        """Likewise the bytes of the host: parked values, and gradients that wait."""
        held = held_on_host(self._books, self.instructions)
        return tuple(curve(held, band) for band in self.bands)

    @cached_property
    def maps(self) -> tuple[AddressMap, ...]:
        """The arenas over the ticks."""
        return address_maps(self.schedule, self._books, self.instructions)

    @property
    def drawn(self) -> Drawn:
        """What runs."""
        return Drawn(self.schedule, self.sources, self.effects)

    @cached_property
    def effects(self) -> Mapping[Position, Effect]:
        """What each op does: the bytes that it moves, its floating-point operations."""
        return dict(self._books.ops)

    @cached_property
    def _books(self) -> Books:
        return Books(self.schedule)


def compared(measured_s: float, plan_s: float) -> str:
    """Says how much longer the measured step took than the plan.

    >>> compared(1.3, 1.0)
    '30% longer than the plan'
    """
    ratio = measured_s / plan_s if plan_s > 0 else 1.0
    if abs(ratio - 1) < 0.005:
        return "as long as the plan"
    if ratio >= 2:
        return f"{ratio:.3g} times as long as the plan"
    return f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'} than the plan"
