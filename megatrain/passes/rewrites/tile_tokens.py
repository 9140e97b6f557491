"""tile_tokens: the parts of a model in which each token is computed alone, computed tile by tile of tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.errors import LowerError
from megatrain.passes.call_trial import Site
from megatrain.passes.canonicalize import graph_key
from megatrain.passes.partition import find_intervals
from megatrain.passes.rewriter import Rewriter
from megatrain.passes.rewrites.head_loss import HeadLoss
from megatrain.passes.rewrites.parts import InParts
from megatrain.passes.rewrites.tiled_region import TiledRegion
from megatrain.passes.rewrites.token_rules import FEW, Axes, Trials, is_sized, sized_arguments
from megatrain.tracer.spec import CALLS
from megatrain.tracer.traced import TracedModule

_PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.addmm, "matmul", "__matmul__", "mm", "addmm")
# Places of operands that are tried, where several dimensions are as long as the text.
_MOST_TRIALS = 64


@dataclass(frozen=True, slots=True, eq=False)
class TokenRegion:
    """A run of calls in which each token is computed alone.

    Args:
        nodes: The calls, in execution order.
        axes: Of the calls and of all that they read: the dimension along which tokens lie, None for what tokens share.
            Of a call with several results, one each.
        outputs: The calls that others read.
    """

    nodes: tuple[fx.Node, ...]
    axes: Mapping[fx.Node, Axes]
    outputs: tuple[fx.Node, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        axis: Any = self.axes[self.outputs[0]]
        return self.outputs[0].meta["spec"].shape[axis]

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """What the calls read, but don't make, in order of first use."""
        return tuple(_read_by(self.nodes))


def _read_by(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """What some calls read and don't make, in order of first use."""
    own = set(nodes)
    return dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in own)


def token_regions(traced: TracedModule, block_bytes: int | None = None) -> list[TokenRegion]:
    """Lists the regions of a capture that are worth tiling, in execution order.

    Regions don't cross the cuts that `partition` makes between blocks of `block_bytes`, and read no larger state.
    """
    trials = Trials(traced.device)
    plain = _plain_calls(traced, block_bytes)
    found: list[TokenRegion] = []
    for interval in find_intervals(traced, block_bytes):
        for tokens in _lengths(interval.nodes):
            for region in _Finder(tokens, trials, plain).regions(interval.nodes):
                plain.difference_update(region.nodes)
                found.append(region)
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    return sorted(found, key=lambda region: order[region.nodes[0]])


def _plain_calls(traced: TracedModule, block_bytes: int | None) -> set[fx.Node]:
    """The calls that make tensors and do nothing else, and read tensors that nothing writes into.

    What is computed in parts already takes its tokens apart: no trial would find that it treats each alone. State above
    `block_bytes` is cut into rows later, so a region can't hold its calls.
    """
    written = {w.meta["storage"] for n in traced.graph.nodes for w in n.meta.get("writes", ())}
    kept = {node for _, node in traced.writes_back}

    def is_plain(node: fx.Node) -> bool:
        meta = node.meta
        if node.op not in CALLS or isinstance(node.target, InParts | HeadLoss) or node in kept:
            return False
        if any(meta.get(key) for key in ("is_random", "writes", "hides_draws", "results", "mask")):
            return False
        if not meta["spec"].numel if "spec" in meta else not node.users:  # nobody reads it, or it gave back an operand
            return False
        for operand in (node, *node.all_input_nodes):
            spec = operand.meta.get("spec")
            if spec is None:
                continue
            is_large = operand.op == "get_attr" and block_bytes is not None and spec.nbytes > block_bytes
            if spec.on_host or is_large or operand.meta["storage"] in written:
                return False
        return True

    return set(filter(is_plain, traced.graph.nodes))


def _lengths(nodes: Sequence[fx.Node]) -> list[int]:
    """Numbers of rows of the products in a block, the most bytes first: one of them is that of tokens."""
    sizes: Counter[int] = Counter()
    for node in nodes:
        made = node.args[0] if isinstance(node.target, HeadLoss) else node
        if made is node and node.target not in _PRODUCTS:
            continue
        spec = made.meta.get("spec")  # pyright: ignore
        if spec is not None and len(spec.shape) > 1:
            sizes[spec.shape[-2]] += spec.nbytes
    return [size for size, _ in sizes.most_common() if size > FEW]


