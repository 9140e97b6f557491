"""StepPrograms: the programs of one capture for training steps, from as it is to the least memory of the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from megatrain.errors import TooSmallError
from megatrain.garbage import paused_collection
from megatrain.passes.masks.attention import MaskNote, masked_attention
from megatrain.passes.masks.banded_attention import BandedAttention, banded_attention
from megatrain.passes.masks.causal_attention import causal_attention
from megatrain.passes.masks.made_inside import masks_inside
from megatrain.passes.measuring.known_costs import KnownCosts
from megatrain.passes.pipeline import AfterPass, Rewrite, lowered_with
from megatrain.passes.program import Program
from megatrain.passes.rewrites.fused_head import NarrowHead, narrow_fused_head
from megatrain.passes.rewrites.head_loss import HeadLoss, chunk_head_loss
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.runtime.blocks.block import outer_hooks_off
from megatrain.tracer.traced import TracedModule


@dataclass(frozen=True, slots=True)
class Pieces:
    """How small the pieces are in which a program is computed, each of them with kernels of its own.

    Masks of attention are not handed from block to block, and give way to causality, in all of these.

    Args:
        chunks: Of a head's loss: as many rows as cost no time, or so many times fewer; None for all at once.
        tiles: Of all else that treats each token alone: a sixteenth of the tokens, or so many times fewer; None for
            all tokens at once. With tiles, attention under a window is computed in parts, too.
    """

    chunks: int | None = 1
    tiles: int | None = None

    def rewrites(self, block_bytes: int | None) -> tuple[Rewrite, ...]:
        """The passes that make them."""
        found: list[Rewrite] = [causal_attention]
        found += [banded_attention] if self.tiles is not None else []
        found += [partial(masks_inside, block_bytes=block_bytes)]
        if self.chunks is not None:
            found += [partial(each, divisor=self.chunks) for each in (chunk_head_loss, narrow_fused_head)]
        found += [partial(tile_tokens, divisor=self.tiles, block_bytes=block_bytes)] if self.tiles is not None else []
        return tuple(found)


_ALWAYS = Pieces(tiles=1)
_LEVELS = {
    "auto": (Pieces(chunks=None), Pieces(), Pieces(chunks=4), Pieces(chunks=4, tiles=1), Pieces(chunks=4, tiles=4)),
    "always": (Pieces(chunks=4, tiles=1), Pieces(chunks=4, tiles=4)),
    "never": (),
}

_Plan = TypeVar("_Plan")


class StepPrograms:
    """Makes programs of one capture when they are asked for, and keeps them.

    Level 0 is the capture as it is. At level 1 masks of attention are left out or made where they are read. At each
    further level losses of linear heads are computed in smaller chunks, or
    parts of blocks in smaller tiles of tokens. A level at which nothing gets smaller has the program of the one before.

    Args:
        chunking: The option of `compile`. With `"always"` level 0 has chunks and tiles already; with `"never"` there is
            no other.
        lower: Lowers the capture in pieces, or with None as it is.
        plain: The program of level 0, where there is one already.
        finer: Lowers the capture with another `block_bytes`.

    Attributes:
        least: The first level that is tried. A capture that was rewritten stays so: its numbers would differ from one
            training step to the next.
    """

    def __init__(
        self,
        chunking: str,
        lower: Callable[[Pieces | None], Program],
        plain: Callable[[], Program] | None = None,
        finer: Callable[[int, Pieces | None], Program] | None = None,
    ):
        self._lower = lower
        self._finer = finer
        self._plain = plain or partial(lower, None)
        self._levels = _LEVELS[chunking]
        self._made: dict[int, Program] = {}
        self.least = 0

    def at(self, level: int) -> Program:
        """The program of a level, or of the last there is."""
        level = min(level, self.last)
        if level not in self._made:
            self._made[level] = self._plain() if level == 0 else self._smaller(level)
        return self._made[level]

    @property
    def last(self) -> int:
        """The last level."""
        return len(self._levels)

    @property
    def all(self) -> Sequence[Program]:
        """The programs of all levels, each once."""
        return list({id(program): program for program in map(self.at, range(1 + self.last))}.values())

    def with_blocks(self, block_bytes: int) -> Program:
        """Another program, of blocks of so many bytes, in the smallest pieces."""
        assert self._finer is not None
        return self._finer(block_bytes, self._levels[-1] if self._levels else None)

    def _smaller(self, level: int) -> Program:
        before = self.at(level - 1)
        if self._levels[level - 1] == Pieces(chunks=None) and not _has_masks(before):
            return before
        made = self._lower(self._levels[level - 1])
        return made if _in_pieces(made) != _in_pieces(before) else before


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
    errors: list[TooSmallError] = []
    tried: Sequence[Program] = ()
    for level in range(max(each.least for each in programs), 1 + max(each.last for each in programs)):
        chosen = [each.at(level) for each in programs]
        if tried and all(one is other for one, other in zip(chosen, tried, strict=True)):
            continue
        tried = chosen
        try:
            return level, chosen, plan(chosen)
        except TooSmallError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.least_bytes)


def lowered_for(
    traced: TracedModule,
    block_bytes: int | None,
    passes: Sequence[Rewrite],
    chunking: str,
    alignment: int,
    pieces: Pieces | None = None,
    after_pass: AfterPass | None = None,
    *,
    costs: KnownCosts | None = None,
) -> Program:
    """Lowers a capture by options of `compile`, in pieces behind the user's `passes`; see `lower`."""
    pieces = _ALWAYS if pieces is None and chunking == "always" else pieces
    rewrites = passes if pieces is None else (*passes, *pieces.rewrites(block_bytes))
    with undisturbed():
        return lowered_with(
            KnownCosts() if costs is None else costs,
            traced,
            block_bytes=block_bytes,
            rewrites=rewrites,
            after_pass=after_pass,
            alignment=alignment,
        )


@contextmanager
def undisturbed() -> Generator[None]:
    """Lets the body differentiate fake tensors: the caller's hooks and anomaly mode would fail on these."""
    with paused_collection(), outer_hooks_off(), torch.autograd.set_detect_anomaly(False):
        yield


def _has_masks(program: Program) -> bool:
    return any(True for template in program.templates.values() for _ in masked_attention(template.graph))


def _in_pieces(program: Program) -> list[HeadLoss | NarrowHead | TiledRegion | BandedAttention | MaskNote]:
    """What is computed in pieces, and what became of masks."""
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    found = [each for node in nodes for each in (node.target, node.meta.get("mask"))]
    return [
        each for each in found if isinstance(each, HeadLoss | NarrowHead | TiledRegion | BandedAttention | MaskNote)
    ]
