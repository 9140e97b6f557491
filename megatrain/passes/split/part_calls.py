"""Writes the calls of each part of a state tensor, and the calls that join their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.passes.canonicalize import is_erased
from megatrain.passes.rewriting.call_trial import Site, Target
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.passes.split.rows import dims_by_stride, known_name, operands, resized
from megatrain.passes.split.uses import Batch, Cut, Grouped, Row, Selection, Use
from megatrain.tracer.calls import call_name
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, and the node that reads it."""

    entry: StateEntry
    node: fx.Node


class PartWriter:
    """Adds the calls of parts, behind the call that they replace.

    Args:
        rewriter: Has the graph.
    """

    def __init__(self, rewriter: Rewriter):
        self._rewriter = rewriter
        self._num_uses = 0
        # The call being replaced, and the module call of the part at work.
        self._like: fx.Node
        self._marker: tuple[tuple[str, int], ...] = ()

    def part(self, weight: fx.Node, entry: StateEntry) -> Part:
        """Reads a part of `weight`; the parts share its memory."""
        graph = self._rewriter.graph
        with graph.inserting_before(weight):
            node = graph.create_node("get_attr", entry.key, name=entry.key.replace(".", "_"))
        node.meta.update(weight.meta, spec=entry.spec, key=entry.key)
        return Part(entry, node)

    def write(self, use: Use, parts: list[Part]) -> None:
        """Replaces a use of the whole by uses of its parts."""
        self._like = use.end
        self._num_uses += 1
        joined = self._joined(use, parts)
        self._marker = ()
        self._rewriter.replace(use.end, joined)
        for node in (*reversed(use.nodes()), *(step.node for step in reversed(use.before))):
            self.erase(node)

    def erase(self, node: fx.Node) -> None:
        """Removes a node that nothing reads any more."""
        if not is_erased(node):
            self._rewriter.erase(node)

    # -- one use ------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _joined(self, use: Use, parts: list[Part]) -> fx.Node:
        raise AssertionError(f"{type(use).__name__} has no rule")

    @_joined.register
    def _(self, use: Batch, parts: list[Part]) -> fx.Node:
        results: list[fx.Node] = []
        for part in parts:
            self._begin(part)
            rows = part.entry.rows
            results.append(self._on_rows(use.call, self._weights(use, part), rows))
        self._marker = ()
        # An einsum's result may lie in memory in another order than its dimensions; so must what replaces it.
        order = dims_by_stride(use.end.meta["spec"])
        results = [self._in_order(r, order) for r in results]
        joined = self._new(torch.cat, results, order.index(use.call.act.dim))
        return self._in_order(joined, [order.index(d) for d in range(len(order))])

    @_joined.register
    def _(self, use: Row, parts: list[Part]) -> fx.Node:
        (part,) = (p for p in parts if p.entry.rows[0] <= use.row < p.entry.rows[1])
        weights = self._weights(use, part)
        call = use.call.node
        row = use.row - part.entry.rows[0]
        target, args = (
            ("__getitem__", (weights, row)) if known_name(call) == "__getitem__" else ("select", (weights, 0, row))
        )
        return self._add(target, args, {}, call, call.meta["spec"], weights.meta["storage"])

    @_joined.register
    def _(self, use: Selection, parts: list[Part]) -> fx.Node:
        total = parts[-1].entry.rows[1]
        index = use.gather.index
        if use.gather.counts_from_end:
            index = self._new(torch.where, self._new("lt", index, 0), self._new("add", index, total), index)
        is_known = self._new("logical_and", self._new("ge", index, 0), self._new("lt", index, total))
        # What other parts hold is computed with any row of this one, and thrown away; spread, so that no single row
        # collects all their (zero) gradients. A number out of range stays out of range, and is refused as ever.
        fewest = min(p.entry.spec.shape[0] for p in parts)
        spare = self._new(torch.where, is_known, self._new("remainder", index, fewest), total)
        joined: fx.Node | None = None
        for part in parts:
            self._begin(part)
            start, end = part.entry.rows
            is_here = self._new("logical_and", self._new("ge", index, start), self._new("lt", index, end))
            local = self._new(torch.where, is_here, self._new("sub", index, start), spare)
            picked = self._picked(use, self._weights(use, part), local, part)
            for step in use.after:
                picked = self._on_chosen(step, picked, is_here)
            joined = picked if joined is None else self._new(torch.where, self._mask(is_here, picked), picked, joined)
        assert joined is not None
        return joined

    @_joined.register
    def _(self, use: Grouped, parts: list[Part]) -> fx.Node:
        count = use.tokens.meta["spec"].shape[0]
        places = self._new(torch.arange, count, device=self._rewriter.device)
        joined: fx.Node | None = None
        for part in parts:
            self._begin(part)
            first, last = part.entry.rows
            end = self._new("select", use.ends, 0, last - 1)
            ends = self._new("narrow", use.ends, 0, first, last - first)
            tokens, length = use.tokens, end
            start: fx.Node | None = None
            if first:
                # The part's run comes first: a rotation keeps shapes for any lengths of the runs.
                start = self._new("select", use.ends, 0, first - 1)
                ends, length = self._new("sub", ends, start), self._new("sub", end, start)
                turned = self._new("remainder", self._new("add", places, start), count)
                tokens = self._new("index_select", tokens, 0, turned)
            # After its last run the kernel leaves results and gradients undefined.
            is_run = self._new("lt", places, length)
            tokens = self._new(torch.where, self._mask(is_run, tokens), tokens, 0)
            replaced = {use.call.operand: self._weights(use, part), use.tokens: tokens, use.ends: ends}
            result = self._copy(use.call.node, replaced)
            if joined is None or start is None:
                joined = result
                continue
            back = self._new("index_select", result, 0, self._new("remainder", self._new("sub", places, start), count))
            is_here = self._new("logical_and", self._new("ge", places, start), self._new("lt", places, end))
            joined = self._new(torch.where, self._mask(is_here, back), back, joined)
        assert joined is not None
        return joined

    def _weights(self, use: Use, part: Part) -> fx.Node:
        """Repeats the views and casts of the whole on a part."""
        weights = part.node
        for step in use.before:
            weights = self._on_rows(step, weights, part.entry.rows)
        return weights

    def _picked(self, use: Selection, weights: fx.Node, local: fx.Node, part: Part) -> fx.Node:
        call = use.call.node
        if known_name(call) != "embedding":
            return self._copy(call, {use.call.operand: weights, use.gather.index: local})
        start, end = part.entry.rows
        padding = use.gather.padding
        padding = padding - start if padding is not None and start <= padding < end else None
        return self._add(F.embedding, (local, weights, padding), {}, call, call.meta["spec"], None)

    def _on_rows(self, step: Cut, tensor: fx.Node, rows: tuple[int, int]) -> fx.Node:
        """Repeats a call on a stretch of rows."""
        start, end = rows
        replaced = {n: self._new("narrow", n, dim, start, end - start) for n, dim in step.act.aligned}
        return self._copy(step.node, {**replaced, step.operand: tensor}, step.act.dim, end - start)

    def _on_chosen(self, step: Cut, tensor: fx.Node, is_here: fx.Node) -> fx.Node:
        """Repeats a call on all rows, of which only those of this part count.

        The others get zeros, so that what they hold can't spoil the gradient of the row that stands in for theirs.
        """
        replaced = {n: self._new(torch.where, self._mask(is_here, n), n, 0) for n, _ in step.act.aligned}
        return self._copy(step.node, {**replaced, step.operand: tensor})

    # -- single calls -------------------------------------------------------------------------------------

    def _begin(self, part: Part) -> None:
        self._marker = ((part.entry.key, self._num_uses),)

    def _mask(self, flags: fx.Node, tensor: fx.Node) -> fx.Node:
        """Shapes one flag per row to fit the rows of `tensor`."""
        shape = flags.meta["spec"].shape
        missing = len(tensor.meta["spec"].shape) - len(shape)
        return self._new("reshape", flags, (*shape, *([1] * missing))) if missing else flags

    def _in_order(self, tensor: fx.Node, dims: list[int]) -> fx.Node:
        return tensor if dims == sorted(dims) else self._new("permute", tensor, dims)

    def _new(self, target: Target, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call of our own, outside of any autocast region."""
        site = replace(self._site(self._like), autocast=())
        return self._rewriter.add(site, target, args, kwargs, name=_name(target))

    def _copy(
        self, node: fx.Node, replaced: Mapping[fx.Node, fx.Node], dim: int = 0, size: int | None = None
    ) -> fx.Node:
        """Repeats a call with other operands; its result has `size` rows along `dim`."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: replaced.get(n, n))
        spec = node.meta["spec"] if size is None else resized(node.meta["spec"], dim, size)
        aliased = [n for n in operands(node) if n.meta.get("storage") == node.meta["storage"]]
        storage = replaced.get(aliased[0], aliased[0]).meta["storage"] if aliased else None
        return self._add(node.target, args, kwargs, node, spec, storage)

    def _add(
        self, target: Any, args: Any, kwargs: Any, like: fx.Node, spec: TensorSpec, storage: int | None
    ) -> fx.Node:
        """Repeats a call, `like`, whose result is known: not every kernel can be tried without values."""
        site = replace(self._site(self._like), grad=like.meta["grad"], autocast=like.meta["autocast"])
        return self._rewriter.add(site, target, args, kwargs, spec=spec, storage=storage, name=_name(target))

    def _site(self, end: fx.Node) -> Site:
        site = Site.of(end)
        return replace(site, modules=(*site.modules, *self._marker))


def _name(target: Target) -> str:
    return f"part_{target if isinstance(target, str) else call_name(target)}"
