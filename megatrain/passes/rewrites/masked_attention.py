"""Attention under masks of positions: kernels are told causality; windows and padding are made for some queries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.base.sizes import format_bytes
from megatrain.passes.call_trial import Site
from megatrain.passes.rewriter import Rewriter
from megatrain.passes.rewrites.parts import InParts, Piece, Range, computed_parts
from megatrain.passes.rewrites.positions import Known, PositionProof
from megatrain.tracer.calls import target_name
from megatrain.tracer.spec import CALLS, TensorSpec
from megatrain.tracer.traced import TracedModule

ATTENTION = F.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# Kernels of the CPU go over the keys in blocks of so many. A part that begins and ends with a block has the blocks, and
# so the sums, of the whole; what is masked adds exact zeros.
_UNIT = 512
# Elements of the mask of one part, of all keys that its queries see.
_MOST = 1 << 28


@dataclass(frozen=True, slots=True)
class MaskNote:
    """What became of a call's mask; in `node.meta["mask"]` of what a pass puts there. Prints the pass's promise."""

    nbytes: int
    text: str
    promise: str

    def __str__(self) -> str:
        return f"{self.text} instead of a mask of {format_bytes(self.nbytes)}: {self.promise}"


@dataclass(frozen=True, slots=True)
class SeenBand:
    """Query `i` sees key `j` if `j - i` is from `first` to `last`; the others are masked.

    Args:
        first: Of a causal window of w tokens 1 - w; None where queries see all keys before.
        last: Of causality 0; None where queries see all later keys.
    """

    first: int | None
    last: int | None

    @staticmethod
    def of(known: object, queries: int, keys: int) -> SeenBand | None:
        """The band that a mask of [..., queries, keys] says; None if it says something else.

        A mask of flags says True where a query sees a key, one of numbers adds 0 there and -inf elsewhere.
        """
        if not isinstance(known, Known) or known.dims not in ((), (-2, -1)):
            return None
        values = known.values.expand(queries + keys - 1)
        is_seen = values if values.dtype == torch.bool else values == 0
        places = is_seen.nonzero().flatten()
        if not len(places) or not (is_seen | (values == (False if values.dtype == torch.bool else -math.inf))).all():
            return None
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 != len(places):
            return None
        return SeenBand(first + 1 - queries if first else None, last + 1 - queries if last < len(values) - 1 else None)

    @property
    def is_causal(self) -> bool:
        """Whether queries see themselves and what comes before."""
        return self.first is None and self.last == 0

    @property
    def is_full(self) -> bool:
        """Whether queries see all keys."""
        return self.first is None and self.last is None

    def keys_of(self, rows: slice, keys: int) -> slice:
        """The keys that some queries see, from a multiple of 512 to another, or to the end."""
        least = 0 if self.first is None else max(0, rows.start + self.first)
        most = keys if self.last is None else min(keys, rows.stop + self.last)
        return slice(least // _UNIT * _UNIT, min(keys, -(-most // _UNIT) * _UNIT))

    def reaches_all(self, queries: int, keys: int) -> bool:
        """Tells whether each query sees a key."""
        return (self.last is None or self.last >= 0) and (self.first is None or queries - 1 + self.first < keys)

    def flags(self, rows: slice, keys: slice, device: torch.device) -> torch.Tensor:
        """The mask of some queries and keys: bool [queries, keys], True where a query sees a key."""
        seen = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool, device=device)
        shift = rows.start - keys.start
        seen = seen if self.last is None else seen.tril_(self.last + shift)
        return seen if self.first is None else seen.triu_(self.first + shift)

    def __str__(self) -> str:
        first = "" if self.first is None else f"{self.first} <= "
        last = "" if self.last is None else f" <= {self.last}"
        return "all keys" if self.is_full else f"{first}key - query{last}"


@dataclass(frozen=True, slots=True)
class BandedAttention(InParts):
    """The target of a call: attention under a band, for some queries at a time, on the keys that these see.

    `(query, key, value, *flags)` as for `scaled_dot_product_attention`, with flags of keys [..., 1, keys] that say
    further which keys are seen.

    Args:
        rows: Queries at a time, a multiple of 512.
    """

    band: SeenBand
    rows: int
    queries: int
    keys: int
    options: tuple[tuple[str, Any], ...]
    specs: tuple[TensorSpec, ...]

    __name__ = "banded_attention"

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        options = "".join(f", {name}={value}" for name, value in self.options if value is not None)
        return f"banded_attention({arguments}{options}: {self.band}; {self.rows} queries at a time)"

    def ranges(self) -> list[tuple[slice, slice]]:
        """Ranges of queries, each with the range of the keys that these see."""
        starts = range(0, self.queries, self.rows)
        rows = [slice(start, min(start + self.rows, self.queries)) for start in starts]
        return [(each, self.band.keys_of(each, self.keys)) for each in rows]

    @property
    def most_keys(self) -> int:
        """The keys of the part that sees the most."""
        return max(keys.stop - keys.start for _, keys in self.ranges())

    def parts(self, operands: Sequence[torch.Tensor]) -> Iterator[Piece]:
        """Yields ranges of queries, each with its mask: bool [..., queries, keys]."""
        query, _, _, *flags = operands
        known, seen = None, torch.empty(0)
        for is_computed, (rows, keys) in computed_parts(operands, self.ranges(), _shape):
            if not is_computed:
                continue
            if _shape((rows, keys)) != known:  # parts that are alike share one
                known, seen = _shape((rows, keys)), self.band.flags(rows, keys, query.device)
            mask = seen
            for each in flags:
                mask = mask & (each[..., keys] if each.shape[-1] > 1 else each)
            of_rows, of_keys = (Range(-2, each.start, each.stop - each.start) for each in (rows, keys))
            yield Piece((of_rows, of_keys, of_keys, *(None for _ in flags)), (of_rows,), mask)

    def is_shared(self, index: int) -> bool:
        """Keys and values are, as parts of them overlap."""
        return index > 0

    def compute(self, part: Piece, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Attention of one part."""
        return (ATTENTION(*operands[:3], attn_mask=part.given, **dict(self.options)),)


