"""Advice: what another machine, budget or option would change, the largest size that fits, and ways out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from megatrain.base.counts import counted
from megatrain.base.sizes import format_bytes, parse_bytes
from megatrain.errors import ExecuteError, MegatrainError, OptionError, ScheduleError
from megatrain.planning.host_plan import in_columns
from megatrain.planning.model_sizes import DEPTH, LORA, MICRO_BATCH, SEQUENCE, ExampleSizes, model_and_inputs
from megatrain.planning.planned_step import PlannedStep, StepLimits
from megatrain.scheduler.bands import format_s
from megatrain.tracer.arguments import Arguments
from megatrain.tracer.source_line import original

SAME, ROUNDING, OTHER = NUMBERS = "same", "rounding", "other"
"""What becomes of a training's numbers: they stay, sums are rounded in another order, or it is another training."""

Changes = Mapping[str, Any]
"""Other values of some options and sizes, by name, in the order in which they are written."""

Spelling = Mapping[str, Callable[[Any], str | None]]
"""How an option or a size is written with a value, by name; what is missing, or None, can't be given there."""

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
    "kernels": lambda value: f'kernels="{value}"',
    "optimizer": lambda value: f'optimizer="{value}"',
    "offload": lambda value: "offload=True",
    MICRO_BATCH: lambda value: f"an example of {value}",
    SEQUENCE: lambda value: f"an example of length {value}",
    DEPTH: lambda value: counted(value, "layer"),
    LORA: lambda value: f"adapters of rank {value}" if value else "all weights",
}
"""As options of `megatrain.plan`."""

_KEEPS = {
    **dict.fromkeys(("device_memory", "host_memory", "activations", "overlap", "offload"), SAME),
    "block_bytes": ROUNDING,
}


def words(changes: Changes, spelling: Spelling = IN_PYTHON) -> str:
    """The changes as they are written."""
    return ", ".join(filter(None, (spelling[name](value) for name, value in changes.items()))) or "as planned"


def numbers_after(changes: Changes) -> str:
    """One of `NUMBERS`. Micro-batches of another size, as many that a step has the same samples, only round."""
    split = {MICRO_BATCH, "micro_batches"}
    known = {**_KEEPS, **dict.fromkeys(split, ROUNDING)} if split <= changes.keys() else _KEEPS
    return max((known.get(name, OTHER) for name in changes), key=NUMBERS.index, default=SAME)


def size(nbytes: int) -> str:
    """Bytes as an option is written: without a space.

    >>> size(3 << 29)
    '1.50GiB'
    """
    return format_bytes(nbytes).replace(" ", "")


def _as_printed(nbytes: int) -> int:
    """The size that `size` writes, so that a plan is of exactly what is printed; at least a byte."""
    return parse_bytes(size(max(1, nbytes)))


@dataclass(frozen=True, slots=True)
class Alternative:
    """A step with other options or sizes.

    Args:
        change: What is other than in the plan, by name; nothing in the row of the plan itself.
        plan: The step; None if it can't be planned.
        refused: Why it can't be planned, in a line; or None.
    """

    change: Changes
    plan: PlannedStep | None = field(repr=False)
    refused: str | None = None

    @property
    def numbers(self) -> str:
        """What becomes of the training's numbers: `"same"`, `"rounding"` or `"other"`."""
        return numbers_after(self.change)

    @property
    def fits(self) -> bool:
        """Whether device and host have room for it."""
        return self.plan is not None and self.plan.fits

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None without a machine."""
        return None if self.plan is None else self.plan.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None without a machine, or without token ids."""
        return None if self.plan is None else self.plan.tokens_per_s

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
        columns = [c for c in zip(*cells, strict=True) if any(c[1:]) or c[0] in heads[1:5]]
        num_texts = sum(column[0] in heads[:4] for column in columns)
        lines = in_columns(list(zip(*columns, strict=True)), num_texts)
        notes = ["numbers: same; rounding: sums in another order; other: another training"]
        if any(row.step_s is not None for row in self.rows):
            notes.append("*: nothing else here that changes the numbers no more is as fast with as little memory")
        notes += [f"{words(row.change, self.spelling)}: {row.refused}" for row in self.rows if row.refused]
        return "\n".join([f"alternatives: {len(self.rows) - 1}", *lines, *notes])

    def _cells(self, row: Alternative, *, is_on_front: bool) -> tuple[str, ...]:
        head = "*" if is_on_front else "", words(row.change, self.spelling), row.numbers
        if row.plan is None:
            return *head, "refused", "", "", "", ""
        return (
            *head,
            "yes" if row.fits else "no",
            format_bytes(row.plan.schedule.device_bytes),
            format_bytes(row.plan.host.total_bytes),
            "" if row.step_s is None else format_s(row.step_s),
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        )


