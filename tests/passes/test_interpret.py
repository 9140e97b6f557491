"""The function that a graph becomes: its literals, modes, checks, and when it lets go of results."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from megatrain.passes.interpret import Code

PLAIN: dict[str, Any] = {"grad": True, "autocast": ()}


def built(make: Any, **meta: Any) -> fx.Graph:
    """A graph of one input; `make` adds its calls and returns the output node."""
    graph = fx.Graph()
    result = make(graph, graph.placeholder("x"))
    for node in graph.nodes:
        node.meta.update({**PLAIN, **meta})
    graph.output((result,))
    return graph


def test_recorded_modes_count_and_not_the_callers() -> None:
    def make(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_method("matmul", (x, x))

    x = torch.ones(2, 2, requires_grad=True)
    assert Code(built(make))([x])[0].requires_grad
    assert not Code(built(make, grad=False))([x])[0].requires_grad
    assert Code(built(make, autocast=(("cpu", torch.bfloat16),)))([x])[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert Code(built(make))([x])[0].dtype == torch.float32
    with torch.no_grad():
        assert not Code(built(make))([x])[0].requires_grad


def test_a_result_is_freed_behind_its_last_use() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def made(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        seen.append(weakref.ref(result))
        return result

    def ask(x: torch.Tensor) -> torch.Tensor:
        alive.append(seen[0]() is not None)
        return x + 1

    def make(graph: fx.Graph, x: fx.Node) -> fx.Node:
        first = graph.call_function(made, (x,))
        return graph.call_function(ask, (graph.call_function(ask, (first,)),))

    Code(built(make))([torch.ones(2)])
    assert alive == [True, False]


def test_watching_sees_each_result_with_its_node() -> None:
    def make(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_method("neg", (graph.call_function(torch.exp, (x,)),))

    seen: list[tuple[str, float]] = []
    Code(built(make)).watched(lambda node, result: seen.append((node.name, float(result.sum()))))([torch.zeros(2)])
    assert seen == [("exp", 2.0), ("neg", -2.0)]