class _Finder:
    """Looks for the regions of one block, for one number of tokens."""

    def __init__(self, tokens: int, trials: Trials, plain: set[fx.Node]):
        self._tokens, self._trials, self._plain = tokens, trials, plain
        self._axes: dict[fx.Node, Axes] = {}
        self._open: list[fx.Node] = []

    def regions(self, nodes: Sequence[fx.Node]) -> Iterator[TokenRegion]:
        """Goes through the calls in order. What reads a region's results, and isn't of it, ends it."""
        for node in nodes:
            if self._joins(node):
                self._open.append(node)
            elif self._ends_at(node):
                yield from self._closed()
        yield from self._closed()

    def _joins(self, node: fx.Node) -> bool:
        """Tells whether a call treats each token alone, and notes the axes of what it reads and makes."""
        if node not in self._plain:
            return False
        if node.target is getitem:
            made: Any = self._axes.get(node.args[0])  # pyright: ignore
            if not isinstance(made, tuple) or node.args[0] not in self._open:
                return False
            axis = made[node.args[1]]  # pyright: ignore
            self._axes[node] = axis
            return axis is not None
        for axes in self._places(node):
            found = self._trials.result(node, axes, self._tokens)
            if found is not None:
                self._axes.update(axes)
                self._axes[node] = found
                return True
        return False

    def _places(self, node: fx.Node) -> Iterator[dict[fx.Node, int | None]]:
        """Yields where tokens may lie in the operands: those of known operands stay where they are."""
        choices: list[list[tuple[fx.Node, int | None]]] = []
        for operand in node.all_input_nodes:
            known: Any = self._axes.get(operand, _UNKNOWN)
            if "spec" not in operand.meta or isinstance(known, tuple):
                return
            dims: list[int | None] = [i for i, n in enumerate(operand.meta["spec"].shape) if n == self._tokens]
            tried = [None, *dims] if operand.op == "get_attr" else [*dims, None]  # weights have no tokens, tables may
            choices.append([(operand, dim) for dim in (tried if known is _UNKNOWN else [known])])
        for places in itertools.islice(itertools.product(*choices), _MOST_TRIALS):
            if any(axis is not None for _, axis in places):
                yield dict(places)

    def _ends_at(self, node: fx.Node) -> bool:
        """Tells whether a call of no region ends the open one.

        It does if it reads a result of it. It also does if both send gradients to one tensor: the sum would be added up
        in another order if the region went on after this call.
        """
        shared = {operand for operand in _read_by(self._open) if operand.meta.get("requires_grad")}
        return not shared.union(self._open).isdisjoint(node.all_input_nodes)

    def _closed(self) -> Iterator[TokenRegion]:
        nodes, self._open = self._without_outer_views(self._open), []
        while nodes and "spec" not in nodes[-1].meta:  # several results, of which one is taken out after the region
            nodes.pop()
        own = set(nodes)
        outputs = tuple(n for n in nodes if not own.issuperset(n.users))
        is_whole = all("spec" in node.meta for node in outputs)  # other several results are read in here alone
        if is_whole and _pays(nodes, outputs) and self._keeps_order(nodes):
            yield TokenRegion(tuple(nodes), dict(self._axes), outputs)

    def _without_outer_views(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Leaves out views of memory from outside that are read outside: a region would copy them."""
        while True:
            own = set(nodes)
            outer = {operand.meta["storage"] for operand in _read_by(nodes) if "spec" in operand.meta}
            out = {n for n in nodes if n.meta.get("storage") in outer and not own.issuperset(n.users)}
            if not out:
                return nodes
            nodes = [node for node in nodes if node not in out]

    def _keeps_order(self, nodes: Sequence[fx.Node]) -> bool:
        """Tells whether no call between a region's own sends a gradient to a tensor that the region reads.

        Such a call, a view that was left out, would come between the terms of a sum that the region adds as one.
        """
        own = set(nodes)
        trained = [operand for operand in _read_by(nodes) if operand.meta.get("requires_grad")]
        others = {user for operand in trained for user in operand.users if user not in own}
        return not any(nodes[0] < other < nodes[-1] for other in others)


_UNKNOWN = object()


def _pays(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> bool:
    """Tells whether a region computes anything, and has memory that only its own calls read."""
    there = {node.meta.get("storage") for node in (*_read_by(nodes), *outputs)}
    inner = [n for n in nodes if "spec" in n.meta and n.meta["storage"] not in there]
    return any(map(_computes, nodes)) and any(node.meta["storage_bytes"] for node in inner)


def _computes(node: fx.Node) -> bool:
    return "spec" in node.meta and node.meta["storage"] not in {a.meta.get("storage") for a in node.all_input_nodes}


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
        rows: Tokens of a tile; None takes a sixteenth of them, and at least 256.
        divisor: Without `rows`: so many times fewer than these, and at least 256.
        block_bytes: Target bytes of a block's state: no region crosses the cuts between blocks.
    """
    sizes = {
        region: rows or max(_FEWEST, -(-region.num_tokens // (_TILES * divisor)))
        for region in token_regions(traced, block_bytes)
    }
    if all(size >= region.num_tokens for region, size in sizes.items()):
        return traced
    rewriter = Rewriter(traced)
    # The last first: operands are then still the nodes that a region names.
    tiled = [_replaced(region, size, rewriter) for region, size in reversed(sizes.items()) if size < region.num_tokens]
    return rewriter.done() if any(tiled) else traced


def _replaced(region: TokenRegion, size: int, rewriter: Rewriter) -> bool:
    """Replaces a region by one call, in tiles of `size` tokens; tells whether it did."""
    operands = _operands(region)
    graph = _extracted(region, operands)
    given = [operand for operand, count in operands.items() for _ in range(count)]
    axes: Any = tuple(region.axes[operand] for operand in given)
    out_axes: Any = tuple(region.axes[output] for output in region.outputs)
    specs = tuple(output.meta["spec"] for output in region.outputs)
    target = TiledRegion(graph, graph_key(graph), axes, out_axes, specs, size)
    site = replace(Site.of(region.nodes[-1]), modules=_modules(region), grad=True, autocast=())
    try:
        made = rewriter.add(site, target, tuple(given))
    except LowerError:  # a tile's strides differ from the whole, and a view may not fit them
        return False
    news = dict(zip(region.outputs, made if len(specs) > 1 else (made,), strict=True))
    for node in reversed(region.nodes):
        if node in news:
            rewriter.replace(node, news[node])
        else:
            rewriter.erase(node)
    return True


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
