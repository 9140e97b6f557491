"""Ways out: the changes that make a refused step fit, each planned, the shortest step first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from megatrain.errors import ExecuteError, MegatrainError, ScheduleError
from megatrain.planning.model_sizes import MICRO_BATCH, SEQUENCE
from megatrain.planning.planned_step import PlannedStep
from megatrain.planning.what_if.alternatives import Alternative, other_trainings, planned
from megatrain.planning.what_if.variation import IN_PYTHON, NUMBERS, Spelling, Variation, as_printed, splits, varied
from megatrain.scheduler.timing.bands import format_s
from megatrain.sizes import format_bytes

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
    is_cut = options["block_bytes"] is None and options["chunking"] != "never" and options["ranks"] == "alone"
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
