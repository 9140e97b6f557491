"""MaskCalls: the calls that make a mask from small tensors, which any block can repeat."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import getitem

from torch import fx

from megatrain.tracer.node_meta import CALLS

# What is so many times smaller than a mask may cross from block to block in its place.
_SMALLER = 16


class MaskCalls:
    """Finds the calls between small tensors and a mask.

    Args:
        graph: Of a capture.
        kept: Nodes that are written back into buffers.
    """

    def __init__(self, graph: fx.Graph, kept: Collection[fx.Node]):
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._written = {w.meta["storage"] for n in graph.nodes for w in n.meta.get("writes", ())}
        self._kept = kept

    def of(self, mask: fx.Node, most_bytes: int) -> Sequence[fx.Node] | None:
        """Lists the calls, in execution order, the last of which makes the mask.

        None if a call can't be repeated in another place (it draws random numbers, writes, or its memory is written
        into; it has a gradient; it is a user's), reads something large that isn't made by such calls, or if all that
        lives on the way takes more than `most_bytes`.
        """
        calls: set[fx.Node] = set()
        ends = [mask]
        while ends:
            node = ends.pop()
            if node in calls:
                continue
            if not self._repeats(node):
                return None
            calls.add(node)
            ends += [a for a in node.all_input_nodes if a.meta["spec"].nbytes * _SMALLER > mask.meta["storage_bytes"]]
        ordered = sorted(calls, key=self._order.__getitem__)
        return ordered if _peak(ordered) <= most_bytes else None

    def _repeats(self, node: fx.Node) -> bool:
        meta = node.meta
        if node.op not in CALLS or node.target is getitem or "spec" not in meta or node in self._kept:
            return False
        if meta["requires_grad"] or meta.get("is_random") or meta.get("writes") or "results" in meta:
            return False
        home = node.op == "call_method" or str(getattr(node.target, "__module__", "")).partition(".")[0] == "torch"
        tensors = [node, *node.all_input_nodes]
        are_plain = all("spec" in t.meta and not t.meta["spec"].on_host for t in tensors)
        return home and are_plain and self._written.isdisjoint(t.meta["storage"] for t in tensors)


def _peak(calls: Sequence[fx.Node]) -> int:
    """The most bytes of the calls' results that live at one time, if each goes after its last reader among them."""
    last = {a.meta["storage"]: index for index, node in enumerate(calls) for a in (node, *node.all_input_nodes)}
    sizes: dict[int, int] = {}
    peak = 0
    for index, node in enumerate(calls):
        sizes.setdefault(node.meta["storage"], node.meta["storage_bytes"])
        peak = max(peak, sum(size for number, size in sizes.items() if last[number] >= index))
    return peak
