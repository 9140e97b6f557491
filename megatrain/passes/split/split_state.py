"""split_state: cuts a parameter above the target size into parts, and the calls that read it with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import fx

from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.passes.split.part_calls import Part, PartWriter
from megatrain.passes.split.rows import Act, act_on, gather_of, grouped_of, operands, resized, row_of
from megatrain.passes.split.uses import Batch, Cut, Grouped, Row, Selection, Use
from megatrain.sizes import ALIGNMENT
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import TracedModule

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
        traced: The capture.
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
    regions = [node for use in uses for node in use.nodes()]
    return uses if len(set(regions)) == len(regions) else None


def _use(user: fx.Node, tensor: fx.Node, dim: int, before: tuple[Cut, ...], kept: set[fx.Node]) -> Use | None:
    if user.op not in ("call_function", "call_method") or "spec" not in user.meta or user.meta.get("writes"):
        return None
    act = act_on(user, tensor, dim)
    if act is not None and act.is_product:
        return Batch(before, Cut(user, tensor, act)) if _joins_back(user) else None
    row = row_of(user, tensor) if dim == 0 else None
    if row is not None:
        return Row(before, Cut(user, tensor, Act(0)), row)
    gather = gather_of(user, tensor) if dim == 0 else None
    if gather is not None:
        return Selection(before, Cut(user, tensor, Act(0)), gather, _after(user, gather.index, kept))
    grouped = grouped_of(user, tensor) if dim == 0 else None
    return None if grouped is None else Grouped(before, Cut(user, tensor, Act(0)), *grouped)


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
