"""masks_inside: masks of attention are made in each block that reads them, not handed from block to block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megatrain.passes.intervals import find_intervals
from megatrain.passes.masks.attention import Attention, MaskNote, before, has_masked_attention, masked_attention
from megatrain.passes.masks.mask_calls import MaskCalls
from megatrain.passes.masks.position_proof import PositionProof
from megatrain.passes.masks.seen_band import BandMask, SeenBand
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.tracer.traced import TracedModule

_TEXT, _PROMISE = "a mask made here", "the same bits"


def masks_inside(traced: TracedModule, *, block_bytes: int | None = None) -> TracedModule:
    """Returns the capture with masks of attention made in the block that reads them; `traced` itself if all are.

    A mask that one block makes and others read is held, or parked on the host, from the first of these to the last
    backward: bytes that grow with the square of the text. Now each block makes its own, before attention, and lets go
    of it. A mask that is a function of positions alone (a window) is made from two lengths (`BandMask`). Of others (one
    with padding) the calls are repeated, from what is small, such as the padding of [texts, tokens]; but not where
    these would take more memory on the way than the mask and what the kernel makes of it.

    All numbers keep their bits: masks hold the same.

    Args:
        traced: The capture.
        block_bytes: As in `partition`.
    """
    if not has_masked_attention(traced.graph):
        return traced
    rewriter = Rewriter(traced)
    intervals = find_intervals(traced, block_bytes)
    makers = _Makers(rewriter, {node.name: i for i, interval in enumerate(intervals) for node in interval.nodes})
    changed = [makers.makes(attention) for attention in masked_attention(rewriter.graph)]
    return rewriter.done() if any(changed) else traced


class _Makers:
    """Makes masks in blocks, each once in a block.

    Args:
        rewriter: Of the capture.
        home: The number of the block of each call, by name.
    """

    def __init__(self, rewriter: Rewriter, home: dict[str, int]):
        self._rewriter, self._home = rewriter, home
        self._positions = PositionProof(rewriter.graph)
        self._calls = MaskCalls(rewriter.graph, rewriter.kept)
        self._made: dict[Any, fx.Node] = {}

    def makes(self, attention: Attention) -> bool:
        """Lets attention read a mask that its own block makes; tells whether it does."""
        mask, block = attention.mask, self._home[attention.node.name]
        if self._home.get(mask.name, block) == block or attention.leaves_mask_unread:
            return False
        band = SeenBand.of(self._positions.bands(mask), *attention.lengths) if attention.is_plain else None
        own = self._repeated(attention, block) if band is None else self._from_lengths(attention, band, block)
        return own is not None and attention.masked(self._rewriter, own, _TEXT, _PROMISE)

    def _from_lengths(self, attention: Attention, band: SeenBand, block: int) -> fx.Node:
        made = BandMask(band, *attention.lengths, attention.mask.meta["spec"].dtype, self._rewriter.device)
        if (block, made) not in self._made:
            node = self._rewriter.add(before(attention.node), made, ())
            self._made[block, made] = self._noted(node, attention)
        return self._made[block, made]

    def _repeated(self, attention: Attention, block: int) -> fx.Node | None:
        """Repeats the calls that make the mask. A kernel makes numbers as wide as its queries of a mask of flags."""
        mask = attention.mask
        flags = mask.meta["storage_bytes"] if mask.meta["spec"].dtype == torch.bool else 0
        query: Any = attention.given["query"]
        calls = self._calls.of(mask, mask.meta["storage_bytes"] + flags * query.meta["spec"].dtype.itemsize)
        if calls is None:
            return None
        copies = {node: self._made[block, node] for node in calls if (block, node) in self._made}
        for node in calls:
            if node not in copies:
                site = replace(before(attention.node), grad=node.meta["grad"], autocast=node.meta["autocast"])
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: copies.get(n, n))  # pyright: ignore
                made = self._rewriter.add(site, node.target, args, kwargs)  # pyright: ignore
                copies[node] = self._made[block, node] = self._noted(made, attention)
        return copies[mask]

    def _noted(self, node: fx.Node, attention: Attention) -> fx.Node:
        node.meta["mask"] = MaskNote(attention.mask.meta["storage_bytes"], _TEXT, _PROMISE)
        return node
