"""unread_linears(): the linear layers of a graph whose results a backward doesn't read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from megatrain.interrupts import Interrupts
from megatrain.passes.exact_fakes import exact_fakes
from megatrain.passes.interpret import Code
from megatrain.torch_private import TorchDispatchMode, pytree
from megatrain.tracer.recording.effect_watch import storage_key


def unread_linears(graph: fx.Graph, device: torch.device) -> tuple[int, ...]:
    """Finds linear layers whose values a backward of the graph can do without: they are only moved, added or scaled.

    The graph runs on tensors without values. Nothing that autograd saves for the backward may be computed from such a
    value.

    Args:
        graph: Straight-line, of plain calls; its placeholders say their `spec`, and whether they need a gradient.
        device: Where it computes.

    Returns:
        The numbers of their nodes in the graph.
    """
    linears = [node for node in graph.nodes if node.target is F.linear]
    origins = _Origins()
    read: set[fx.Node] = set()

    def see(node: fx.Node, result: Any) -> None:
        if node in linears:
            origins.add(result, node)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        read.update(origins.of(tensor))
        return tensor

    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with Interrupts(), exact_fakes(), torch.enable_grad():
        given = [n.meta["spec"].empty(device).requires_grad_(n.meta["requires_grad"]) for n in placeholders]
        with origins, saved_tensors_hooks(save, lambda tensor: tensor):
            Code(graph, see=see)(given, is_checked=False)
    return tuple(number for number, node in enumerate(graph.nodes) if node in linears and node not in read)


class _Origins(TorchDispatchMode):
    """Knows from which calls' results each tensor is computed, also where no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, set[fx.Node]] = {}
        self._alive: list[torch.Tensor] = []  # so that no other memory gets a number that is known

    def of(self, tensor: torch.Tensor) -> set[fx.Node]:
        return self._found.get(storage_key(tensor), set())

    def add(self, tensor: torch.Tensor, *nodes: fx.Node) -> None:
        self._found.setdefault(storage_key(tensor), set()).update(nodes)
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        nodes = set().union(*map(self.of, read))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor, *nodes)
        return result
