"""Alternatives: the same step with other budgets, micro-batches, precisions and updates, planned and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatrain.errors import MegatrainError
from megatrain.planning.model_sizes import LORA, MICRO_BATCH
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.what_if.variation import IN_PYTHON, NUMBERS, Spelling, Variation, as_printed, splits, varied
from megatrain.scheduler.timing.bands import format_s
from megatrain.sizes import format_bytes

# Parts of what the step takes, and of a budget that it fills.
_LESS, _MORE = (0.25, 0.5, 0.75), (1.25, 1.5, 2.0)
_FULL = 0.8
_RANK = 16


@dataclass(frozen=True, slots=True)
class Alternative:
    """One step of a table of alternatives.

    Args:
        change: What is other than in the plan; nothing in the row of the plan itself.
        plan: The step; None if it can't be planned.
        step_s: Seconds of a step; None without a machine.
        refused: Why it can't be planned, in a line; or None.
    """

    change: Variation
    plan: PlannedStep | None = field(repr=False)
    step_s: float | None = None
    refused: str | None = None

    @staticmethod
    def of(change: Variation, plan: PlannedStep) -> Alternative:
        """The row of a planned step."""
        simulation = plan.simulation
        return Alternative(change, plan, None if simulation is None else simulation.step_s)

    @property
    def fits(self) -> bool:
        """Whether device and host have room for it."""
        return self.plan is not None and self.plan.fits

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None without a machine, or without token ids."""
        tokens, seconds = None if self.plan is None else self.plan.tokens_per_step, self.step_s
        return None if tokens is None or not seconds else tokens / seconds

    def cost(self) -> tuple[float, int, int]:
        """Seconds (of a token, if known), bytes of the device and of the host."""
        assert self.plan is not None
        seconds = 1 / self.tokens_per_s if self.tokens_per_s else self.step_s or 0.0
        return seconds, self.plan.schedule.device_bytes, self.plan.host.total_bytes


@dataclass(frozen=True, slots=True)
class Alternatives:
    """A table of steps, the planned one first; prints itself.

    Args:
        rows: The steps.
        spelling: How changes are written.
    """

    rows: tuple[Alternative, ...]
    spelling: Spelling = field(default_factory=lambda: IN_PYTHON, repr=False, compare=False)

    def front(self) -> tuple[Alternative, ...]:
        """Those that fit of which no other is as fast, as small on the device and on the host, and better in one.

        A row is compared with those that change the training's numbers no more than it does. Without a machine there
        are no times, and none is on the front.
        """
        known = [row for row in self.rows if row.fits and row.step_s is not None]
        unbeaten = [row for row in known if not any(_beats(other, row) for other in known)]
        first = {row.cost(): row for row in reversed(unbeaten)}  # of those that take the same
        return tuple(row for row in unbeaten if first[row.cost()] is row)

    def __str__(self) -> str:
        front = {id(row) for row in self.front()}
        heads = ("", "change", "numbers", "fits", "device", "host", "a step", "tokens/s")
        cells = [heads, *(self._cells(row, is_on_front=id(row) in front) for row in self.rows)]
        has_time = any(row.step_s is not None for row in self.rows)
        columns = [c for c in zip(*cells, strict=True) if any(c[1:]) or c[0] in heads[1:5]]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(
                text.rjust(width) if head in heads[4:] else text.ljust(width)
                for text, width, head in zip(row, widths, [column[0] for column in columns], strict=True)
            ).rstrip()
            for row in zip(*columns, strict=True)
        ]
        notes = ["numbers: same; rounding: sums in another order; other: another training"]
        if has_time:
            notes.append("*: nothing else here that changes the numbers no more is as fast with as little memory")
        notes += [f"{row.change.words(self.spelling)}: {row.refused}" for row in self.rows if row.refused]
        return "\n".join([f"alternatives: {len(self.rows) - 1}", *lines, *notes])

    def _cells(self, row: Alternative, *, is_on_front: bool) -> tuple[str, ...]:
        head = "*" if is_on_front else "", row.change.words(self.spelling), row.change.numbers
        if row.plan is None:
            return *head, "refused", "", "", "", ""
        step_s, tokens = row.step_s, row.tokens_per_s
        return (
            *head,
            "yes" if row.fits else "no",
            format_bytes(row.plan.schedule.device_bytes),
            format_bytes(row.plan.host.total_bytes),
            "" if step_s is None else format_s(step_s),
            "" if tokens is None else f"{tokens:.0f}",
        )


def alternatives(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> Alternatives:
    """Plans the step with other options.

    Args:
        plan: One that can be planned again.
        spelling: How options are written; what can't be written isn't tried.
    """
    rows = [Alternative.of(Variation(), plan)]
    for each in dict.fromkeys(_candidates(plan)):
        if each.can_be_given(spelling):
            rows.append(planned(plan, each))
    return Alternatives(tuple(rows), spelling)


def planned(plan: PlannedStep, other: Variation) -> Alternative:
    """Plans a step with a change."""
    assert plan.asked is not None
    try:
        return Alternative.of(other, plan.asked.again(dict(other.values)))
    except MegatrainError as error:
        return Alternative(other, None, refused=str(error).splitlines()[0])


def other_trainings(plan: PlannedStep) -> Iterator[Variation]:
    """Changes of precision, masters, updates and of what is trained: those that take less memory, or less time."""
    assert plan.asked is not None
    options, sizes = plan.asked.options, plan.asked.sizes
    if options["max_grad_norm"] is not None and options["optimizer"] is not None:
        yield varied(max_grad_norm=None, overlap=True)
    if plan.precision == "fp32":
        yield varied(precision="bf16")
    elif options["masters"] == "exact" and options["optimizer"] is not None:
        yield varied(masters="rounded")
    if sizes.get(LORA) == 0:
        yield varied(lora=_RANK)
    given = options["optimizer"]
    if isinstance(given, str | type):
        yield from (
            varied(optimizer=name)
            for name in ("Adafactor", "SGD")
            if name != (given if isinstance(given, str) else given.__name__)
        )


def _candidates(plan: PlannedStep) -> Iterator[Variation]:
    assert plan.asked is not None
    options, sizes = plan.asked.options, plan.asked.sizes
    taken, budget = plan.schedule.device_bytes, plan.device_memory
    yield from (varied(device_memory=as_printed(int(part * min(taken, budget or taken)))) for part in _LESS)
    if budget is not None and taken > _FULL * budget:
        yield from (varied(device_memory=as_printed(int(part * budget))) for part in _MORE)
    if MICRO_BATCH in sizes:
        yield from splits(sizes[MICRO_BATCH], plan.schedule.kind.micro_batches, (-4, -2, 2, 4))
    if options["activations"] != "auto":
        yield varied(activations="auto")
    if options["optimizer"] is not None:
        yield varied(overlap=not options["overlap"])
    yield from other_trainings(plan)
    if plan.precision == "bf16":
        yield varied(precision="fp32", **({} if options["masters"] == "exact" else {"masters": "exact"}))
    if sizes.get(LORA):
        yield varied(lora=0)


def _beats(one: Alternative, other: Alternative) -> bool:
    if NUMBERS.index(one.change.numbers) > NUMBERS.index(other.change.numbers):
        return False
    here, there = one.cost(), other.cost()
    return here != there and all(a <= b for a, b in zip(here, there, strict=True))
