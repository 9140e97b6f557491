"""StepPrograms: the programs of one capture for training steps, from as it is to the least memory of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from megatrain.base.garbage import paused_collection
from megatrain.passes.measure import KnownCosts
from megatrain.passes.pipeline import AfterPass, Rewrite, lowered_with
from megatrain.passes.program import Program
from megatrain.passes.rewrites.head_loss import HeadLoss, chunk_head_loss
from megatrain.passes.rewrites.masked_attention import (
    BandedAttention,
    MaskNote,
    banded_attention,
    causal_attention,
    has_masked_attention,
)
from megatrain.passes.rewrites.tile_tokens import tile_tokens
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.planning.options import Limits
from megatrain.runtime.block import outer_hooks_off
from megatrain.tracer.traced import TracedModule


@dataclass(frozen=True, slots=True)
class Pieces:
    """How small the pieces are in which a program is computed, each of them with kernels of its own.

    Masks of attention that are functions of positions give way to causality, or are made for some queries at a time,
    in all of these.

    Args:
        chunks: Of a head's loss: as many rows as cost no time, or so many times fewer; None for all at once.
        tiles: Of all else that treats each token alone: a sixteenth of the tokens, or so many times fewer; None for
            all tokens at once.
    """

    chunks: int | None = 1
    tiles: int | None = None

    def rewrites(self, block_bytes: int | None) -> tuple[Rewrite, ...]:
        """The passes that make them."""
        found: list[Rewrite] = [causal_attention, banded_attention]
        if self.chunks is not None:
            found.append(partial(chunk_head_loss, divisor=self.chunks))
        found += [partial(tile_tokens, divisor=self.tiles, block_bytes=block_bytes)] if self.tiles is not None else []
        return tuple(found)


_ALWAYS = Pieces(tiles=1)
_LEVELS = {
    "auto": (Pieces(chunks=None), Pieces(), Pieces(chunks=4), Pieces(chunks=4, tiles=1), Pieces(chunks=4, tiles=4)),
    "always": (Pieces(chunks=4, tiles=1), Pieces(chunks=4, tiles=4)),
    "never": (),
}
# Of the largest layer, where blocks are cut: with smaller ones launches of kernels count.
_OF_LAYERS = (0, 1, 3)


class StepPrograms:
    """Makes programs of one capture when they are asked for, and keeps them.

    Programs are numbered by levels. The first of them have the model's own blocks. Level 0 is the capture as it is. At
    level 1 masks of attention are left out, or made for some queries at a time. At each
    further level losses of linear heads are computed in smaller chunks, or
    parts of blocks in smaller tiles of tokens. A level at which nothing gets smaller has the program of the one before.
    Then come the same pieces with smaller blocks, and so on for each size of blocks.

    Args:
        limits: With chunking `"always"` level 0 has chunks and tiles already; with `"never"` there is no other, and
            blocks are never cut, nor are they where `block_bytes` says their size.
        repeated: Makes the program of the whole model, if the capture has only some of its layers.
        whole: Captures the whole model, if some program can't be repeated.

    Attributes:
        least: The first level that is tried. A capture that was rewritten stays so: its numbers would differ from one
            training step to the next.
        width: The number of levels with blocks of one size.
        num_steps: How many steps have begun with one of the programs.
        why_eager: Why kernels that a plan has recorded are launched one by one from now on; empty if there is none.
        why_kernels: Why kernels of the latest step are recorded, or aren't; empty where nothing was to be chosen.
    """

    def __init__(
        self,
        traced: TracedModule,
        limits: Limits,
        costs: KnownCosts,
        repeated: Callable[[Program], Program | None] | None = None,
        whole: Callable[[], TracedModule] | None = None,
    ):
        self._traced, self._limits, self._costs = traced, limits, costs
        self._repeated, self._whole = repeated, whole
        self._pieces = (None, *_LEVELS[limits.chunking])
        self._made: dict[int, Program] = {}
        self.least = 0
        self.width = len(self._pieces)
        self.num_steps = 0
        self.why_eager = self.why_kernels = ""

    def at(self, level: int) -> Program:
        """The program of a level, or of the last there is."""
        level = min(level, self.last) if level else 0  # the last depends on the first
        if level not in self._made:
            self._made[level] = self._of(*divmod(level, self.width))
        return self._made[level]

    @property
    def last(self) -> int:
        """The last level."""
        return self.width * (1 + len(self._sizes)) - 1

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the tensors that a call gets: of captures of one model, the longer have more."""
        return sum(node.meta["spec"].nbytes for node in self._traced.inputs)

    @property
    def in_own_blocks(self) -> Sequence[Program]:
        """The programs of the model's own blocks, each once."""
        return list({id(program): program for program in map(self.at, range(self.width))}.values())

    @property
    def extremes(self) -> Sequence[Program]:
        """Those of the model's own blocks, and that of the smallest blocks: one of them needs the least memory."""
        return [*self.in_own_blocks, self.at(self.last)]

    def with_blocks(self, block_bytes: int, *, in_pieces: bool = True) -> Program:
        """Another program, of blocks of so many bytes, in the smallest pieces or as it is."""
        return self._lowered(self._pieces[-1] if in_pieces else None, block_bytes)

    def _lowered(self, pieces: Pieces | None, block_bytes: int | None) -> Program:
        limits = self._limits if block_bytes is None else replace(self._limits, block_bytes=block_bytes)
        found = lowered(self._traced, limits, pieces, costs=self._costs)
        if self._repeated is None:
            return found
        repeated = self._repeated(found)
        if repeated is not None:
            return repeated
        assert self._whole is not None
        self._traced, self._repeated = self._whole(), None
        return self._lowered(pieces, block_bytes)

    @cached_property
    def _sizes(self) -> Sequence[int]:
        may_cut = self._limits.block_bytes is None and self._limits.chunking != "never"
        return _smaller_sizes(self.at(0)) if may_cut else ()

    def _of(self, cut: int, number: int) -> Program:
        pieces = self._pieces[number]
        before = self.at(number - 1) if number and not cut else None
        if before is not None and pieces == Pieces(chunks=None) and not _has_masks(before):
            return before
        made = self._lowered(pieces, self._sizes[cut - 1] if cut else None)
        return made if before is None or _in_pieces(made) != _in_pieces(before) else before


