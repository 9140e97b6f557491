"""tile_tokens: the parts of a model in which each token is computed alone, computed tile by tile of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import fx

from megatrain.errors import LowerError
from megatrain.passes.dedup import graph_key
from megatrain.passes.rewrites.alike_parts import AlikeParts
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.passes.rewrites.token_regions import TokenRegion, token_regions
from megatrain.passes.rewrites.token_trials import is_sized, sized_arguments
from megatrain.passes.rewrites.unread_values import unread_linears
from megatrain.passes.rewriting.call_trial import Site
from megatrain.passes.rewriting.rewriter import Rewriter
from megatrain.tracer.traced import TracedModule

# What the calls of a layer make takes about 14 times the memory of its hidden states (an MLP's gate, up and product,
# each about 3 times as wide): with 16 tiles it takes less than these.
_TILES = 16
# Tokens of the smallest tile: products of fewer rows would take longer.
_FEWEST = 256


def tile_tokens(
    traced: TracedModule, *, rows: int | None = None, divisor: int = 1, block_bytes: int | None = None
) -> TracedModule:
    """Returns the capture with its per-token regions computed tile by tile; `traced` itself if there are none.

    A region is a run of calls in one block in which each token is computed from this token alone: linear layers, norms,
    activations, residuals, rotary embeddings. The axis of tokens is followed through torch's own operators
    (`TokenAxes`), so no model is known by its name. Attention, convolutions along the text, sums over tokens, random
    numbers and what reads values are left alone, and so is what these read or make.

    Results and the gradients of per-token operands have the bits of the whole computation on the CPU. Gradients of
    weights, and of all that tokens share, are sums over tiles in fp32 or wider.

    Args:
        traced: The capture.
        rows: Tokens of a tile; None takes a sixteenth of them, and at least 256.
        divisor: Without `rows`: so many times fewer than these, and at least 256.
        block_bytes: As in `partition`.
    """
    regions = token_regions(traced, block_bytes)
    if not regions:
        return traced
    rewriter = Rewriter(traced)
    # The last first: operands are then still the nodes that a region names.
    tiler = _Tiler(rewriter, rows, divisor)
    tiled = [tiler.tiled(region) for region in reversed(regions)]
    return rewriter.done() if any(tiled) else traced


class _Tiler:
    """Replaces regions of one graph by calls. Of equal regions, as layers have them, one is tried.

    Args:
        rewriter: Of the graph.
        rows: As in `tile_tokens`.
        divisor: See there.
    """

    def __init__(self, rewriter: Rewriter, rows: int | None, divisor: int) -> None:
        self._rewriter, self._rows, self._divisor = rewriter, rows, divisor
        self._unread: dict[Any, tuple[int, ...]] = {}

    def tiled(self, region: TokenRegion) -> bool:
        """Replaces a region by one call; tells whether it did."""
        first, rewriter = region.outputs[0], self._rewriter
        axis: Any = region.axes[first]
        tokens = first.meta["spec"].shape[axis]
        size = self._rows or max(_FEWEST, -(-tokens // (_TILES * self._divisor)))
        if size >= tokens:
            return False
        operands = _operands(region)
        graph = _extracted(region, operands)
        given = [operand for operand, count in operands.items() for _ in range(count)]
        axes: Any = tuple(region.axes[operand] for operand in given)
        out_axes: Any = tuple(region.axes[output] for output in region.outputs)
        specs, key = tuple(output.meta["spec"] for output in region.outputs), graph_key(graph)
        target = TiledRegion(graph, key, axes, out_axes, specs, self._unread_of(graph, key), size)
        site = replace(Site.of(region.nodes[-1]), modules=_modules(region), grad=True, autocast=())
        try:
            trial = target.with_alike_parts(AlikeParts())
            made = rewriter.add(site, target, tuple(given), trial=trial, shares_trial=True)
        except LowerError:  # a tile's strides differ from the whole, and a view may not fit them
            return False
        news = {old: new for old, new in zip(region.outputs, made if len(specs) > 1 else (made,), strict=True)}
        for node in reversed(region.nodes):
            if node in news:
                rewriter.replace(node, news[node])
            else:
                rewriter.erase(node)
        return True

    def _unread_of(self, graph: fx.Graph, key: Any) -> tuple[int, ...]:
        known_by = key, tuple(node.meta["requires_grad"] for node in graph.nodes if node.op == "placeholder")
        if known_by not in self._unread:
            self._unread[known_by] = unread_linears(graph, self._rewriter.device)
        return self._unread[known_by]


def _operands(region: TokenRegion) -> dict[fx.Node, int]:
    """The operands, and how often each is given: once for each use that sends it a gradient, where that matters.

    Autograd adds up the gradients of a tensor's uses, that of the last call first. Those of a region's own uses would
    be one term, in another order, if others come from outside.
    """
    own = set(region.nodes)
    operands: dict[fx.Node, int] = {}
    for operand in region.operands:
        reads = {user: _reads(user)[operand] for user in operand.users}
        inside = sum(count for user, count in reads.items() if user in own)
        is_summed = region.axes[operand] is None or not operand.meta["requires_grad"]
        operands[operand] = 1 if is_summed or sum(reads.values()) <= 2 else inside
    return operands


def _reads(node: fx.Node) -> Counter[fx.Node]:
    """How often a call reads each tensor."""
    reads: Counter[fx.Node] = Counter()
    fx.map_arg((node.args, node.kwargs), lambda n: reads.update([n]))
    return reads


def _extracted(region: TokenRegion, operands: dict[fx.Node, int]) -> fx.Graph:
    """Copies a region into a graph of its own, for any number of tokens.

    Among several placeholders of one operand the last call has the first.
    """
    graph = fx.Graph()
    given: dict[fx.Node, list[fx.Node]] = {operand: [] for operand in operands}
    for operand, count in operands.items():
        for _ in range(count):
            placeholder = graph.create_node("placeholder", operand.name, name=operand.name)
            is_shared = region.axes[operand] is None
            placeholder.meta.update(
                is_shared=is_shared, **{key: operand.meta[key] for key in ("spec", "requires_grad", "storage")}
            )
            given[operand].append(placeholder)
    copies: dict[fx.Node, fx.Node] = {}
    for node in region.nodes:
        axis: Any = region.axes[node]
        args, kwargs = sized_arguments(node, axis) if is_sized(node) else (node.args, node.kwargs)
        own = {n: given[n][-count:] for n, count in _reads(node).items() if operands.get(n, 1) > 1}
        for operand, used in own.items():
            del given[operand][-len(used) :]

        def copy(n: fx.Node, own: dict[fx.Node, list[fx.Node]] = own) -> fx.Node:
            if n in copies:
                return copies[n]
            return own[n].pop(0) if n in own else given[n][0]

        args, kwargs = fx.map_arg((args, dict(kwargs)), copy)  # pyright: ignore
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        copies[node].meta.update(node.meta)
    graph.output(tuple(copies[node] for node in region.outputs))
    return graph


def _modules(region: TokenRegion) -> tuple[tuple[str, int], ...]:
    """The innermost module call around all calls; where that is the model itself, the one that has the first state."""
    chains = [node.meta["modules"] for node in region.nodes]
    common: list[tuple[str, int]] = []
    for calls in zip(*chains, strict=False):
        if len(set(calls)) > 1:
            break
        common.append(calls[0])
    with_state = [n for n in region.nodes if any(a.op == "get_attr" for a in n.all_input_nodes)]
    return tuple(common) if len(common) > 1 or not with_state else with_state[0].meta["modules"]