def _beats(one: Alternative, other: Alternative) -> bool:
    if NUMBERS.index(one.numbers) > NUMBERS.index(other.numbers):
        return False
    here, there = one.cost(), other.cost()
    return here != there and all(a <= b for a, b in zip(here, there, strict=True))


def tried(plan: PlannedStep, changes: Changes) -> Alternative:
    """Plans a step, one that can be planned again, with changes."""
    assert plan.asked is not None
    try:
        return Alternative(changes, plan.asked.again(changes))
    except MegatrainError as error:
        return Alternative(changes, None, refused=str(error).splitlines()[0])


# Parts of what the step takes, and of a budget that it fills.
_LESS, _MORE = (0.25, 0.5, 0.75), (1.25, 1.5, 2.0)
_FULL = 0.8
_RANK = 16


def alternatives(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> Alternatives:
    """Plans the step, one that can be planned again, with other options; what `spelling` can't write isn't tried."""
    changes = {tuple(each.items()): each for each in _candidates(plan) if each.keys() <= spelling.keys()}
    rows = [Alternative({}, plan), *(tried(plan, each) for each in changes.values())]
    return Alternatives(tuple(rows), spelling)


def _candidates(plan: PlannedStep) -> Iterator[Changes]:
    assert plan.asked is not None
    limits, sizes = plan.asked.limits, plan.asked.sizes
    taken, budget = plan.schedule.device_bytes, plan.device_memory
    yield from ({"device_memory": _as_printed(int(part * min(taken, budget or taken)))} for part in _LESS)
    if budget is not None and taken > _FULL * budget:
        yield from ({"device_memory": _as_printed(int(part * budget))} for part in _MORE)
    if MICRO_BATCH in sizes:
        yield from _splits(sizes[MICRO_BATCH], limits.micro_batches, (-4, -2, 2, 4))
    if limits.activations != "auto":
        yield {"activations": "auto"}
    if limits.optimizer is not None:
        yield {"overlap": not limits.overlap}
    yield from _other_trainings(plan)
    if plan.precision == "bf16":
        yield {"precision": "fp32", **({} if limits.masters == "exact" else {"masters": "exact"})}
    if sizes.get(LORA):
        yield {LORA: 0}


def _splits(micro_batch: int, micro_batches: int, factors: Sequence[int]) -> Iterator[Changes]:
    """The same samples in larger micro-batches (factors above 1), or smaller ones (divisors, as negative numbers)."""
    for factor in factors:
        if factor > 0 and micro_batches % factor == 0:
            yield {MICRO_BATCH: micro_batch * factor, "micro_batches": micro_batches // factor}
        if factor < 0 and micro_batch % -factor == 0:
            yield {MICRO_BATCH: micro_batch // -factor, "micro_batches": micro_batches * -factor}


def _other_trainings(plan: PlannedStep) -> Iterator[Changes]:
    """Changes of precision, masters, updates and of what is trained: those that take less memory, or less time."""
    assert plan.asked is not None
    limits, given = plan.asked.limits, plan.asked.limits.optimizer
    if limits.max_grad_norm is not None and given is not None:
        yield {"max_grad_norm": None, "overlap": True}
    if plan.precision == "fp32":
        yield {"precision": "bf16"}
    elif limits.masters == "exact" and given is not None:
        yield {"masters": "rounded"}
    if plan.asked.sizes.get(LORA) == 0:
        yield {LORA: _RANK}
    if isinstance(given, str | type):
        own = given if isinstance(given, str) else given.__name__
        yield from ({"optimizer": name} for name in ("AdamW8bit", "SGD") if name != own)


MOST = 3
"""Ways that an error names."""
_HELPS = "What helps:"
# Halving so often reaches a thousandth; pairs are tried of so many changes.
_HALVINGS = 10
_MOST_OF_PAIRS = 4
# What changes nothing on the device.
_OF_HOST = {"max_grad_norm", "overlap", "masters", "optimizer", "offload"}


def ways_out(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> tuple[Alternative, ...]:
    """Finds changes that make a step fit: single ones, and pairs of those that don't help alone.

    With a machine they are those with the shortest steps; without one, the mildest. Of a change that has degrees
    (smaller micro-batches, blocks, sequences) the first degree that fits is taken.
    """
    found: list[Alternative] = []
    nearest: list[Changes] = []
    for family in _families(plan):
        degrees = [each for each in family if all(_is_written(*pair, spelling) for pair in each.items())]
        way = _first_that_fits(plan, degrees)
        if way is not None:
            found.append(way)
        elif degrees:
            nearest.append(degrees[-1])
        if plan.hardware is None and len(found) == MOST:
            break
    if len(found) < MOST:
        for one, other in combinations(nearest[:_MOST_OF_PAIRS], 2):
            if not one.keys().isdisjoint(other):
                continue  # fewer samples a step, say, and the same samples split in another way
            way = _first_that_fits(plan, [{**one, **other}])
            found += [] if way is None or len(found) == MOST else [way]

    def order(way: Alternative) -> tuple[float, int]:
        return 0.0 if way.step_s is None else way.cost()[0], NUMBERS.index(way.numbers)

    return tuple(sorted(found, key=order)[:MOST])


def _is_written(name: str, value: Any, spelling: Spelling) -> bool:
    return name in spelling and spelling[name](value) is not None


def _families(plan: PlannedStep) -> Iterator[Sequence[Changes]]:
    """Changes that may help, each with its degrees, the mildest first."""
    assert plan.asked is not None
    limits, sizes = plan.asked.limits, plan.asked.sizes
    needs_host = plan.missing_host_bytes > 0
    if limits.activations in ("keep", "recompute"):
        yield [{"activations": "auto"}]
    if MICRO_BATCH in sizes and plan.too_small is not None:
        divisors = [-(2**n) for n in range(1, _HALVINGS)]
        yield list(_splits(sizes[MICRO_BATCH], limits.micro_batches, divisors))
    is_cut = limits.block_bytes is None and limits.chunking != "never"  # by the planner itself
    if plan.too_small is not None and not is_cut:
        largest = max((block.state_bytes for block in plan.schedule.known_workload().blocks), default=0)
        yield [{"block_bytes": _as_printed(largest >> n)} for n in range(1, 5)]
    if needs_host and not limits.overlap and limits.max_grad_norm is None and limits.optimizer is not None:
        yield [{"overlap": True}]
    if needs_host and not limits.offload and limits.optimizer is not None:
        yield [{"offload": True}]
    yield from ([each] for each in _other_trainings(plan) if needs_host or not each.keys() <= _OF_HOST)
    if limits.micro_batches > 1:
        yield _halves("micro_batches", limits.micro_batches)
    if SEQUENCE in sizes:
        yield _halves(SEQUENCE, sizes[SEQUENCE])


def _halves(name: str, number: int) -> list[Changes]:
    return [{name: number >> n} for n in range(1, _HALVINGS) if number >> n]


def _first_that_fits(plan: PlannedStep, degrees: Sequence[Changes]) -> Alternative | None:
    """The first degree that fits; if the last doesn't, which takes least, none is."""

    def fits(changes: Changes) -> bool:  # which shows without times, for which plans are searched longer
        return tried(plan, {**changes, "hardware": None}).fits

    if not degrees or not fits(degrees[-1]):
        return None
    way = tried(plan, next(each for each in degrees if each is degrees[-1] or fits(each)))
    return way if way.fits else None


def refusal(plan: PlannedStep, spelling: Spelling = IN_PYTHON) -> ScheduleError | ExecuteError | None:
    """The error of a step that doesn't fit, with ways out that were planned; None if it fits.

    A step that can't be planned again has hints in place of ways.
    """
    error = plan.refused()
    if error is None or plan.asked is None:
        return error
    return type(error)(f"{str(error).partition(_HELPS)[0]}{_HELPS} {_ways_text(plan, spelling)}")


def _ways_text(plan: PlannedStep, spelling: Spelling) -> str:
    """The ways out as the end of an error: each with its step, and what that takes."""
    ways, here = ways_out(plan, spelling), Alternative({}, plan)
    more = " and ".join(f"{format_bytes(nbytes)} more of the {name}" for name, nbytes in _lacking(plan))
    if not ways:
        return f"{more}; no other change that was tried makes it fit."
    order = "" if here.step_s is None else ", the shortest step first"
    lines = [f"    {words(way.change, spelling)}: {_cost_text(way, here)}" for way in ways]
    return "\n".join([f"{more}, or one of these, each planned{order}:", *lines])


def _cost_text(way: Alternative, here: Alternative) -> str:
    assert way.plan is not None
    device, host = format_bytes(way.plan.schedule.device_bytes), format_bytes(way.plan.host.total_bytes)
    numbers = {"same": "", "rounding": "; sums round in another order", "other": "; another training"}
    time = ""
    if way.step_s is not None and here.step_s:
        ratio, per = way.cost()[0] / here.cost()[0], " a token" if way.tokens_per_s else ""
        time = f"{format_s(way.step_s)} a step ({ratio:.2f} x this one's time{per}), "
    return f"{time}{device} of the device, {host} of the host{numbers[way.numbers]}"


def _lacking(plan: PlannedStep) -> list[tuple[str, int]]:
    parts = [("device", plan.missing_device_bytes), ("host", plan.missing_host_bytes)]
    return [(name, nbytes) for name, nbytes in parts if nbytes]


def missing(plan: PlannedStep) -> str | None:
    """What a plan lacks, in words; None if it fits."""
    lacks = [f"{format_bytes(nbytes)} of the {name}" for name, nbytes in _lacking(plan)]
    if plan.too_small is not None and not lacks:
        return plan.too_small.splitlines()[0]
    return f"{' and '.join(lacks)} are missing" if lacks else None


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
    """Doubles a size while it fits, then halves the gap; see `Plan.largest`."""
    name, start = (what, _size_of(plan, what)) if isinstance(what, str) else ("size", 1)
    multiple = multiple or (_OF_SEQUENCE if name == SEQUENCE and start >= _OF_SEQUENCE else 1)
    most = most or (_MOST_TIMES_DEEPER * start if name == DEPTH else MOST_OF_A_SIZE)
    plans: dict[int, PlannedStep] = {}
    refused: dict[int, str | None] = {}

    def fits(number: int) -> bool:  # which shows without times, for which plans are searched longer
        if number not in refused:
            try:
                plans[number] = _of_size(plan, what, number * multiple, {"hardware": None})
                refused[number] = missing(plans[number])
            except MegatrainError as error:
                if not refused:
                    raise  # nothing that fits is known yet, and this has nothing to do with memory
                refused[number] = str(error).splitlines()[0]
        return refused[number] is None

    low, high, end = 0, max(1, min(start, most) // multiple), most // multiple
    while fits(high) and low < end:
        low, high = high, min(2 * high, end)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    reason = refused[high]
    if reason is None:
        low = high
    if low == 0:
        raise ScheduleError(
            f"no {name} fits: at {high * multiple} {reason}.\n  Each was planned with the other options of this plan.\n"
            "  Give it more memory; plan.check() of a step that doesn't fit says what else helps."
        )
    best = plans[low] if plan.hardware is None else _of_size(plan, what, low * multiple, {})
    too_large = None if reason is None else high * multiple
    return Largest(name, low * multiple, best, too_large, reason or "", len(refused))


def _size_of(plan: PlannedStep, name: str) -> int:
    assert plan.asked is not None
    sizes, fixed = plan.asked.sizes, plan.asked.fixed
    if name not in sizes:
        raise OptionError(
            f"the {name} of this plan can't change: {fixed.get(name, 'it has no such size')}.\n"
            f"  What can change is {' and '.join(sizes) or 'nothing'}.\n"
            "  Give a function that makes the model and its inputs of a size: plan.largest(lambda n: (model, inputs))."
        )
    return sizes[name]


def _of_size(plan: PlannedStep, what: str | Callable[[int], Any], number: int, changes: Changes) -> PlannedStep:
    """Plans the step at a size, or of the model that somebody's function makes for it."""
    assert plan.asked is not None
    if isinstance(what, str):
        return plan.asked.again({what: number, **changes})
    model, args, kwargs = model_and_inputs(what(number), "the function")
    _check_any_model(plan.asked.limits)
    model = original(model)
    return plan.asked.again(changes, ExampleSizes(model, Arguments.of(model, args, kwargs)))


def _check_any_model(limits: StepLimits) -> None:
    if not (limits.optimizer is None or isinstance(limits.optimizer, str | type)):
        raise OptionError(
            "the optimizer of this plan has the parameters of its own model, not those of another one.\n"
            '  Each size is another model.\n  Plan with the optimizer\'s class or its name, optimizer="AdamW".'
        )
