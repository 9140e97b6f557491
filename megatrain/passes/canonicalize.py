"""canonicalize and dedup: no call whose result nothing reads, and one template for blocks of equal code."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from megatrain.passes.program import Program, Template
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


def dedup(program: Program) -> Program:
    """Returns `program` with equal templates merged and renumbered in order of first use.

    Equal means: the same calls with the same literals, in the same modes, on the same specs, with the same
    inputs and outputs. Two layers with equal parameter shapes and different code (a sliding window here, none
    there) keep separate templates.
    """
    by_key: dict[Any, str] = {}
    renamed: dict[str, str] = {}
    templates: dict[str, Template] = {}
    for block in program.blocks:
        template = program.templates[block.template]
        key = template_key(template)
        if key not in by_key:
            by_key[key] = f"t{len(by_key)}"
            templates[by_key[key]] = dataclasses.replace(template, name=by_key[key])
        renamed[block.template] = by_key[key]
    blocks = tuple(dataclasses.replace(b, template=renamed[b.template]) for b in program.blocks)
    return dataclasses.replace(program, templates=templates, blocks=blocks)


def template_key(template: Template) -> Any:
    """Returns a hashable description of everything that a template's results depend on; names don't count."""
    return graph_key(template.graph), len(template.inputs)


def graph_key(graph: fx.Graph) -> Any:
    """Returns a hashable description of everything that a graph computes."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    rows: list[Any] = []
    for node in graph.nodes:
        meta = node.meta
        target = node.target if node.op in ("call_function", "call_method") else None
        rows.append(
            (
                node.op,
                target,
                frozen(node.args, number),
                frozen(node.kwargs, number),
                meta.get("spec"),
                meta.get("grad"),
                meta.get("autocast"),
            )
        )
    return tuple(rows)


def frozen(value: Any, number: dict[fx.Node, int]) -> Any:
    """Makes an argument hashable; equal results mean equal arguments."""
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(frozen(v, number) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, frozen(v, number)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", *(frozen(v, number) for v in (value.start, value.stop, value.step)))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    # 1 == 1.0 == True, and 0.0 == -0.0, but they don't compute the same.
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)