def _smaller_sizes(program: Program) -> tuple[int, ...]:
    """Sizes in bytes to which the blocks of a model may be cut, the largest first.

    The first cuts what is larger than any layer (embeddings, heads), the others cut layers as well. A layer is a block
    whose template others share.
    """
    sizes = {block.index: program.state_bytes(block) for block in program.blocks}
    users = Counter(block.template for block in program.blocks)
    layers = [sizes[block.index] for block in program.blocks if users[block.template] > 1]
    largest = max(sizes.values(), default=0)
    layer = max(layers, default=largest) or largest
    return tuple(size for size in (layer >> shift for shift in _OF_LAYERS) if 0 < size < largest)


def lowered(
    traced: TracedModule,
    limits: Limits,
    pieces: Pieces | None = None,
    after_pass: AfterPass | None = None,
    costs: KnownCosts | None = None,
) -> Program:
    """Lowers a capture, in pieces after the user's passes."""
    pieces = _ALWAYS if pieces is None and limits.chunking == "always" else pieces
    rewrites = limits.passes if pieces is None else (*limits.passes, *pieces.rewrites(limits.block_bytes))
    with undisturbed():
        return lowered_with(
            KnownCosts() if costs is None else costs,
            traced,
            block_bytes=limits.block_bytes,
            rewrites=rewrites,
            after_pass=after_pass,
            alignment=limits.device.alignment,
            fuses=limits.kernels == "inductor",
        )


@contextmanager
def undisturbed() -> Generator[None]:
    """Lets the body differentiate fake tensors: the caller's hooks and anomaly mode would fail on these."""
    with paused_collection(), outer_hooks_off(), torch.autograd.set_detect_anomaly(False):
        yield


def _has_masks(program: Program) -> bool:
    return any(has_masked_attention(template.graph) for template in program.templates.values())


def _in_pieces(program: Program) -> list[HeadLoss | TiledRegion | BandedAttention | MaskNote]:
    """What is computed in pieces, and what became of masks."""
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    found = [each for node in nodes for each in (node.target, node.meta.get("mask"))]
    return [each for each in found if isinstance(each, HeadLoss | TiledRegion | BandedAttention | MaskNote)]
