"""Advice: what another machine, budget or option would change, and ways out where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from megatrain.counts import counted
from megatrain.errors import ExecuteError, MegatrainError, ScheduleError
from megatrain.planning.bands import format_s
from megatrain.planning.host_plan import DEPTH, LORA, MICRO_BATCH, SEQUENCE
from megatrain.planning.planned_step import PlannedStep
from megatrain.sizes import format_bytes, parse_bytes

SAME, ROUNDING, OTHER = NUMBERS = "same", "rounding", "other"
"""What becomes of a training's numbers: they stay, sums are rounded in another order, or it is another training."""

Spelling = Mapping[str, Callable[[Any], str]]
"""How an option or a size is written with a value, by name; what is missing can't be given there."""

IN_PYTHON: Spelling = {
    "device_memory": lambda value: f'device_memory="{size(value)}"',
    "host_memory": lambda value: f'host_memory="{size(value)}"',
    "block_bytes": lambda value: f'block_bytes="{size(value)}"',
    "micro_batches": lambda value: f"micro_batches={value}",
    "precision": lambda value: f'precision="{value}"',
    "masters": lambda value: f'masters="{value}"',
    "max_grad_norm": lambda value: f"max_grad_norm={value}",
    "overlap": lambda value: f"overlap={value}",
    "activations": lambda value: f'activations="{value}"',
    "optimizer": lambda value: f'optimizer="{value}"',
    MICRO_BATCH: lambda value: f"an example of {value}",
    SEQUENCE: lambda value: f"an example of length {value}",
    DEPTH: lambda value: counted(value, "layer"),
    LORA: lambda value: f"adapters of rank {value}" if value else "all weights",
}
"""As options of `megatrain.plan`."""

_KEEPS = {"device_memory": SAME, "host_memory": SAME, "activations": SAME, "overlap": SAME, "block_bytes": ROUNDING}


@dataclass(frozen=True, slots=True)
class Variation:
    """Other values of some options and sizes.

    Args:
        values: By name, in the order in which they are written.
    """

    values: tuple[tuple[str, Any], ...] = ()

    @property
    def numbers(self) -> str:
        """One of `NUMBERS`. Micro-batches of another size, as many that a step has the same samples, only round."""
        names = dict(self.values).keys()
        split = {MICRO_BATCH, "micro_batches"}
        found = [_KEEPS.get(name, OTHER) for name in names if not (name in split and split <= names)]
        found += [ROUNDING] if split <= names else []
        return max([SAME, *found], key=NUMBERS.index)

    def words(self, spelling: Spelling = IN_PYTHON) -> str:
        """The variation as it is written."""
        words = (spelling[name](value) for name, value in self.values)
        return ", ".join(filter(None, words)) or "as planned"

    def can_be_given(self, spelling: Spelling) -> bool:
        """Whether there is a way to write it."""
        return all(name in spelling for name, _ in self.values)

    def __add__(self, other: Variation) -> Variation:
        """Both, which have no name in common."""
        return Variation((*self.values, *other.values))


def varied(**values: Any) -> Variation:
    """A variation by the names of options and sizes."""
    return Variation(tuple(values.items()))


def size(nbytes: int) -> str:
    """Bytes as an option is written: without a space.

    >>> size(3 << 29)
    '1.50GiB'
    """
    return format_bytes(nbytes).replace(" ", "")


def as_printed(nbytes: int) -> int:
    """The size that `size` writes, so that a plan is of exactly what is printed; at least a byte."""
    return parse_bytes(size(max(1, nbytes)))


