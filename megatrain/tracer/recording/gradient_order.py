"""GradientOrder: in which order eager's backward completes the gradients of a captured forward."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from megatrain.base.torch_private import pytree, sequence_number

Ready = list[fx.Node | None]
"""What waits when one of autograd's nodes has run: parameters that it has completed, and None for any other node."""


class GradientOrder:
    """Finds the order from a forward that is captured, without a backward.

    Autograd's engine runs nodes in reverse order of creation, and a parameter's accumulation as soon as the last term
    of its gradient is there. So a parameter is complete with the first call that uses it, calls in reverse order. If
    one call uses several, the nodes of its own history tell their order.
    """

    def __init__(self) -> None:
        self._ready: dict[fx.Node, list[Ready]] = {}

    @staticmethod
    def ends(operands: Sequence[torch.Tensor], nodes: Sequence[fx.Node]) -> dict[Any, fx.Node | None]:
        """Returns where the history of a call on `operands` will end; nothing if it uses no trained parameter."""
        pairs = [(x, n) for x, n in zip(operands, nodes, strict=True) if x.requires_grad and not x.is_inference()]
        if not torch.is_grad_enabled() or all(node.op != "get_attr" for _, node in pairs):
            return {}
        return {get_gradient_edge(x).node: node if node.op == "get_attr" else None for x, node in pairs}

    def note(self, call: fx.Node, ends: dict[Any, fx.Node | None], result: Any) -> None:
        """Reads the history of a call that has run: what `ends` returned before, and its result."""
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)] if ends else []
        made = [x.grad_fn for x in tensors if x.grad_fn is not None]
        if made:
            self._ready[call] = _made_ready([node for node in dict.fromkeys(made) if node not in ends], ends)

    def ready(self, call: fx.Node) -> list[Ready] | None:
        """What each node of a call's history makes ready; None if nothing was read from it."""
        return self._ready.get(call)

    def note_equal(self, call: fx.Node, ready: list[Ready]) -> None:
        """Notes a call whose history is known from an equal one."""
        self._ready[call] = ready

    def groups(self, graph: fx.Graph) -> tuple[tuple[str, ...], ...]:
        """Returns the keys of the parameters that the graph's results depend on, in the order of their gradients.

        Each group is of one parameter, except where one node of autograd completes three or more at once: their order
        also depends on which other nodes are waiting then, and the group has the most likely one.
        """
        calls = [call for call in _reached(graph) if call.op != "get_attr"]
        completed_by: dict[fx.Node, fx.Node] = {}
        for call in calls:
            completed_by.update((n, call) for ready in self._of(call) for n in ready if n is not None)
        found: list[tuple[str, ...]] = []
        for call in calls:
            for ready in self._of(call):
                is_here = [None if n is None or completed_by[n] is not call else str(n.target) for n in ready]
                places = _order_at_once(tuple(key is not None for key in is_here))
                keys = tuple(key for key in (is_here[place] for place in places) if key is not None)
                found += [keys] if len(keys) > 2 else [(key,) for key in keys]
        return tuple(found)

    def _of(self, call: fx.Node) -> list[Ready]:
        """What each node of a call's history makes ready; a Function gets its history only after its forward."""
        if call in self._ready or not call.meta.get("grad"):
            return self._ready.get(call, [])
        results = (call,) if "requires_grad" in call.meta else call.users
        if not any(node.meta.get("requires_grad") for node in results):
            return []
        return [[n for n in call.all_input_nodes if n.op == "get_attr" and n.meta["requires_grad"]]]


def _made_ready(roots: Sequence[Any], ends: dict[Any, fx.Node | None]) -> list[Ready]:
    """Goes through a history as the engine does; returns what each node makes ready, where this is a parameter."""
    waits: Counter[Any] = Counter()
    inner, stack = set(roots), list(roots)
    while stack:
        for following, _ in stack.pop().next_functions:
            waits[following] += 1
            if following is not None and following not in ends and following not in inner:
                inner.add(following)
                stack.append(following)
    queue = [(-sequence_number(node), place, node) for place, node in enumerate(roots) if not waits[node]]
    heapq.heapify(queue)
    found: list[Ready] = []
    while queue:
        node = heapq.heappop(queue)[2]
        ready: Ready = [None] * len(queue)
        for following, _ in node.next_functions:
            waits[following] -= 1
            if following is None or waits[following]:
                continue
            ready.append(ends.get(following))
            if following not in ends:
                heapq.heappush(queue, (-sequence_number(following), len(waits) + len(queue), following))
        if any(n is not None for n in ready):
            found.append(ready)
    return found


def _reached(graph: fx.Graph) -> list[fx.Node]:
    """Lists the nodes through which a gradient may flow to the results, in reverse order."""
    reached: set[fx.Node] = set(graph.output_node().all_input_nodes)
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if (node in reached or not reached.isdisjoint(node.meta.get("writes", ()))) and node.meta.get("grad", True):
            found.append(node)
            reached.update(node.all_input_nodes if node.meta.get("requires_grad", True) else ())
    return found


@cache
def _order_at_once(is_parameter: tuple[bool, ...]) -> tuple[int, ...]:
    """Asks autograd's engine in which order it runs accumulations that one node makes ready at once.

    The engine's queue puts accumulations before all else, and has no order among them: for four or more it isn't
    that in which they came.
    """
    if sum(is_parameter) < 3:
        return tuple(range(len(is_parameter)))
    seen: list[int] = []
    with torch.enable_grad():
        leaves = [torch.zeros((), requires_grad=True) for _ in is_parameter]
        for place, leaf in enumerate(leaves):
            leaf.register_hook(lambda _, place=place: seen.append(place))
        pairs = zip(leaves, is_parameter, strict=True)
        _Together.apply(*(leaf if is_one else leaf + 0 for leaf, is_one in pairs)).backward()
    return tuple(seen)


class _Together(torch.autograd.Function):
    """Gives all its operands their gradients at once."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> torch.Tensor:
        ctx.count = len(operands)
        return operands[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients * ctx.count
