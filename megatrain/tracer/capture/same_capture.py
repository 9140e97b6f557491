"""Tells whether two captures computed the same, so that one program serves both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from megatrain.torch_private import pytree
from megatrain.tracer.guards import Expectation, Guard
from megatrain.tracer.python.followed_numbers import OnNumbers
from megatrain.tracer.spec import is_equal
from megatrain.tracer.traced import TracedModule

# What a node's meta says besides the user's line.
_FACTS = (
    "spec", "requires_grad", "storage", "storage_bytes", "modules", "grad", "autocast", "is_random", "key", "results",
)  # fmt: skip
# Compared below, or of no account for what is computed.
_SEPARATE = frozenset({"graph", "outputs", "side_outputs", "constants", "writes_back", "guards", "assumptions"})


def is_same_capture(left: TracedModule, right: TracedModule) -> bool:
    """Tells whether two captures of one model, for arguments of one signature, have equal graphs and guards.

    What they assumed, the lines they came from and the objects around their outputs may differ.
    """
    plain = [f.name for f in fields(TracedModule) if f.name not in _SEPARATE]
    if any(getattr(left, name) != getattr(right, name) for name in plain):
        return False
    constants = left.constants.keys() == right.constants.keys()
    if not constants or any(tensor is not right.constants[key] for key, tensor in left.constants.items()):
        return False
    nodes = dict(zip(left.graph.nodes, right.graph.nodes, strict=False))
    return (
        len(left.graph.nodes) == len(right.graph.nodes)
        and all(_is_same_node(a, b, nodes) for a, b in nodes.items())
        and [(k, nodes[n]) for k, n in left.writes_back] == list(right.writes_back)
        and len(left.guards) == len(right.guards)
        and all(_is_same_guard(a, b, nodes) for a, b in zip(left.guards, right.guards, strict=True))
    )


def is_same_but_for_numbers(plain: TracedModule, followed: TracedModule) -> bool:
    """Tells whether a capture that follows numbers computes what one with the numbers themselves does.

    The two are of one call. The latter has further inputs, after the others, and copies of tensors that it reads
    numbers from.
    """
    more = set(followed.inputs[len(plain.inputs) :])
    ours = [node for node in plain.graph.nodes if not _is_read(node)]
    others = [node for node in followed.graph.nodes if node not in more and not node.meta.get("is_read")]
    nodes = dict(zip(ours, others, strict=False))
    ignored = (*_SEPARATE, "input_names", "num_numbers")
    return (
        len(ours) == len(others)
        and all(
            getattr(plain, f.name) == getattr(followed, f.name) for f in fields(TracedModule) if f.name not in ignored
        )
        and all(_is_same_node(a, b, nodes, by_numbers=True) for a, b in nodes.items())
        and [(k, nodes[n]) for k, n in plain.writes_back] == list(followed.writes_back)
        and len(plain.guards) == len(followed.guards)
        and all(_is_same_guard(a, b, nodes) for a, b in zip(plain.guards, followed.guards, strict=True))
    )


def _is_read(node: fx.Node) -> bool:
    """Tells whether a node compares a number that Python reads; `Arguments.follows_reads` has it followed."""
    return isinstance(node.target, Expectation) and node.target.target == "item"


def _is_same_node(left: fx.Node, right: fx.Node, nodes: Mapping[fx.Node, fx.Node], *, by_numbers: bool = False) -> bool:
    op, target, arguments, facts = right.op, right.target, (right.args, right.kwargs), _FACTS
    if by_numbers:
        facts = [fact for fact in _FACTS if fact != "storage"]  # further inputs have memory of their own
        if isinstance(target, OnNumbers) and target != left.target:
            # With fx's own containers, as a node has them.
            arguments = map_arg(target.arguments(right.args, lambda number: number.now), lambda node: node)
            op, target = target.op, target.target
    return (
        left.op == op
        and (by_numbers or left.name == right.name)
        and (left.target is target or left.target == target)
        and _is_same_value((left.args, left.kwargs), arguments, nodes)
        and all(_is_same_value(left.meta.get(fact), right.meta.get(fact), nodes) for fact in facts)
        and _is_same_value(left.meta.get("writes"), right.meta.get("writes"), nodes)
    )


def _is_same_guard(left: Guard, right: Guard, nodes: Mapping[fx.Node, fx.Node]) -> bool:
    return (
        (left.op, left.target) == (right.op, right.target)
        and _is_same_value((left.args, left.kwargs), (right.args, right.kwargs), nodes)
        and is_equal(left.expected, right.expected)
    )


def _is_same_value(left: Any, right: Any, nodes: Mapping[fx.Node, fx.Node]) -> bool:
    if left is None or right is None or isinstance(left, (bool, int, str)):  # most facts, and flattening takes time
        return is_equal(left, right)
    leaves, tree = pytree.tree_flatten(left)
    others, other_tree = pytree.tree_flatten(right)
    return tree == other_tree and all(_is_same_leaf(a, b, nodes) for a, b in zip(leaves, others, strict=True))


def _is_same_leaf(left: Any, right: Any, nodes: Mapping[fx.Node, fx.Node]) -> bool:
    if isinstance(left, fx.Node):
        return nodes[left] is right
    if isinstance(left, slice) and isinstance(right, slice):
        bounds = ((left.start, left.stop, left.step), (right.start, right.stop, right.step))
        return _is_same_value(*bounds, nodes)
    return is_equal(left, right)