def splits(micro_batch: int, micro_batches: int, factors: tuple[int, ...]) -> Iterator[Variation]:
    """The same samples in larger micro-batches (factors above 1), or smaller ones (divisors, as negative numbers)."""
    for factor in factors:
        if factor > 0 and micro_batches % factor == 0:
            yield varied(micro_batch=micro_batch * factor, micro_batches=micro_batches // factor)
        if factor < 0 and micro_batch % -factor == 0:
            yield varied(micro_batch=micro_batch // -factor, micro_batches=micro_batches * -factor)


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


MOST = 3
"""Ways that an error names."""
_HELPS = "What helps:"
# Halving so often reaches a thousandth; pairs are tried of so many changes.
_HALVINGS = 10
_MOST_OF_PAIRS = 4
# What changes nothing on the device.
_OF_HOST = frozenset({"max_grad_norm", "overlap", "masters", "optimizer"})


def ways_out(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> tuple[Alternative, ...]:
    """Finds changes that make a step fit: single ones, and pairs of those that don't help alone.

    With a machine they are those with the shortest steps; without one, the mildest. Of a change that has degrees
    (smaller micro-batches, blocks, sequences) the first degree that fits is taken.

    Args:
        plan: One that doesn't fit, and can be planned again.
        spelling: How options are written; what can't be written isn't tried.
    """
    found: list[Alternative] = []
    nearest: list[Variation] = []
    for degrees in _families(plan):
        tried = [each for each in degrees if each.can_be_given(spelling)]
        way = _first_that_fits(plan, tried)
        if way is not None:
            found.append(way)
        elif tried:
            nearest.append(tried[-1])
        if plan.hardware is None and len(found) == MOST:
            break
    if len(found) < MOST:
        for one, other in combinations(nearest[:_MOST_OF_PAIRS], 2):
            if not dict(one.values).keys().isdisjoint(dict(other.values)):
                continue  # fewer samples a step, say, and the same samples split in another way
            way = _first_that_fits(plan, [one + other])
            found += [] if way is None or len(found) == MOST else [way]
    return tuple(sorted(found, key=_rank)[:MOST])


def refusal(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> ScheduleError | ExecuteError | None:
    """The error of a step that doesn't fit, with ways out that were planned; None if it fits.

    Args:
        plan: The step. One that can't be planned again has hints in place of ways.
        spelling: How options are written.
    """
    error = plan.refused()
    if error is None or plan.asked is None:
        return error
    return type(error)(f"{str(error).partition(_HELPS)[0]}{_HELPS} {ways_text(plan, spelling)}")


def ways_text(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> str:
    """The ways out as the end of an error: each with its step, and what that takes."""
    ways = ways_out(plan, spelling)
    here = Alternative.of(Variation(), plan)
    more = _more_memory(plan, spelling)
    if not ways:
        return f"{more}; no other change that was tried makes it fit."
    order = "" if here.step_s is None else ", the shortest step first"
    lines = [f"    {_line(way, here, spelling)}" for way in ways]
    return "\n".join([f"{more}, or one of these, each planned{order}:", *lines])


def _more_memory(plan: PlannedStep, spelling: Spelling) -> str:
    device, host = plan.missing_device_bytes, plan.missing_host_bytes
    found = [
        f"{format_bytes(nbytes)} more of the {name}" for name, nbytes in (("device", device), ("host", host)) if nbytes
    ]
    return " and ".join(found)


def _line(way: Alternative, here: Alternative, spelling: Spelling) -> str:
    assert way.plan is not None
    device, host = format_bytes(way.plan.schedule.device_bytes), format_bytes(way.plan.host.total_bytes)
    numbers = {"same": "", "rounding": "; sums round in another order", "other": "; another training"}
    time = ""
    if way.step_s is not None and here.step_s:
        ratio = way.cost()[0] / here.cost()[0]
        time = f"{format_s(way.step_s)} a step ({ratio:.2f} x this one's time{_per(way)}), "
    return (
        f"{way.change.words(spelling)}: {time}{device} of the device, {host} of the host{numbers[way.change.numbers]}"
    )


def _per(way: Alternative) -> str:
    return " a token" if way.tokens_per_s else ""


def _families(plan: PlannedStep) -> Iterator[list[Variation]]:
    """Changes that may help, each with its degrees, the mildest first."""
    assert plan.asked is not None
    options, sizes = plan.asked.options, plan.asked.sizes
    needs_host = plan.missing_host_bytes > 0
    micro_batches = plan.schedule.kind.micro_batches
    if options["activations"] in ("keep", "recompute"):
        yield [varied(activations="auto")]
    if MICRO_BATCH in sizes and plan.too_small is not None:
        factors = tuple(-(2**n) for n in range(1, _HALVINGS))
        yield list(splits(sizes[MICRO_BATCH], micro_batches, factors))
    # By the planner itself.
    is_cut = options["block_bytes"] is None and options["chunking"] != "never"
    if plan.too_small is not None and not is_cut:
        largest = max((block.state_bytes for block in plan.schedule.known_workload().blocks), default=0)
        yield [varied(block_bytes=as_printed(largest >> n)) for n in range(1, 5)]
    if needs_host and not options["overlap"] and options["max_grad_norm"] is None and options["optimizer"] is not None:
        yield [varied(overlap=True)]
    for each in other_trainings(plan):
        if needs_host or not _OF_HOST.issuperset(dict(each.values)):
            yield [each]
    if micro_batches > 1:
        yield [varied(micro_batches=n) for n in _halves(micro_batches)]
    if SEQUENCE in sizes:
        yield [varied(sequence=n) for n in _halves(sizes[SEQUENCE])]


def _halves(number: int) -> list[int]:
    return list(dict.fromkeys(number >> n for n in range(1, _HALVINGS) if number >> n))


def _first_that_fits(plan: PlannedStep, degrees: Sequence[Variation]) -> Alternative | None:
    """The first degree that fits; if the last doesn't, which takes least, none is."""
    if not degrees or not _fits(plan, degrees[-1]):
        return None
    way = planned(plan, next(each for each in degrees if each is degrees[-1] or _fits(plan, each)))
    return way if way.fits else None


def _fits(plan: PlannedStep, other: Variation) -> bool:
    """Whether a step fits, which shows without times: for these, plans are searched longer."""
    assert plan.asked is not None
    try:
        return plan.asked.again({**dict(other.values), "hardware": None}).fits
    except MegatrainError:
        return False


def _rank(way: Alternative) -> tuple[float, int]:
    return (0.0 if way.step_s is None else way.cost()[0]), NUMBERS.index(way.change.numbers)
