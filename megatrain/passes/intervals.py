"""Finds where to cut: contiguous intervals of calls, at repeated modules, under a size limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from megatrain.tracer.traced import TracedModule


@dataclass(frozen=True, slots=True)
class Interval:
    """A contiguous run of calls that becomes one block.

    Args:
        name: The modules it covers.
        nodes: The calls, in execution order.
        depth: How many module calls, outermost first, all its nodes share; a finer cut looks below.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    depth: int

    def state(self) -> dict[fx.Node, None]:
        """The `get_attr` nodes it reads, in order of first use."""
        return dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a.op == "get_attr")

    def state_bytes(self) -> int:
        """Bytes of the state it reads, each tensor once."""
        return sum(a.meta["spec"].nbytes for a in self.state())


def find_intervals(traced: TracedModule, block_bytes: int | None) -> list[Interval]:
    """Cuts the calls of `traced` at its repeated modules; with `block_bytes`, cuts finer, merges small."""
    calls = [n for n in traced.graph.nodes if n.op in ("call_function", "call_method")]
    intervals = _absorb_stateless(_cut_at_repeated(calls, traced.block_modules))
    if block_bytes is not None:
        finer = [part for i in intervals for part in _absorb_stateless(_cut_at_children(i, block_bytes))]
        intervals = _merge_small(_absorb_stateless(finer), block_bytes)
    return _merge_aliased_writes(_merge_inner_gradients(intervals), traced)


def _cut_at_repeated(calls: Sequence[fx.Node], block_modules: frozenset[str]) -> list[Interval]:
    def unit(node: fx.Node) -> tuple[int, Any]:
        for depth, call in enumerate(node.meta["modules"]):
            if call[0] in block_modules:
                return depth + 1, call
        return 0, None

    intervals: list[Interval] = []
    for (depth, call), run in groupby(calls, unit):
        nodes = tuple(run)
        intervals.append(Interval(call[0] if call else _glue_name(nodes), nodes, depth))
    return intervals


def _glue_name(nodes: Sequence[fx.Node]) -> str:
    """Names a run between repeated modules by the modules with state in it."""
    names: list[str] = []
    for node in nodes:
        if any(a.op == "get_attr" for a in node.all_input_nodes) and node.meta["modules"]:
            names.append(node.meta["modules"][-1][0] or "self")
    return "+".join(dict.fromkeys(names)) or "glue"


