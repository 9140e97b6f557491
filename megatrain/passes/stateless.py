"""stateless(): a whole capture as a graph that takes its state as further inputs, so that it runs on any tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from megatrain.passes.canonicalize import copied_graph
from megatrain.tracer.traced import TracedModule


@dataclass(frozen=True, slots=True, eq=False)
class Stateless:
    """A graph without `get_attr` nodes.

    Args:
        graph: Its inputs are those of the capture and then the state; its results are those of the capture and then the
            buffers that the capture writes back.
        keys: Of the state, in the order of the inputs.
        placeholders: Of the state, by the name that its node has in the capture.
    """

    graph: fx.Graph
    keys: tuple[str, ...]
    placeholders: Mapping[str, fx.Node]


def stateless(traced: TracedModule) -> Stateless:
    """Makes a capture's state an input, and adds the buffers that it writes back to the results."""
    graph, copies = copied_graph(traced.graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    keys: list[str] = []
    lifted: dict[fx.Node, fx.Node] = {}
    last: fx.Node | None = placeholders[-1] if placeholders else None
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        place = graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes)))
        with place:
            last = graph.placeholder(f"{node.name}_state")
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        lifted[node] = last
        keys.append(str(node.target))
    end = graph.output_node()
    results: Any = end.args[0]
    end.args = ((*results, *(lifted.get(copies[n], copies[n]) for _, n in traced.writes_back)),)
    return Stateless(graph, tuple(keys), {node.name: placeholder for node, placeholder in lifted.items()})
