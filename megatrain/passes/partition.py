"""partition: cuts the graph into blocks; the only pass that changes the type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from megatrain.errors import LowerError
from megatrain.passes.program import Block, OutputRef, Port, Program, Template, Value
from megatrain.tracer.traced import TracedModule


@dataclass(frozen=True, slots=True)
class Interval:
    """A contiguous run of calls that becomes one block.

    Args:
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

    A block sees what another made as a leaf, without the graph that made it.
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


def partition(traced: TracedModule, *, block_bytes: int | None = None) -> Program:
    """Cuts a straight-line graph into contiguous intervals, one block each.

    Each repeated module (two or more of a class in one ModuleList or Sequential) is a block; a run of calls between
    them is a separate block if it reads state, otherwise it joins its neighbour. A tensor that one interval computes
    and another, or the caller, reads becomes a value. A straight-line graph cut into intervals has no cycle, so every
    model has one.

    Args:
        block_bytes: Target bytes of a block's state. Larger blocks are cut at their child modules, runs of
            smaller ones are merged. None keeps the model's own repeated modules.

    Raises:
        LowerError: If the model calls nothing at all, or a buffer carries gradients from call to call.
    """
    intervals = find_intervals(traced, block_bytes)
    if not intervals:
        raise LowerError(
            f"{traced.name} computes nothing.\n  A program needs at least one torch call between inputs and outputs."
        )
    return _Cut(traced, intervals, block_bytes).program()


