"""lower(): runs the passes in order, the checker after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.dedup import dedup
from megatrain.passes.lift_state import lift_state
from megatrain.passes.measure import measure
from megatrain.passes.partition import partition
from megatrain.passes.program import Program
from megatrain.passes.split_state import split_state
from megatrain.passes.verify import verify_program
from megatrain.tracer.traced import TracedModule

Pass = Callable[[Any], Any]
AfterPass = Callable[[str, TracedModule | Program], None]

PROGRAM_PASSES: tuple[Pass, ...] = (lift_state, dedup, measure)


def lower(
    traced: TracedModule,
    *,
    block_bytes: int | None = None,
    passes: Sequence[Pass] | None = None,
    after_pass: AfterPass | None = None,
) -> Program:
    """Turns a capture into blocks over shared, parameter-free templates.

    Args:
        traced: The capture.
        block_bytes: Target bytes of a block's state; None keeps the model's own repeated modules.
        passes: Replaces the default order canonicalize, split_state (with `block_bytes` only), partition,
            lift_state, dedup, measure.
        after_pass: Called with the pass's name and its result, after the checker; for dumps and timing.

    Returns:
        A program that passes `verify_program`.

    Raises:
        LowerError: If a pass breaks a rule.
    """
    if passes is None:
        splits = () if block_bytes is None else (partial(split_state, limit=block_bytes),)
        passes = (canonicalize, *splits, partial(partition, block_bytes=block_bytes), *PROGRAM_PASSES)
    value: Any = traced
    for step in passes:
        value = step(value)
        _check(value)
        if after_pass is not None:
            after_pass(str(getattr(getattr(step, "func", step), "__name__", step)), value)
    assert isinstance(value, Program), "the passes must end in a program"
    return value


def _check(value: TracedModule | Program) -> None:
    if isinstance(value, TracedModule):
        value.check()
    else:
        verify_program(value)
