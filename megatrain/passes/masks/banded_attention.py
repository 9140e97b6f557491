"""banded_attention: attention under a mask of positions, computed for some queries at a time on the keys they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatrain.passes.masks.attention import Attention, has_masked_attention, masked_attention
from megatrain.passes.masks.position_proof import PositionProof
from megatrain.passes.masks.seen_band import SeenBand
from megatrain.passes.masks.seen_keys import SeenKeys
from megatrain.passes.rewrites.alike_parts import AlikeParts, computed_parts
from megatrain.passes.rewrites.gradient_sum import GradientSum
from megatrain.passes.rewriting.call_trial import Site
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import TracedModule

# Kernels of the CPU go over the keys in blocks of so many. A part that begins and ends with a block has the blocks, and
# so the sums, of the whole; what is masked adds exact zeros.
_UNIT = 512
_PROMISE = "results and gradients of queries keep the CPU's bits, those of keys and values are sums in fp32"
# Elements of the mask of one part, of all keys that its queries see.
_MOST = 1 << 28


@dataclass(frozen=True, slots=True)
class BandedAttention:
    """The target of a call: attention under a band, for some queries at a time, on the keys that these see.

    `(query, key, value, *flags)` as for `scaled_dot_product_attention`, with flags of keys [..., 1, keys] that say
    further which keys are seen. The forward keeps its operands alone; the backward computes each part once more, under
    autograd, and differentiates it.

    Args:
        band: Which keys a query sees.
        rows: Queries at a time, a multiple of 512.
        queries: Their number.
        keys: Their number.
        options: `scale` and `enable_gqa`, as for torch.
        alike: Says which parts a measurement computes.
    """

    band: SeenBand
    rows: int
    queries: int
    keys: int
    options: tuple[tuple[str, Any], ...]
    alike: AlikeParts | None = field(default=None, compare=False)

    __name__ = "banded_attention"

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *flags: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention; the result has the shape of the query, and the width of the value."""
        return _QueryParts.apply(self, query, key, value, *flags)  # pyright: ignore[reportReturnType]

    def with_alike_parts(self, alike: AlikeParts) -> BandedAttention:
        """See `InParts`."""
        return replace(self, alike=alike)

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        options = "".join(f", {name}={value}" for name, value in self.options if value is not None)
        return f"banded_attention({arguments}{options}: {self.band}; {self.rows} queries at a time)"

    def masked_parts(
        self, flags: Sequence[torch.Tensor], device: torch.device
    ) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yields the ranges of each part that is computed, and its mask: bool [..., queries, keys]."""
        known, seen = None, torch.empty(0)
        for is_computed, (rows, keys) in computed_parts(self.alike, list(self.parts()), _shape):
            if not is_computed:
                continue
            shape = _shape((rows, keys))
            if shape != known:  # parts that are alike share one
                known, seen = shape, self.band.flags((rows.start, rows.stop), (keys.start, keys.stop), device)
            mask = seen
            for each in flags:
                mask = mask & (each[..., keys] if each.shape[-1] > 1 else each)
            yield rows, keys, mask

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yields ranges of queries, each with the range of the keys that these see."""
        for start in range(0, self.queries, self.rows):
            end = min(start + self.rows, self.queries)
            least, most = self.band.keys_of(start, end, self.keys)
            yield slice(start, end), slice(least // _UNIT * _UNIT, min(self.keys, -(-most // _UNIT) * _UNIT))

    @property
    def most_keys(self) -> int:
        """The keys of the part that sees the most."""
        return max(keys.stop - keys.start for _, keys in self.parts())

    def part(self, operands: tuple[torch.Tensor, ...], mask: torch.Tensor) -> torch.Tensor:
        """Attention of one part."""
        return F.scaled_dot_product_attention(*operands, attn_mask=mask, **dict(self.options))


def banded_attention(traced: TracedModule, *, rows: int | None = None) -> TracedModule:
    """Returns the capture with attention under windows and padding computed part by part; `traced` if there is none.

    A window says that queries see some keys near them. Then some queries at a time need these keys and a mask of both;
    neither the mask of all queries and all keys exists, nor is a product computed that the window throws away. That a
    mask is a window, or causality, and flags of keys (`SeenKeys`) is proved from the calls that make it. Left alone are
    causality alone and masks of other contents, attention with dropout, `MultiheadAttention`, and windows under which a
    query sees no key at all.

    Results and the gradients of queries have the bits of the whole computation on the CPU, as long as no score is
    infinite or NaN. Gradients of keys and values are sums over parts, in fp32 or wider.

    Args:
        traced: The capture.
        rows: Queries at a time; None takes half a window, a multiple of 512.
    """
    if not has_masked_attention(traced.graph):
        return traced
    rewriter = Rewriter(traced)
    positions, changed, tried = None, False, dict[Any, TensorSpec]()
    for attention in masked_attention(rewriter.graph):
        if attention.draws or attention.is_multihead or not attention.is_plain:
            continue
        positions = positions or PositionProof(rewriter.graph)
        seen = SeenKeys.of(attention.mask, *attention.lengths, positions)
        if seen is None or not seen.band.reaches_all(*attention.lengths):
            continue
        if seen.flags or not (seen.band.is_causal or seen.band.is_full):
            changed |= _is_parted(rewriter, attention, seen, rows or _rows(seen, *attention.lengths), tried)
    return rewriter.done() if changed else traced


def _is_parted(
    rewriter: Rewriter, attention: Attention, seen: SeenKeys, rows: int, tried: dict[Any, TensorSpec]
) -> bool:
    """Replaces a call; tells whether it did. Operands are cast before, where autocast would have cast them.

    Args:
        rewriter: Of the graph.
        attention: The call.
        seen: What its mask says.
        rows: Queries at a time.
        tried: The result of each kind of call: a trial runs all parts.
    """
    queries, keys = attention.lengths
    options = tuple((name, attention.given[name]) for name in ("scale", "enable_gqa") if name in attention.given)
    target = BandedAttention(seen.band, rows, queries, keys, options)
    if rows >= queries and target.most_keys >= keys:
        return False
    site = replace(Site.of(attention.node), autocast=())
    dtype = attention.node.meta["spec"].dtype
    operands: list[fx.Node] = []
    for name in ("query", "key", "value"):
        given: Any = attention.given[name]
        is_cast = given.meta["spec"].dtype != dtype
        operands.append(rewriter.add(site, "to", (given, dtype)) if is_cast else given)
    given = (*operands, *seen.flags)
    key = target, site.grad, tuple((each.meta["spec"], each.meta["requires_grad"]) for each in given)
    made = rewriter.add(site, target, given, spec=tried.get(key), trial=target.with_alike_parts(AlikeParts()))
    tried[key] = made.meta["spec"]
    return attention.replaced(rewriter, made, f"{rows} queries at a time", _PROMISE)


def _rows(seen: SeenKeys, queries: int, keys: int) -> int:
    """Half as many queries as a window has keys, where the mask of a part isn't large: a third is masked then."""
    first = 1 - queries if seen.band.first is None else seen.band.first
    last = keys - 1 if seen.band.last is None else seen.band.last
    width = last - first + 1
    texts = max((each.meta["spec"].numel // each.meta["spec"].shape[-1] for each in seen.flags), default=1)
    rows = min(width, queries) // 2 // _UNIT * _UNIT
    while rows > _UNIT and texts * rows * min(keys, width + rows) > _MOST:
        rows = rows // 2 // _UNIT * _UNIT
    return max(rows, _UNIT)


def _shape(part: tuple[slice, slice]) -> tuple[int, int, int]:
    """Queries and keys of a part, and how far its keys begin from its queries: with these equal, a mask is equal."""
    rows, keys = part
    return rows.stop - rows.start, keys.stop - keys.start, keys.start - rows.start


class _QueryParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: BandedAttention, *operands: torch.Tensor) -> torch.Tensor:
        ctx.target = target
        ctx.save_for_backward(*operands)
        needs = ctx.needs_input_grad[1:4]
        query, _, value = operands[:3]
        result = None
        for rows, keys, mask in target.masked_parts(operands[3:], query.device):
            # Kernels look at whether a tensor requires a gradient, so each must, as in the whole.
            with torch.set_grad_enabled(any(needs)), saved_tensors_hooks(lambda _: None, _refuse):
                part = target.part(_leaves(operands, needs, rows, keys), mask).detach()
            if result is None:
                result = _laid_out(part, (*query.shape[:-1], value.shape[-1]))
            result[..., rows, :] = part
        assert result is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        target: BandedAttention = ctx.target
        operands, flags, needs = ctx.saved_tensors[:3], ctx.saved_tensors[3:], ctx.needs_input_grad[1:4]
        of_query = torch.empty_like(operands[0]) if needs[0] else None
        sums = [GradientSum(tensor) if need else None for tensor, need in zip(operands[1:], needs[1:], strict=True)]
        for rows, keys, mask in target.masked_parts(flags, gradient.device):
            leaves = _leaves(operands, needs, rows, keys)
            with torch.enable_grad():
                part = target.part(leaves, mask)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(part, wanted, gradient[..., rows, :]))
            del part
            if of_query is not None:
                of_query[..., rows, :] = next(found)
            for total, place in ((total, keys) for total in sums if total is not None):
                total.add_at(next(found), -2, place)
        totals = [None if total is None else total.rounded() for total in sums]
        return None, of_query, *totals, *(None for _ in flags)


def _leaves(
    operands: tuple[torch.Tensor, ...], needs: tuple[bool, ...], rows: slice, keys: slice
) -> tuple[torch.Tensor, ...]:
    """The operands of a part."""
    return tuple(
        tensor[..., place, :].detach().requires_grad_(need)
        for tensor, need, place in zip(operands[:3], needs, (rows, keys, keys), strict=True)
    )


def _laid_out(part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory for all parts, with dimensions in the order that they have in one."""
    order = sorted(range(part.dim()), key=lambda dim: (-part.stride(dim), dim))
    whole = part.new_empty([shape[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(part.dim())])


def _refuse(_: Any) -> torch.Tensor:
    raise AssertionError("the forward of a part was differentiated")