class _Cut:
    """Follows every tensor across the intervals, in execution order."""

    def __init__(self, traced: TracedModule, intervals: list[Interval], block_bytes: int | None):
        self._traced = traced
        self._intervals = intervals
        self._block_bytes = block_bytes
        self._home = {n: i for i, interval in enumerate(intervals) for n in interval.nodes}
        self._values: dict[str, Value] = {}
        # The value that holds a node's tensor now; a block that writes into a foreign tensor redefines it.
        self._current: dict[fx.Node, str] = {}
        self._storages: dict[Any, int] = {}
        written_keys = {key for key, _ in traced.writes_back}
        self._written_state = {n for n in traced.graph.nodes if n.op == "get_attr" and str(n.target) in written_keys}
        self._constants = [n for n in traced.graph.nodes if n.op == "get_attr" and str(n.target) in traced.constants]
        passed = {*self._written_state, *self._constants}
        self._state_storages = {n.meta["storage"] for n in traced.graph.nodes if n.op == "get_attr" and n not in passed}
        outputs: Any = traced.graph.output_node().args[0]
        self._returned: set[fx.Node] = {*outputs, *(n for _, n in traced.writes_back)}

    def program(self) -> Program:
        traced = self._traced
        for node in traced.inputs:
            self._define(node, node.name, None, node.meta["storage"])
        buffers: list[tuple[str, str]] = []
        for node in (n for n in traced.graph.nodes if n in self._written_state):
            self._define(node, node.name, None, node.meta["storage"])
            buffers.append((node.name, str(node.target)))
        self._refuse_history(buffers)
        for node in self._constants:
            self._define(node, node.name, None, node.meta["storage"])
        templates: dict[str, Template] = {}
        blocks: list[Block] = []
        for index, interval in enumerate(self._intervals):
            template, block = self._block(index, interval)
            templates[template.name] = template
            blocks.append(block)
        outputs: Any = traced.graph.output_node().args[0]
        return Program(
            name=traced.name,
            templates=templates,
            blocks=tuple(blocks),
            values=dict(self._values),
            inputs=tuple(n.name for n in traced.inputs),
            buffers=tuple(buffers),
            constants={n.name: traced.constants[str(n.target)] for n in self._constants},
            commits=tuple((key, self._current[node]) for key, node in traced.writes_back),
            outputs=tuple(self._output(node) for node in outputs),
            state=dict(traced.state),
            device=traced.device,
            block_bytes=self._block_bytes,
            gradient_order=traced.gradient_order,
            rebinds=traced.rebinds,
        )

    def _refuse_history(self, buffers: list[tuple[str, str]]) -> None:
        """Refuses gradients that would flow from one call into the one before, through a buffer that both use."""
        read = {key for _, key in buffers}
        for key, node in self._traced.writes_back:
            # A buffer that was bound anew enters as a clone, made without history.
            sources = [node, *node.all_input_nodes] if node.target in ("clone", torch.Tensor.clone) else [node]
            if key in read and any(source.meta["requires_grad"] for source in sources):
                raise LowerError(
                    f"the forward leaves a tensor with gradient history in the buffer `{key}`, and reads it again.\n"
                    "  In eager, the next backward would continue into the previous call; a schedule ends with its "
                    "call.\n"
                    "  Detach the tensor before it goes into the buffer."
                )

    def _define(self, node: fx.Node, name: str, producer: int | None, storage: Any) -> None:
        meta = node.meta
        number = self._storages.setdefault(storage, len(self._storages))
        is_copy = meta["storage"] in self._state_storages
        storage_bytes = meta["spec"].nbytes if is_copy else meta["storage_bytes"]
        self._current[node] = name
        self._values[name] = Value(name, meta["spec"], producer, meta["requires_grad"], number, storage_bytes)

    def _output(self, node: fx.Node) -> OutputRef:
        if node in self._current:
            return OutputRef("value", self._current[node])
        return OutputRef("state", str(node.target))

    def _block(self, index: int, interval: Interval) -> tuple[Template, Block]:
        foreign = dict.fromkeys(a for n in interval.nodes for a in n.all_input_nodes if self._home.get(a, -1) != index)
        inputs = [a for a in foreign if a in self._current]
        written = {w for n in interval.nodes for w in n.meta.get("writes", ()) if w in inputs}
        graph, copies = _extract(interval, foreign, inputs, written)
        names = tuple(self._current[a] for a in inputs)
        outputs = self._outputs(index, interval, inputs, written)
        for node in outputs:
            if node.meta["storage"] in self._state_storages:
                # A view of weights may not leave the block: the slot under it is overwritten.
                copies[node] = _clone_of(graph, copies[node], node)
            name = f"{node.name}_in_{index}" if node in written else node.name
            self._define(node, name, index, self._storage_of(index, node, written))
        graph.output(tuple(copies[n] for n in outputs))
        template = Template(
            name=f"t{index}",
            graph=graph,
            inputs=tuple(
                Port(p.name, a.meta["spec"])
                for p, a in zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True)
            ),
            state=(),
            outputs=tuple(Port(copies[n].name, n.meta["spec"]) for n in outputs),
            is_random=any(n.meta["is_random"] for n in interval.nodes),
        )
        block = Block(index, interval.name, template.name, names, tuple(self._current[n] for n in outputs), ())
        return template, block

    def _storage_of(self, index: int, node: fx.Node, written: set[fx.Node]) -> Any:
        """Identifies the memory that a value lies in; a block that copied it first owns the copy."""
        storage = node.meta["storage"]
        if storage in self._state_storages:
            return index, node
        if any(w.meta["storage"] == storage for w in written):
            return index, storage
        return storage

    def _outputs(self, index: int, interval: Interval, inputs: list[fx.Node], written: set[fx.Node]) -> list[fx.Node]:
        """Lists the tensors that leave the interval: re-written inputs, then results, in order of use."""

        def leaves(node: fx.Node) -> bool:
            later = any(self._home.get(u, -1) > index for u in node.users)
            return later or node in self._returned

        rewritten = [n for n in inputs if n in written and leaves(n)]
        return rewritten + [n for n in interval.nodes if leaves(n)]


def _extract(
    interval: Interval, foreign: dict[fx.Node, None], inputs: list[fx.Node], written: set[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copies an interval into a graph of its own; inputs that it writes into are cloned on entry."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta.update(spec=node.meta["spec"], requires_grad=node.meta["requires_grad"])
    for node in foreign:
        if node not in copies:
            copies[node] = graph.node_copy(node)
    for node in inputs:
        if node in written:
            copies[node] = _clone_of(graph, copies[node], node)
    for node in interval.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = {k: v for k, v in node.meta.items() if k != "writes"}
    return graph, copies


def _clone_of(graph: fx.Graph, placeholder: fx.Node, original: fx.Node) -> fx.Node:
    clone = graph.call_method("clone", (placeholder,))
    clone.meta.update(
        spec=original.meta["spec"],
        requires_grad=original.meta["requires_grad"],
        grad=True,
        autocast=(),
        modules=(),
        source=None,
        is_random=False,
    )
    return clone
