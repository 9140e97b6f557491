"""split_state: cuts a parameter above the target size into parts, and the calls that read it with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.base.sizes import ALIGNMENT
from megatrain.passes.call_trial import Site
from megatrain.passes.canonicalize import is_erased
from megatrain.passes.pattern import Target
from megatrain.passes.rewriter import Rewriter
from megatrain.passes.split.rows import (
    Act,
    Batch,
    Cut,
    Grouped,
    Row,
    Selection,
    Use,
    act_on,
    dims_by_stride,
    gather_of,
    grouped_of,
    known_name,
    operands,
    resized,
    row_of,
)
from megatrain.tracer.calls import call_name
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import TracedModule


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, and the node that reads it."""

    entry: StateEntry
    node: fx.Node


class PartWriter:
    """Adds the calls of parts, after the call that they replace."""

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
        self._like = use.nodes[-1]
        self._num_uses += 1
        joined = self._joined(use, parts)
        self._marker = ()
        self._rewriter.replace(use.nodes[-1], joined)
        for node in (*reversed(use.nodes), *(step.node for step in reversed(use.before))):
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
        order = dims_by_stride(use.call.node.meta["spec"])
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


_MOST_PARTS = 512
"""Each part costs calls in every step, so a table has at most so many parts, whatever the target."""


def split_state(traced: TracedModule, *, limit: int, alignment: int = ALIGNMENT) -> TracedModule:
    """Returns `traced` with each state tensor above `limit` bytes cut along its first dimension, where its uses allow.

    All experts of a layer are often one stacked parameter, so no module boundary separates them:

        bmm = torch.bmm(x, experts.up)
        ->  part_bmm = torch.bmm(x.narrow(0, 0, 64), experts.up[0:64])
            part_bmm_1 = torch.bmm(x.narrow(0, 64, 64), experts.up[64:128])
            bmm = torch.cat([part_bmm, part_bmm_1], 0)

    A use can be cut if every row of its result comes from one part: products batched over the first dimension,
    rows picked by number (a large embedding, too), grouped products, single rows. A tensor with any other use stays
    whole. Each part's calls carry a module call of their own, `experts.up[0:64]`, where `partition` may cut.

    Args:
        limit: Target bytes of a block's state; a single row may be larger.
        alignment: Parts begin at multiples of so many bytes where rows allow.
    """
    large = [entry for entry in traced.state.values() if entry.spec.nbytes > limit and _has_rows(entry)]
    large = _separable(traced, large) if large else []
    if not large:
        return traced
    rewriter = Rewriter(traced)
    writer = PartWriter(rewriter)
    kept = rewriter.kept
    weights = _weights(rewriter.graph)
    state = dict(traced.state)
    for entry in large:
        weight = weights[entry.key]
        uses = _uses(weight, kept)
        if uses is not None:
            parts = _write(writer, weight, uses, [entry.part(*rows) for rows in _bounds(entry, limit, alignment)])
            state = _replaced(state, entry.key, {p.entry.key: p.entry for p in parts})
    return rewriter.done(state=state)


def _has_rows(entry: StateEntry) -> bool:
    is_state = entry.kind != "constant"
    return is_state and entry.spec.stride is None and bool(entry.spec.shape) and entry.spec.shape[0] > 1


def _separable(traced: TracedModule, large: list[StateEntry]) -> list[StateEntry]:
    """Picks what no call needs whole; most models have none, and keep their graph."""
    kept = {node for _, node in traced.writes_back}
    written: set[Any] = {key for key, _ in traced.writes_back}
    written.update(w for node in traced.graph.nodes for w in node.meta.get("writes", ()))
    weights = {key: node for key, node in _weights(traced.graph).items() if not written & {key, node}}
    return [entry for entry in large if entry.key in weights and _uses(weights[entry.key], kept)]


def _weights(graph: fx.Graph) -> dict[str, fx.Node]:
    return {str(node.target): node for node in graph.nodes if node.op == "get_attr"}


