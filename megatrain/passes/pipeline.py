"""lower(): runs the passes in order, the checker after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatrain.checks import checked, named, optional
from megatrain.errors import LowerError
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.dedup import dedup
from megatrain.passes.lift_state import lift_state
from megatrain.passes.measure import measure
from megatrain.passes.partition import partition
from megatrain.passes.program import Program
from megatrain.passes.split_state import split_state
from megatrain.passes.verify import verify_program
from megatrain.sizes import SIZE, parse_bytes
from megatrain.tracer.traced import TracedModule

Pass = Callable[[Any], Any]
AfterPass = Callable[[str, TracedModule | Program], None]

PROGRAM_PASSES: tuple[Pass, ...] = (lift_state, dedup, measure)


@checked(block_bytes=optional(SIZE))
def lower(
    traced: TracedModule,
    *,
    block_bytes: int | str | None = None,
    passes: Sequence[Pass] | None = None,
    after_pass: AfterPass | None = None,
) -> Program:
    """Turns a capture into blocks over shared, parameter-free templates.

    Args:
        traced: The capture.
        block_bytes: Target size of a block's state, in bytes or as `"64MiB"`; None keeps the model's own
            repeated modules.
        passes: Replaces the default order canonicalize, split_state (with `block_bytes` only), partition,
            lift_state, dedup, measure.
        after_pass: Called with the pass's name and its result, after the checker; for dumps and timing.

    Returns:
        A program that passes `verify_program`.

    Raises:
        OptionError: If an option isn't what it may be.
        LowerError: If a pass breaks a rule, or the passes don't end in a program.
    """
    if passes is None:
        limit = None if block_bytes is None else parse_bytes(block_bytes)
        splits = () if limit is None else (partial(split_state, limit=limit),)
        passes = (canonicalize, *splits, partial(partition, block_bytes=limit), *PROGRAM_PASSES)
    value: Any = traced
    for step in passes:
        value = step(value)
        _check(value)
        if after_pass is not None:
            after_pass(str(getattr(getattr(step, "func", step), "__name__", step)), value)
    if not isinstance(value, Program):
        raise LowerError(
            f"the passes end in {named(value)}.\n  They end in a program.\n"
            "  Have partition and the passes after it among them, or leave `passes` out."
        )
    return value


def _check(value: TracedModule | Program) -> None:
    if isinstance(value, TracedModule):
        value.check()
    elif isinstance(value, Program):  # pyright: ignore[reportUnnecessaryIsInstance]  # passes may be a user's
        verify_program(value)
