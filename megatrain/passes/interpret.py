"""Runs a template's graph on tensors, node by node, under the modes each call was recorded in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from megatrain.tracer.expectations import Expectation
from megatrain.tracer.node_meta import autocast_state
from megatrain.tracer.recording.opaque import Opaque


@dataclass(frozen=True, slots=True)
class _GraphCall:
    """One call: where its arguments lie, where its result goes, and which results die after it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int
    dead: tuple[int, ...]
    has_grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    is_check: bool
    node: fx.Node


@dataclass(frozen=True, slots=True)
class _Ref:
    index: int


class Code:
    """A graph made ready to run: results are freed after their last use.

    Args:
        graph: Straight-line graph without `get_attr` nodes; its placeholders are the arguments, in order.
    """

    __slots__ = ("_num_inputs", "_outputs", "_size", "_steps", "has_inner_grad", "opaque")

    def __init__(self, graph: fx.Graph):
        index = {node: i for i, node in enumerate(graph.nodes)}
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        assert [index[n] for n in placeholders] == list(range(len(placeholders))), "placeholders come first"
        last_use = {argument: node for node in graph.nodes for argument in node.all_input_nodes}
        dies_after: dict[fx.Node, list[int]] = {}
        for argument, user in last_use.items():
            if user.op != "output":
                dies_after.setdefault(user, []).append(index[argument])
        calls = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
        self._steps = tuple(_step(n, index, tuple(dies_after.get(n, ())), not n.users) for n in calls)
        outputs: Any = graph.output_node().args[0]
        self._outputs = tuple(index[n] for n in outputs)
        self._num_inputs = len(placeholders)
        self._size = len(index)
        self.opaque = opaque_calls(graph)
        self.has_inner_grad = has_inner_grad(graph)

    def __call__(self, arguments: Sequence[torch.Tensor], *, is_checked: bool = True) -> tuple[torch.Tensor, ...]:
        """Runs the graph; differentiable where the caller's grad mode and the recorded one both allow it.

        Args:
            arguments: One per placeholder.
            is_checked: Whether values are compared with those of the capture; each comparison waits for the device.
                False repeats a run that was checked.
        """
        assert len(arguments) == self._num_inputs
        values: list[Any] = [*arguments, *([None] * (self._size - self._num_inputs))]
        del arguments
        outer = torch.is_grad_enabled()
        with ExitStack() as stack:
            # The modes of the capture count, not the caller's present modes.
            for device, _ in autocast_state():
                stack.enter_context(torch.autocast(device, enabled=False))
            for step in self._steps:
                if is_checked or not step.is_check:
                    args, kwargs = _resolve(step.args, values), _resolve(step.kwargs, values)
                    if step.has_grad and not step.autocast and outer:
                        values[step.result] = step.function(*args, **kwargs)
                    else:
                        values[step.result] = _run_in_modes(step, args, kwargs, outer)
                    del args, kwargs
                for dead in step.dead:
                    values[dead] = None
        return tuple(values[i] for i in self._outputs)

    def watched(self, see: Callable[[fx.Node, Any], None]) -> Code:
        """Returns the same code, which hands each result to `see`, with the node of its call."""

        def seen(step: _GraphCall) -> _GraphCall:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = step.function(*args, **kwargs)
                see(step.node, result)
                return result

            return replace(step, function=call)

        watched = copy.copy(self)
        watched._steps = tuple(map(seen, self._steps))
        return watched


def opaque_calls(graph: fx.Graph) -> tuple[Opaque, ...]:
    """Lists the modules in a graph that run their own code."""
    return tuple(n.target for n in graph.nodes if isinstance(n.target, Opaque))


def has_inner_grad(graph: fx.Graph) -> bool:
    """Tells whether the code differentiates inside its own forward, and so needs history in any case."""
    differentiates = any(n.target in (torch.autograd.grad, torch.autograd.backward) for n in graph.nodes)
    return differentiates or bool(opaque_calls(graph))


def _step(node: fx.Node, index: dict[fx.Node, int], dead: tuple[int, ...], is_unused: bool) -> _GraphCall:
    def referred(argument: Any) -> Any:
        return _Ref(index[argument]) if isinstance(argument, fx.Node) else argument

    args: Any = map_aggregate(node.args, referred)
    kwargs: Any = map_aggregate(node.kwargs, referred)
    target: Any = node.target
    function = _method(target) if node.op == "call_method" else target
    dead = (*dead, index[node]) if is_unused else dead
    return _GraphCall(
        function,
        tuple(args),
        dict(kwargs),
        index[node],
        dead,
        node.meta["grad"],
        node.meta["autocast"],
        isinstance(target, Expectation),
        node,
    )


def _method(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call


def _resolve(argument: Any, values: list[Any]) -> Any:
    if type(argument) is _Ref:
        return values[argument.index]
    if isinstance(argument, tuple):
        items = [_resolve(a, values) for a in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, list):
        return [_resolve(a, values) for a in argument]
    if isinstance(argument, dict):
        return {k: _resolve(v, values) for k, v in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_resolve(a, values) for a in (argument.start, argument.stop, argument.step)))
    return argument


def _run_in_modes(step: _GraphCall, args: Any, kwargs: Any, outer: bool) -> Any:
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(step.has_grad and outer))
        for device, dtype in step.autocast:
            # The weight cache would outlive the slot that the cast weight was read from.
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        return step.function(*args, **kwargs)
