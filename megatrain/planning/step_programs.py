"""StepPrograms: the programs of one capture for training steps, from as it is to the least memory of the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from megatrain.errors import TooSmallError
from megatrain.garbage import paused_collection
from megatrain.passes.pipeline import AfterPass, Rewrite, lower
from megatrain.passes.program import Program
from megatrain.passes.rewrites.head_loss import HeadLoss, chunk_head_loss
from megatrain.runtime.block import outer_hooks_off
from megatrain.tracer.traced import TracedModule

# Chunks of as many rows as cost no time, and of few. Each chunk has kernels of its own, so none is smaller.
_SMALLER = (chunk_head_loss, partial(chunk_head_loss, divisor=4))

_Plan = TypeVar("_Plan")


class StepPrograms:
    """Makes programs of one capture when they are asked for, and keeps them.

    Level 0 is the capture as it is. At each further level, losses of linear heads are computed in smaller chunks.

    Args:
        chunking: The option of `compile`. With `"always"` level 0 is chunked already; with `"never"` there is no other.
        lower: Lowers the capture with a further rewrite, or with None without.
        plain: The program of level 0, where there is one already.

    Attributes:
        least: The first level that is tried. A capture that was rewritten stays so: its numbers would differ from one
            training step to the next.
    """

    def __init__(
        self, chunking: str, lower: Callable[[Rewrite | None], Program], plain: Callable[[], Program] | None = None
    ):
        self._lower = lower
        self._plain = plain or partial(lower, None)
        self._smaller = {"auto": _SMALLER, "always": _SMALLER[1:], "never": ()}[chunking]
        self._made: dict[int, Program | None] = {}
        self.least = 0

    def at(self, level: int) -> Program:
        """The program of a level, or of the last there is."""
        while (found := self._at(level)) is None:
            level -= 1
        return found

    @property
    def all(self) -> Sequence[Program]:
        """The programs of all levels."""
        return [self.at(level) for level in range(1 + len(self._smaller)) if self.has(level)]

    def has(self, level: int) -> bool:
        """Whether there is such a level."""
        return self._at(level) is not None

    def _at(self, level: int) -> Program | None:
        if level not in self._made:
            self._made[level] = self._plain() if level == 0 else self._rewritten(level)
        return self._made[level]

    def _rewritten(self, level: int) -> Program | None:
        if level > len(self._smaller) or (level > 1 and self._at(level - 1) is None):
            return None
        made = self._lower(self._smaller[level - 1])
        return made if _is_chunked(made) else None


def first_that_fits(
    programs: Sequence[StepPrograms], plan: Callable[[Sequence[Program]], _Plan]
) -> tuple[int, Sequence[Program], _Plan]:
    """Plans a step, and rewrites its programs as little as it needs to fit.

    Args:
        programs: One per micro-batch; all are rewritten at the same level.
        plan: Makes a plan of programs.

    Returns:
        The level, its programs, and their plan.

    Raises:
        TooSmallError: If none fits: of the programs that need the least.
    """
    level = max(each.least for each in programs)
    errors: list[TooSmallError] = []
    while not errors or any(each.has(level) for each in programs):
        chosen = [each.at(level) for each in programs]
        try:
            return level, chosen, plan(chosen)
        except TooSmallError as error:
            errors.append(error)
            level += 1
    raise min(errors, key=lambda error: error.least_bytes)


def lowered_for(
    traced: TracedModule,
    block_bytes: int | None,
    passes: Sequence[Rewrite],
    chunking: str,
    alignment: int,
    more: Rewrite | None = None,
    after_pass: AfterPass | None = None,
) -> Program:
    """Lowers a capture by options of `compile`, with one `more` rewrite behind the user's `passes`; see `lower`."""
    more = chunk_head_loss if more is None and chunking == "always" else more
    rewrites = passes if more is None else (*passes, more)
    with undisturbed():
        return lower(traced, block_bytes=block_bytes, rewrites=rewrites, after_pass=after_pass, alignment=alignment)


@contextmanager
def undisturbed() -> Generator[None]:
    """Lets the body differentiate fake tensors: the caller's hooks and anomaly mode would fail on these."""
    with paused_collection(), outer_hooks_off(), torch.autograd.set_detect_anomaly(False):
        yield


def _is_chunked(program: Program) -> bool:
    return any(isinstance(node.target, HeadLoss) for t in program.templates.values() for node in t.graph.nodes)
