"""best_batch(): the micro-batches of a step with so many tokens that make it shortest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megatrain.errors import OptionError
from megatrain.planning.model_sizes import MICRO_BATCH
from megatrain.planning.plan import Plan
from megatrain.planning.planner import Planner, StepOptions
from megatrain.planning.what_if.alternatives import Alternative
from megatrain.planning.what_if.variation import Variation
from megatrain.scheduler.step_kind import MOST_MICRO_BATCHES

# Of the sizes with which the samples of a step can be split, so many are planned, the smallest first.
_MOST_SIZES = 6
# A step shorter by less than this part isn't worth larger micro-batches.
_NEAR = 0.002


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The micro-batches of a step.

    Args:
        size: Samples of a micro-batch.
        count: Micro-batches.
        plan: Of the step.
        tried: All ways that were planned; of one of these, none.
    """

    size: int
    count: int
    plan: Plan = field(repr=False)
    tried: tuple[StepSplit, ...] = ()


def best_batch(planner: Planner, options: StepOptions, sizes: Mapping[str, int], num_samples: int) -> StepSplit:
    """Plans each way to split the samples of a step, and takes the shortest step that fits.

    If none fits, it is the one that lacks least.

    Args:
        planner: Of the model.
        options: Of the step; its `micro_batches` is chosen.
        sizes: Of the model; its micro-batch is chosen if it is missing.
        num_samples: Of a step.
    """
    found: list[StepSplit] = []
    for size in _sizes(sizes, num_samples):
        count = num_samples // size
        plan = planner.plan(replace(options, micro_batches=count), {**sizes, MICRO_BATCH: size})
        found.append(StepSplit(size, count, plan))
    best = found[0]
    for each in found[1:]:
        best = each if _is_better(each.plan, best.plan) else best
    return replace(best, tried=tuple(found))


def _is_better(one: Plan, other: Plan) -> bool:
    if one.fits != other.fits:
        return one.fits
    if not one.fits:
        return _lacking(one) < _lacking(other)
    return _seconds(one) < _seconds(other) * (1 - _NEAR)


def _lacking(plan: Plan) -> int:
    return plan.missing_device_bytes + plan.missing_host_bytes


def _seconds(plan: Plan) -> float:
    return Alternative.of(Variation(), plan).step_s or 0.0


def _sizes(sizes: Mapping[str, int], num_samples: int) -> list[int]:
    if MICRO_BATCH in sizes:
        return [sizes[MICRO_BATCH]]
    return list(_divisors(num_samples))[:_MOST_SIZES]


def _divisors(number: int) -> Iterator[int]:
    """Those that make no more micro-batches than a step may have."""
    return (n for n in range(1, number + 1) if number % n == 0 and number // n <= MOST_MICRO_BATCHES)


def samples_of(tokens_per_step: int, micro_batch: int, length: int) -> int:
    """How many sequences a step has: as many whole micro-batches as its tokens allow.

    Raises:
        OptionError: If there is less than one micro-batch.
    """
    if tokens_per_step < micro_batch * length:
        raise OptionError(
            f"--tokens-per-step {tokens_per_step} is less than one micro-batch: {micro_batch} x {length} tokens.\n"
            "  A step has one micro-batch or more.\n"
            f"  Give --tokens-per-step {micro_batch * length}, or a smaller --sequence or --micro-batch."
        )
    return tokens_per_step // (micro_batch * length) * micro_batch