def causal_attention(traced: TracedModule) -> TracedModule:
    """Returns the capture with causality in place of masks that say it, `traced` itself if there are none.

        le = arange[None, :].le(arange[:, None])                                ->   (gone)
        F.scaled_dot_product_attention(q, k, v, attn_mask=le)                   ->   (q, k, v, is_causal=True)

    That a mask says causality is proved from the calls that make it (`PositionProof`). A mask under which each query
    sees all keys goes, too. Left alone are masks of other contents or of contents that depend on inputs, attention with
    dropout, with a negative scale (kernels fill in -inf before they scale), or with another number of keys than of
    queries, where torch counts from the first key. A mask that something else reads stays for that.

    Results and gradients have the bits of the masked kernel on the CPU, as long as no score is infinite or NaN: a
    masked kernel adds -inf to the scores of later keys, another one doesn't compute them. On a GPU a mask takes another
    kernel than causality, whose sums have another order.
    """
    promise = "the same bits on the CPU, another kernel on a GPU"

    def told(rewriter: Rewriter, node: fx.Node, positions: PositionProof) -> bool:
        given = _given(node)
        (queries, keys), scale = _lengths(given), given.get("scale")
        band = SeenBand.of(positions.of(given["attn_mask"]), queries, keys)
        is_positive = scale is None or (isinstance(scale, int | float) and 0 < scale < math.inf)
        if band is None or not (band.is_causal or band.is_full) or not is_positive or not queries == keys > 1:
            return False
        options = {name: given[name] for name in ("dropout_p", "scale", "enable_gqa") if name in given}
        operands = given["query"], given["key"], given["value"]
        options |= {"attn_mask": None, "is_causal": band.is_causal}
        made = rewriter.add(Site.of(node), ATTENTION, operands, options)
        return _replaced(rewriter, node, made, "causality" if band.is_causal else "all keys", promise)

    return _rewritten(traced, told)


def banded_attention(traced: TracedModule, *, rows: int | None = None) -> TracedModule:
    """Returns the capture with attention under windows and padding computed part by part; `traced` if there is none.

    A window says that queries see some keys near them. Then some queries at a time need these keys and a mask of both;
    neither the mask of all queries and all keys exists, nor is a product computed that the window throws away. That a
    mask is a window, or causality, and flags of keys is proved from the calls that make it. Left alone are causality
    alone and masks of other contents, attention with dropout, and windows under which a query sees no key at all.

    Results and the gradients of queries have the bits of the whole computation on the CPU, as long as no score is
    infinite or NaN. Gradients of keys and values are sums over parts, in fp32 or wider.

    Args:
        rows: Queries at a time; None takes half a window, a multiple of 512.
    """
    promise = "results and gradients of queries keep the CPU's bits, those of keys and values are sums in fp32"

    def parted(rewriter: Rewriter, node: fx.Node, positions: PositionProof) -> bool:
        given = _given(node)
        lengths = _lengths(given)
        band, flags = _seen_keys(given["attn_mask"], *lengths, positions) or (SeenBand(None, None), ())
        if not band.reaches_all(*lengths) or not (flags or (band.first, band.last) not in ((None, 0), (None, None))):
            return False
        options = tuple((name, given[name]) for name in ("scale", "enable_gqa") if name in given)
        specs = (node.meta["spec"],)
        target = BandedAttention(band, rows or _rows(band, flags, *lengths), *lengths, options, specs)
        if target.rows >= lengths[0] and target.most_keys >= lengths[1]:
            return False
        # Operands are cast before, where autocast would have cast them.
        site, dtype = replace(Site.of(node), autocast=()), specs[0].dtype
        operands = [given[name] for name in ("query", "key", "value")]
        operands = [x if x.meta["spec"].dtype == dtype else rewriter.add(site, "to", (x, dtype)) for x in operands]
        made = rewriter.add(site, target, (*operands, *flags))
        return _replaced(rewriter, node, made, f"{target.rows} queries at a time", promise)

    return _rewritten(traced, parted)


