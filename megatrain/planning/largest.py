"""largest(): the largest size of a step that fits, found by planning one size after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.counts import counted
from megatrain.errors import MegatrainError, OptionError, ScheduleError
from megatrain.planning.host_plan import DEPTH, SEQUENCE
from megatrain.planning.planned_step import PlannedFor, PlannedStep
from megatrain.sizes import format_bytes

MOST_OF_A_SIZE = 2**30
# A capture takes as long as there are layers, so many more of them aren't tried.
_MOST_TIMES_DEEPER = 8
# Sequences are tried in steps of so many tokens: each needs a capture.
_OF_SEQUENCE = 128


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits, and why the next doesn't; prints itself.

    Args:
        name: Of the size.
        size: The largest.
        plan: Of this size.
        too_large: The smallest size that was planned and doesn't fit; None if all fit.
        refused: Why it doesn't fit, in a line.
        num_planned: How many sizes were planned.
    """

    name: str
    size: int
    plan: PlannedStep = field(repr=False)
    too_large: int | None
    refused: str
    num_planned: int

    def __str__(self) -> str:
        text = f"largest {self.name}: {self.size}"
        if self.too_large is None:
            return f"{text}, and no larger one was planned; all {self.num_planned} that were fit"
        return f"{text}; at {self.too_large}: {self.refused} ({counted(self.num_planned, 'size')} planned)"


def largest(
    plan: PlannedStep, what: str | Callable[[int], Any], multiple: int | None = None, most: int | None = None
) -> Largest:
    """Doubles a size while it fits, then halves the gap.

    Args:
        plan: One that can be planned again.
        what: The size, or a function that makes a model and its inputs of a size.
        multiple: Sizes are multiples of it; None is 1, or 128 of sequences that are as long.
        most: No larger size is tried; None is eight times the depth, and no bound of other sizes.

    Raises:
        OptionError: If the size can't change.
        ScheduleError: If the smallest doesn't fit.
    """
    assert plan.asked is not None
    asked, name = plan.asked, what if isinstance(what, str) else "size"
    start = 1
    if isinstance(what, str):
        start = _size(asked, what)
        multiple = multiple or (_OF_SEQUENCE if what == SEQUENCE and start >= _OF_SEQUENCE else 1)
    multiple = multiple or 1
    most = most or (_MOST_TIMES_DEEPER * start if what == DEPTH else MOST_OF_A_SIZE)

    def plan_at(size: int, options: Mapping[str, Any]) -> PlannedStep:
        return asked.again({name: size, **options}) if isinstance(what, str) else asked.of(what(size), options)

    # What fits shows without times, for which plans are searched longer.
    best, size, too_large, refused, count = _bisected(
        lambda size: plan_at(size, {"hardware": None}), max(1, min(start, most) // multiple), multiple, most // multiple
    )
    if best is None:
        raise ScheduleError(
            f"no {name} fits: at {too_large} {refused}.\n  Each was planned with the other options of this plan.\n"
            "  Give it more memory; plan.check() of a step that doesn't fit says what else helps."
        )
    best = best if plan.hardware is None else plan_at(size, {})
    return Largest(name, size, best, too_large, refused, count)


def _size(asked: PlannedFor, name: str) -> int:
    if name not in asked.sizes:
        raise OptionError(
            f"the {name} of this plan can't change: {asked.fixed.get(name, 'it has no such size')}.\n"
            f"  What can change is {' and '.join(asked.sizes) or 'nothing'}.\n"
            "  Give a function that makes the model and its inputs of a size: plan.largest(lambda n: (model, inputs))."
        )
    return asked.sizes[name]


def _bisected(
    plan_at: Callable[[int], PlannedStep], start: int, multiple: int, most: int
) -> tuple[PlannedStep | None, int, int | None, str, int]:
    """Returns the plan of the largest that fits, its size, the smallest that doesn't, why, and how many were tried."""
    tried: dict[int, str | None] = {}
    plans: dict[int, PlannedStep] = {}

    def fits(number: int) -> bool:
        if number not in tried:
            try:
                plans[number] = plan_at(number * multiple)
                tried[number] = missing(plans[number])
            except MegatrainError as error:
                if number == start:
                    raise  # nothing that fits is known yet, and this has nothing to do with memory
                tried[number] = str(error).splitlines()[0]
        return tried[number] is None

    low, high = 0, start
    while fits(high) and low < most:
        low, high = high, min(2 * high, most)
    if tried[high] is None:
        low = high
        return plans[low], low * multiple, None, "", len(tried)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return plans.get(low), low * multiple, high * multiple, tried[high] or "", len(tried)


def missing(plan: PlannedStep) -> str | None:
    """What a plan lacks, in words; None if it fits."""
    device, host = plan.missing_device_bytes, plan.missing_host_bytes
    lacks = [f"{format_bytes(n)} of the {what}" for n, what in ((device, "device"), (host, "host")) if n]
    if plan.too_small is not None and not lacks:
        return plan.too_small.splitlines()[0]
    return f"{' and '.join(lacks)} are missing" if lacks else None