def _absorb_stateless(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins a run without state to the block before it (the first one, to the block after)."""
    joined: list[Interval] = []
    for interval in intervals:
        if joined and not interval.state():
            joined[-1] = _join(joined[-1], interval, joined[-1].name)
        elif len(joined) == 1 and not joined[0].state():
            joined[0] = _join(joined[0], interval, interval.name)
        else:
            joined.append(interval)
    return joined


def _join(left: Interval, right: Interval, name: str) -> Interval:
    depth = 0
    nodes = left.nodes + right.nodes
    while all(len(n.meta["modules"]) > depth for n in nodes):
        if len({n.meta["modules"][depth] for n in nodes}) > 1:
            break
        depth += 1
    return Interval(name, nodes, depth)


def _cut_at_children(interval: Interval, limit: int) -> list[Interval]:
    """Cuts an interval above `limit` at the module calls one level down, again and again."""
    if interval.state_bytes() <= limit:
        return [interval]
    deepest = max(len(n.meta["modules"]) for n in interval.nodes)
    for depth in range(interval.depth, deepest):
        runs = _runs(interval.nodes, lambda n, d=depth: n.meta["modules"][d : d + 1])
        if len(runs) > 1:
            parts = [Interval(_part_name(run, depth), run, depth + 1) for run in runs]
            return [piece for part in parts for piece in _cut_at_children(part, limit)]
    return _cut_at_calls(interval, limit)


def _cut_at_calls(interval: Interval, limit: int) -> list[Interval]:
    """Cuts an interval without module calls inside in front of the calls whose state would exceed `limit`."""
    runs: list[list[fx.Node]] = [[]]
    held: set[fx.Node] = set()
    for node in interval.nodes:
        state = {a for a in node.all_input_nodes if a.op == "get_attr"}
        if state and held and sum(a.meta["spec"].nbytes for a in held | state) > limit:
            runs.append([])
            held = set()
        held |= state
        runs[-1].append(node)
    return [Interval(interval.name, tuple(run), interval.depth) for run in runs]


def _runs(nodes: Sequence[fx.Node], key: Callable[[fx.Node], Any]) -> list[tuple[fx.Node, ...]]:
    return [tuple(run) for _, run in groupby(nodes, key)]


def _part_name(nodes: Sequence[fx.Node], depth: int) -> str:
    modules = nodes[0].meta["modules"]
    return modules[depth][0] if len(modules) > depth else _glue_name(nodes)


def _merge_small(intervals: list[Interval], limit: int) -> list[Interval]:
    merged: list[Interval] = []
    for interval in intervals:
        if merged:
            together = _join(merged[-1], interval, f"{merged[-1].name}+{interval.name}")
            if together.state_bytes() <= limit:
                merged[-1] = together
                continue
        merged.append(interval)
    return merged


def _merge_inner_gradients(intervals: list[Interval]) -> list[Interval]:
    """Undoes cuts between the tensors that the forward itself differentiates by and the call that does it.

    A block sees what another made as a leaf, without the graph behind it.
    """
    home = {n: i for i, interval in enumerate(intervals) for n in interval.nodes}
    target = list(range(len(intervals)))
    for node, here in home.items():
        if node.target is torch.autograd.grad:
            sources = [home.get(a, min(home[u] for u in a.users if u in home)) for a in node.all_input_nodes]
            start = target[min(sources)]
            target[start : here + 1] = [start] * (here + 1 - start)
    return _merged(intervals, target)


def _merge_aliased_writes(intervals: list[Interval], traced: TracedModule) -> list[Interval]:
    """Undoes cuts that let a block write memory which another name for it still shows to a later block.

    A block that writes into a tensor from an earlier block writes into its own copy; that is exact while the
    written name is the only one in use from there on.
    """
    home = {n: i for i, interval in enumerate(intervals) for n in interval.nodes}
    first, last = _lifetimes(home, traced)
    by_storage: dict[int, list[fx.Node]] = {}
    for node in first:
        if "storage" in node.meta:
            by_storage.setdefault(node.meta["storage"], []).append(node)
    target = list(range(len(intervals)))
    for node, here in home.items():
        for written in node.meta.get("writes", ()):
            aliases = [a for a in by_storage[written.meta["storage"]] if first[a] < here <= last[a]]
            if len(aliases) > 1:
                start = target[min(first[a] for a in aliases)]
                target[start : here + 1] = [start] * (here + 1 - start)
    return _merged(intervals, target)


def _merged(intervals: list[Interval], target: list[int]) -> list[Interval]:
    """Joins neighbours with the same target."""
    groups = groupby(range(len(intervals)), lambda i: target[i])
    return [_join_all([intervals[i] for i in group]) for _, group in groups]


def _lifetimes(home: dict[fx.Node, int], traced: TracedModule) -> tuple[dict[fx.Node, int], dict[fx.Node, float]]:
    """Returns the first and the last interval that touches each call's result and each state tensor."""
    outputs: Any = traced.graph.output_node().args[0]
    endless = {*outputs, *(n for _, n in traced.writes_back)}
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, float] = {}
    for node in traced.graph.nodes:
        uses = [home[u] for u in node.users if u in home]
        if node in home or (node.op == "get_attr" and uses):
            first[node] = home.get(node, min(uses, default=0))
            last[node] = float("inf") if node in endless else max(uses, default=-1)
    return first, last


def _join_all(parts: list[Interval]) -> Interval:
    joined = parts[0]
    for part in parts[1:]:
        joined = _join(joined, part, f"{joined.name}+{part.name}")
    return joined