def _bounds(entry: StateEntry, limit: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Yields the rows of each part: as many as `limit` allows, evenly spread."""
    total = entry.spec.shape[0]
    row_bytes = entry.spec.nbytes // total
    most = max(limit // row_bytes, math.ceil(total / _MOST_PARTS))
    size = math.ceil(total / math.ceil(total / most))
    # Parts start at such multiples where rows allow, as kernels see of whole tensors.
    step = alignment // math.gcd(alignment, row_bytes)
    if size > step:
        rounded = math.ceil(size / step) * step
        size = rounded if rounded <= most else size // step * step
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _replaced(state: dict[str, StateEntry], key: str, parts: dict[str, StateEntry]) -> dict[str, StateEntry]:
    found: dict[str, StateEntry] = {}
    for name, entry in state.items():
        found.update(parts if name == key else {name: entry})
    return found


def _write(writer: PartWriter, weight: fx.Node, uses: list[Use], entries: list[StateEntry]) -> list[Part]:
    """Rewrites every use and drops the whole tensor; parts that no use reads (rows never named) stay away."""
    parts = [writer.part(weight, entry) for entry in entries]
    for use in uses:
        writer.write(use, parts)
    writer.erase(weight)
    for part in parts:
        writer.erase(part.node)
    return [part for part in parts if part.node.users]


def _uses(weight: fx.Node, kept: set[fx.Node]) -> list[Use] | None:
    """Follows a tensor to the calls where it meets other data; None if one of them needs it whole."""
    uses: list[Use] = []
    open_ends: list[tuple[fx.Node, int, tuple[Cut, ...]]] = [(weight, 0, ())]
    while open_ends:
        tensor, dim, before = open_ends.pop()
        if tensor in kept:
            return None
        for user in tensor.users:
            use = _use(user, tensor, dim, before, kept)
            if use is not None:
                uses.append(use)
                continue
            act = act_on(user, tensor, dim)
            if act is None or act.is_product or (len(user.users) > 1 and not act.is_view):
                return None
            open_ends.append((user, act.dim, (*before, Cut(user, tensor, act))))
    regions = [node for use in uses for node in use.nodes]
    return uses if len(set(regions)) == len(regions) else None


def _use(user: fx.Node, tensor: fx.Node, dim: int, before: tuple[Cut, ...], kept: set[fx.Node]) -> Use | None:
    if user.op not in ("call_function", "call_method") or "spec" not in user.meta or user.meta.get("writes"):
        return None
    act = act_on(user, tensor, dim)
    if act is not None and act.is_product:
        return Batch(before=before, call=Cut(user, tensor, act)) if _joins_back(user) else None
    if dim != 0:
        return None
    call = Cut(user, tensor, Act(0))
    row, gather, grouped = row_of(user, tensor), gather_of(user, tensor), grouped_of(user, tensor)
    if row is not None:
        return Row(before=before, call=call, row=row)
    if gather is not None:
        return Selection(before=before, call=call, gather=gather, after=_after(user, gather.index, kept))
    return None if grouped is None else Grouped(before=before, call=call, tokens=grouped[0], ends=grouped[1])


def _joins_back(node: fx.Node) -> bool:
    """Tells whether the result is dense, so that parts can make it up in the layout it has."""
    spec: TensorSpec = node.meta["spec"]
    return bool(spec.shape) and resized(spec, 0, spec.shape[0]) == spec


def _after(call: fx.Node, index: fx.Node, kept: set[fx.Node]) -> tuple[Cut, ...]:
    """Follows picked rows up to the product that uses them up, so that they needn't leave the part's calls.

    Picked expert weights, a matrix for each token, are larger than the layer; their products are activations.
    """
    steps: list[Cut] = []
    tensor = call
    while len(index.meta["spec"].shape) == 1 and len(tensor.users) == 1 and tensor not in kept:
        (user,) = tensor.users
        act = act_on(user, tensor, 0) if user.op != "output" else None
        if act is None or act.dim != 0 or not (act.is_view or (act.is_product and act.aligned)):
            break
        steps.append(Cut(user, tensor, act))
        if act.is_product:
            is_movable = _joins_back(user) and not _is_disturbed(call, user, [s.node for s in steps])
            return tuple(steps) if is_movable else ()
        tensor = user
    return ()


def _is_disturbed(call: fx.Node, end: fx.Node, chain: list[fx.Node]) -> bool:
    """Tells whether something that `call` or the chain reads is written before `end`, to where the call moves."""
    read = {n.meta["storage"] for node in (call, *chain) for n in operands(node) if "storage" in n.meta}
    node = call.next
    while node is not end:
        if any(w.meta["storage"] in read for w in node.meta.get("writes", ())):
            return True
        node = node.next
    return False