def has_masked_attention(graph: fx.Graph) -> bool:
    """Tells whether a call of attention is given a mask: most models have none, and their graph needs no copy."""
    return any(_is_masked(node) for node in graph.nodes)


def _rewritten(traced: TracedModule, changes: Any) -> TracedModule:
    """Offers each masked call to a pass, with what is known of positions."""
    if not has_masked_attention(traced.graph):
        return traced
    rewriter = Rewriter(traced)
    positions = PositionProof(rewriter.graph)
    changed = [changes(rewriter, node, positions) for node in list(rewriter.graph.nodes) if _is_masked(node)]
    return rewriter.done() if any(changed) else traced


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of attention, by name."""
    return {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


def _is_masked(node: fx.Node) -> bool:
    """Whether it is attention whose mask is all that lets queries see less than all keys, and that drops nothing."""
    given = _given(node) if node.target is ATTENTION else {}
    mask = given.get("attn_mask")
    is_plain = not (given.get("is_causal") or given.get("dropout_p") or node.meta.get("is_random"))
    return isinstance(mask, fx.Node) and is_plain and not (mask.meta.get("requires_grad") or mask.meta["spec"].on_host)


def _lengths(given: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of queries and of keys."""
    return given["query"].meta["spec"].shape[-2], given["key"].meta["spec"].shape[-2]


def _replaced(rewriter: Rewriter, old: fx.Node, new: fx.Node, text: str, promise: str) -> bool:
    """Lets others read the new result, if it is laid out like the old one; tells whether it is."""
    if any(old.meta[key] != new.meta[key] for key in ("spec", "requires_grad")):
        return False
    new.meta["mask"] = MaskNote(_given(old)["attn_mask"].meta["storage_bytes"], text, promise)
    rewriter.replace(old, new)
    return True


def _seen_keys(
    mask: fx.Node, queries: int, keys: int, positions: PositionProof
) -> tuple[SeenBand, tuple[fx.Node, ...]] | None:
    """Takes a mask apart: a band, and flags of the same keys for all queries (padding), which must all allow a key.

    None if it has other parts, or something writes into one.
    """
    firsts, lasts, flags, ends = list[int](), list[int](), dict[fx.Node, None](), [mask]
    while ends:
        node = ends.pop()
        spec, operands = node.meta["spec"], node.all_input_nodes
        band = SeenBand.of(positions.of(node), queries, keys)
        if band is not None:
            firsts += [] if band.first is None else [band.first]
            lasts += [] if band.last is None else [band.last]
            continue
        if spec.dtype != torch.bool or spec.on_host or positions.is_written(node):
            return None
        if (len(spec.shape) < 2 or spec.shape[-2] == 1) and spec.shape[-1:] in ((keys,), (1,)):
            flags[node] = None
            continue
        name = target_name(node) if node.op in CALLS and not node.meta.get("is_random") else ""
        is_and = name in ("and", "logical_and", "bitwise_and") and len(operands) == 2
        is_expanded = name in ("expand", "expand_as", "broadcast_to") and len(operands) == 1
        if not (is_and or is_expanded) or any(a.meta["spec"].dtype != torch.bool for a in operands):
            return None
        ends += operands
    return SeenBand(max(firsts, default=None), min(lasts, default=None)), tuple(reversed(flags))


def _rows(band: SeenBand, flags: Sequence[fx.Node], queries: int, keys: int) -> int:
    """Half as many queries as a window has keys, where the mask of a part isn't large: a third is masked then."""
    first, last = band.first, band.last
    width = (keys - 1 if last is None else last) - (1 - queries if first is None else first) + 1
    texts = max((each.meta["spec"].numel // each.meta["spec"].shape[-1] for each in flags), default=1)
    rows = min(width, queries) // 2 // _UNIT * _UNIT
    while rows > _UNIT and texts * rows * min(keys, width + rows) > _MOST:
        rows = rows // 2 // _UNIT * _UNIT
    return max(rows, _UNIT)


def _shape(part: tuple[slice, slice]) -> tuple[int, int, int]:
    """Queries and keys of a part, and how far its keys begin from its queries: with these equal, a mask is equal."""
    rows, keys = part
    return rows.stop - rows.start, keys.stop - keys.start, keys.start - rows.start
