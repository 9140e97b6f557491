"""canonicalize: removes results that the forward computed and nothing read."""

from __future__ import annotations

import dataclasses

from torch import fx

from megatrain.tracer.guards import Expectation
from megatrain.tracer.recording.opaque import Observer
from megatrain.tracer.traced import TracedModule


def canonicalize(traced: TracedModule) -> TracedModule:
    """Returns `traced` without dead calls and unread state.

    Calls that write memory or draw random numbers stay, because leaving them out changes later results; so do checks of
    the capture's assumptions.

        arange = torch.arange(16)        ->   (gone: only a guard reads it)
        linear = F.linear(x, weight)     ->   linear = F.linear(x, weight)
    """
    graph, copies = copied_graph(traced.graph)
    written = tuple((key, copies[node]) for key, node in traced.writes_back)
    return without_dead(dataclasses.replace(traced, graph=graph, writes_back=written))


def without_dead(traced: TracedModule) -> TracedModule:
    """Erases dead calls from a graph that a pass has just made; returns the capture without unread state."""
    graph = traced.graph
    kept = {node for _, node in traced.writes_back}
    for node in reversed(list(graph.nodes)):
        is_check = isinstance(node.target, Expectation | Observer)
        is_effect = is_check or node.meta.get("is_random") or node.meta.get("writes")
        if node.op in ("placeholder", "output") or node.users or node in kept or is_effect:
            continue
        graph.erase_node(node)
    for node in graph.nodes:
        if "writes" in node.meta:
            node.meta["writes"] = tuple(w for w in node.meta["writes"] if not is_erased(w))
    used = {n.target for n in graph.nodes if n.op == "get_attr"} | {key for key, _ in traced.writes_back}
    return dataclasses.replace(traced, state={k: e for k, e in traced.state.items() if k in used})


def is_erased(node: fx.Node) -> bool:
    """Tells whether a node was taken out of its graph."""
    return node._erased  # pyright: ignore[reportPrivateUsage]


def copied_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copies a graph, names and meta included; nodes inside `writes` are translated."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, lambda n: nodes[n])
        nodes[node].name = node.name
    for node in copy.nodes:
        if "writes" in node.meta:
            node.meta["writes"] = tuple(nodes[w] for w in node.meta["writes"])
    return copy, nodes
