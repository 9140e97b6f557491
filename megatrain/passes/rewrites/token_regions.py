"""token_regions(): finds the parts of a graph in which each token is computed alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.passes.intervals import find_intervals
from megatrain.passes.rewrites.alike_parts import InParts
from megatrain.passes.rewrites.head.head_loss import HeadLoss
from megatrain.passes.rewrites.token_rules import Axes
from megatrain.passes.rewrites.token_trials import FEW, Trials
from megatrain.tracer.node_meta import CALLS
from megatrain.tracer.traced import TracedModule

_PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.addmm, "matmul", "__matmul__", "mm", "addmm")
# Places of operands that are tried, where several dimensions are as long as the text.
_MOST_TRIALS = 64


@dataclass(frozen=True, slots=True)
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
    def operands(self) -> tuple[fx.Node, ...]:
        """What the calls read, but don't make, in order of first use."""
        own = set(self.nodes)
        return tuple(dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in own))


def token_regions(traced: TracedModule, block_bytes: int | None = None) -> list[TokenRegion]:
    """Lists the regions of a capture that are worth tiling, in execution order.

    Args:
        traced: The capture.
        block_bytes: As in `partition`: regions don't cross the cuts between blocks, and read no larger state.
    """
    trials = Trials(traced.device)
    written = {w.meta["storage"] for n in traced.graph.nodes for w in n.meta.get("writes", ())}
    kept = {node for _, node in traced.writes_back}
    found: list[TokenRegion] = []
    for interval in find_intervals(traced, block_bytes):
        taken: set[fx.Node] = set()
        for tokens in _lengths(interval.nodes):
            finder = _Finder(tokens, trials, written, kept, taken, block_bytes)
            for region in finder.regions(interval.nodes):
                taken.update(region.nodes)
                found.append(region)
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    return sorted(found, key=lambda region: order[region.nodes[0]])


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
    """Looks for the regions of one block, for one number of tokens.

    Args:
        tokens: Their number.
        trials: Runs calls on a few tokens.
        written: Numbers of the memory that the model writes into.
        kept: Nodes that are written back into buffers.
        taken: Nodes of regions that were found for other numbers of tokens.
        block_bytes: State that is larger is cut into rows later, so a region can't hold its calls.
    """

    def __init__(
        self,
        tokens: int,
        trials: Trials,
        written: set[int],
        kept: set[fx.Node],
        taken: set[fx.Node],
        block_bytes: int | None,
    ):
        self._tokens, self._trials, self._written, self._kept = tokens, trials, written, kept
        self._taken, self._block_bytes = taken, block_bytes
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
        if node in self._taken or not self._is_plain(node):
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

    def _is_plain(self, node: fx.Node) -> bool:
        """Tells whether a call makes tensors and does nothing else, and reads tensors that nothing writes into.

        What is computed in parts already takes its tokens apart: no trial would find that it treats each alone.
        """
        meta = node.meta
        if node.op not in CALLS or isinstance(node.target, InParts):
            return False
        if meta.get("is_random") or meta.get("writes") or meta.get("hides_draws"):
            return False
        if "spec" not in meta and not node.users:  # it gave back an operand, or nobody reads its result
            return False
        if node in self._kept or "results" in meta or "mask" in meta or ("spec" in meta and not meta["spec"].numel):
            return False
        for operand in (node, *node.all_input_nodes):
            spec = operand.meta.get("spec")
            if spec is None:
                continue
            is_large = operand.op == "get_attr" and self._block_bytes is not None and spec.nbytes > self._block_bytes
            if spec.on_host or is_large or operand.meta["storage"] in self._written:
                return False
        return True

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
        in another order if the region went on behind this call.
        """
        own = set(self._open)
        shared = {a for n in self._open for a in n.all_input_nodes if a.meta.get("requires_grad") and a not in own}
        return any(operand in own or operand in shared for operand in node.all_input_nodes)

    def _closed(self) -> Iterator[TokenRegion]:
        nodes, self._open = self._without_outer_views(self._open), []
        while nodes and "spec" not in nodes[-1].meta:  # several results, of which one is taken out behind the region
            nodes.pop()
        own = set(nodes)
        outputs = tuple(n for n in nodes if not own.issuperset(n.users))
        is_whole = all("spec" in node.meta for node in outputs)  # other several results are read in here alone
        if is_whole and _pays(nodes, outputs) and self._keeps_order(nodes):
            yield TokenRegion(tuple(nodes), {n: self._axes[n] for n in self._axes}, outputs)

    def _without_outer_views(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Leaves out views of memory from outside that are read outside: a region would copy them."""
        while True:
            own = set(nodes)
            outer = {a.meta["storage"] for n in nodes for a in n.all_input_nodes if a not in own and "spec" in a.meta}
            out = {n for n in nodes if n.meta.get("storage") in outer and not own.issuperset(n.users)}
            if not out:
                return nodes
            nodes = [node for node in nodes if node not in out]

    def _keeps_order(self, nodes: Sequence[fx.Node]) -> bool:
        """Tells whether no call between a region's own sends a gradient to a tensor that the region reads.

        Such a call, a view that was left out, would come between the terms of a sum that the region adds as one.
        """
        own = set(nodes)
        operands = {a for n in nodes for a in n.all_input_nodes if a.meta.get("requires_grad") and a not in own}
        others = {user for operand in operands for user in operand.users if user not in own}
        return not any(nodes[0] < other < nodes[-1] for other in others)


_UNKNOWN = object()


def _pays(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> bool:
    """Tells whether a region computes anything, and its results are less than all that it makes."""
    return any(map(_computes, nodes)) and _saved_bytes(nodes, outputs) > 0


def _saved_bytes(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> int:
    """Bytes of the memory that only a region's own calls read."""
    own = set(nodes)
    there = {a.meta.get("storage") for n in nodes for a in n.all_input_nodes if a not in own}
    there |= {node.meta["storage"] for node in outputs}
    inner = {n.meta["storage"]: n.meta["storage_bytes"] for n in nodes if "storage" in n.meta}
    return sum(size for storage, size in inner.items() if storage not in there)


def _computes(node: fx.Node) -> bool:
    return "spec" in node.meta and node.meta["storage"] not in {a.meta.get("storage") for a in node.all_input_nodes}
