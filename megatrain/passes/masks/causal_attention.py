"""causal_attention: attention that is masked by causality is told so, and reads no mask."""

from __future__ import annotations

from megatrain.passes.masks.attention import has_masked_attention, masked_attention
from megatrain.passes.masks.position_proof import PositionProof
from megatrain.passes.masks.seen_band import SeenBand
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.tracer.traced import TracedModule

_PROMISE = "the same bits on the CPU, another kernel on a GPU"


def causal_attention(traced: TracedModule) -> TracedModule:
    """Returns the capture with causality in place of masks that say it, `traced` itself if there are none.

        le = arange[None, :].le(arange[:, None])                                ->   (gone)
        F.scaled_dot_product_attention(q, k, v, attn_mask=le)                   ->   (q, k, v, is_causal=True)

    That a mask says causality is proved from the calls that make it (`PositionProof`). A mask under which each query
    sees all keys goes, too. Left alone are masks of other contents or of contents that depend on inputs, attention with
    dropout, with a negative scale, or with another number of keys than of queries, where torch counts from the first
    key. A mask that something else reads stays for that.

    Results and gradients have the bits of the masked kernel on the CPU, as long as no score is infinite or NaN: a
    masked kernel adds -inf to the scores behind a query, another one doesn't compute them. On a GPU a mask takes
    another kernel than causality, whose sums have another order.

    Args:
        traced: The capture.
    """
    if not has_masked_attention(traced.graph):
        return traced
    rewriter = Rewriter(traced)
    positions, changed = None, False
    for attention in masked_attention(rewriter.graph):
        if attention.leaves_mask_unread and attention.mask.meta["spec"].numel > 1:
            changed |= attention.masked(rewriter, None, "causality", "the same kernel", is_causal=True)
            continue
        if not attention.takes_causality:
            continue
        positions = positions or PositionProof(rewriter.graph)
        band = SeenBand.of(positions.bands(attention.mask), *attention.lengths)
        if band is not None and (band.is_causal or band.is_full):
            text = "causality" if band.is_causal else "all keys"
            changed |= attention.masked(rewriter, None, text, _PROMISE, is_causal=band.is_causal)
    return rewriter.done() if changed else traced
