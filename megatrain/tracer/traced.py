"""TracedModule: one forward of a model as a flat fx graph, with specs and the state it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from megatrain.base.counts import counted
from megatrain.base.torch_private import pytree
from megatrain.errors import TraceError
from megatrain.tracer.arguments import Structure
from megatrain.tracer.calls import call_text
from megatrain.tracer.guards import Expectation, Guard
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.python.assumptions import Assumptions
from megatrain.tracer.python.followed_numbers import OnNumbers
from megatrain.tracer.python.side_outputs import SideOutputs
from megatrain.tracer.spec import CALLS, TensorSpec, check_meta, is_equal, refuse_meta, storage_key


@dataclass(frozen=True, slots=True)
class ReturnedArgument:
    """A dictionary of the caller's that a forward changes and returns, as modules in a pipeline do: what it changes.

    Everything else stays the caller's own.

    Args:
        place: Of the argument: its position or its keyword.
    """

    place: int | str
    changed: tuple[Any, ...]
    removed: tuple[Any, ...]

    @staticmethod
    def of(place: int | str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> ReturnedArgument:
        """Compares what an argument held before and after the forward."""
        changed = tuple(key for key, value in after.items() if key not in before or before[key] is not value)
        return ReturnedArgument(place, changed, tuple(key for key in before if key not in after))

    def put(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Mapping[Any, Any]) -> dict[Any, Any]:
        """Changes the caller's argument as the forward would have done, from a call's result; returns it."""
        given = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        given.update((key, result[key]) for key in self.changed)
        for key in self.removed:
            given.pop(key, None)
        return given

    def __str__(self) -> str:
        parts = [f"{word} {', '.join(map(repr, keys))}" for word, keys in
                 (("sets", self.changed), ("removes", self.removed)) if keys]  # fmt: skip
        return f"argument `{self.place}`: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True)
class WrittenInputs:
    """Inputs that the forward writes into: it gets a copy of each, whose last content goes back to the caller."""

    names: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what a step starts from: the caller's tensors, but copies of those that it will write into.

        Raises:
            TraceError: If another input shares their memory.
        """
        storages = [storage_key(t) for t in tensors] if self.indices else []
        for name, index in zip(self.names, self.indices, strict=True):
            if storages.count(storages[index]) > 1:
                raise TraceError(
                    f"the model writes into its input `{name}` in place, which shares memory with another input.\n"
                    "  The other input would change with it, at a moment that a schedule doesn't know.\n"
                    "  Clone one of them."
                )
        return [t.clone() if i in self.indices else t for i, t in enumerate(tensors)]

    def put(self, tensors: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
        """Writes `contents`, in the order of the indices, into the caller's tensors."""
        with torch.no_grad():
            for index, content in zip(self.indices, contents, strict=True):
                tensors[index].copy_(content)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TracedModule:
    """What the model's forward did, once, for one signature of inputs.

    The graph is straight-line: placeholders (the input tensors, in order), `get_attr` nodes (state, by fully
    qualified name), one call node per torch call, one output. What a node's meta holds is told in
    `megatrain/tracer/spec.py`.

    Args:
        name: Class name of the model.
        graph: The captured forward.
        input_names: Of the tensors among the arguments; the tensors of the example are not kept.
        outputs: Structure of what the model returned; the graph's output lists its tensors in order, and then those
            of `side_outputs` and `written_inputs`.
        side_outputs: What the forward left in attributes.
        written_inputs: Inputs that the forward wrote into.
        returned_argument: A dictionary of the caller's that the forward changed and returned; None if it did neither.
        num_numbers: How many inputs, the last ones, hold numbers that the forward computes with.
        state: Everything the forward read, by key.
        constants: The tensors of entries of kind `"constant"`.
        writes_back: `(buffer key, node)`: buffers that hold another value after the forward.
        rebinds: Those of them that are another tensor then (`self.mean = ...`).
        guards: What Python code read from the inputs.
        assumptions: What it read from attributes, globals and closures; long, and printed on its own.
        block_modules: Fully qualified names of the repeated modules, where a cut is natural.
        device: The compute device that the capture assumed.
        gradient_order: Keys of trained parameters, in the order in which eager's backward completes their gradients;
            see `GradientOrder.groups`.
    """

    name: str
    graph: fx.Graph
    input_names: tuple[str, ...]
    outputs: Structure
    side_outputs: SideOutputs
    written_inputs: WrittenInputs
    state: Mapping[str, StateEntry]
    constants: Mapping[str, torch.Tensor]
    writes_back: tuple[tuple[str, fx.Node], ...]
    guards: tuple[Guard, ...]
    assumptions: Assumptions
    block_modules: frozenset[str]
    device: torch.device
    returned_argument: ReturnedArgument | None = None
    gradient_order: tuple[tuple[str, ...], ...] = ()
    num_numbers: int = 0
    rebinds: frozenset[str] = frozenset()

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Spec of every tensor in the graph, by node name."""
        return {n.name: n.meta["spec"] for n in self.graph.nodes if "spec" in n.meta}

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders, in the order of the flattened arguments."""
        return tuple(n for n in self.graph.nodes if n.op == "placeholder")

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """What the graph returns: the tensors of the model's result, then those that it leaves elsewhere."""
        nodes: Any = self.graph.output_node().args[0]
        return tuple(nodes)

    def result(self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> Any:
        """Returns what the model would return, around the first of the graph's output `tensors`.

        An output that is an input which the model wrote into is the caller's own tensor, if `inputs` are given.
        """
        nodes = self.results
        end = len(nodes) - len(self.written_inputs.indices)
        own = {n: inputs[i] for n, i in zip(nodes[end:], self.written_inputs.indices, strict=True) if inputs}
        count = len(self.outputs.placeholders)
        if len(tensors) < count or len(inputs) not in (0, len(self.inputs) - self.num_numbers):
            raise TraceError(
                f"the graph of `{self.name}` has {counted(len(self.inputs), 'input')} and "
                f"returns {counted(len(nodes), 'tensor')}; "
                f"given are {len(inputs)} and {len(tensors)}.\n"
                "  The result needs all tensors that the graph returns.\n  Give them all, in order."
            )
        return self.outputs.fill([own.get(n, t) for n, t in zip(nodes[:count], tensors[:count], strict=True)])

    def leave(self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Leaves what the model would leave in attributes and in the caller's `inputs`, from its output `tensors`."""
        end = len(tensors) - len(self.written_inputs.indices)
        self.side_outputs.put(tensors[len(self.outputs.placeholders) : end])
        self.written_inputs.put(inputs, tensors[end:])

    def __str__(self) -> str:
        inputs = ", ".join(f"{n.name}: {n.meta['spec']}" for n in self.inputs)
        outputs = self.results
        specs = ", ".join(str(n.meta["spec"]) for n in outputs[: len(self.outputs.placeholders)])
        returned = specs if len(self.outputs.placeholders) == 1 else f"({specs})"
        lines = [f"traced {self.name}({inputs}) -> {returned}", *self._state_lines()]
        for node in self.graph.nodes:
            if node.op in CALLS:
                spec = f": {node.meta['spec']}" if "spec" in node.meta else ""
                path = node.meta["modules"][-1][0] if node.meta["modules"] else ""
                lines.append(f"  {node.name}{spec} = {call_text(node)}" + (f"  # {path}" if path else ""))
        lines += [
            f"  {'bind' if key in self.rebinds else 'write back'} {key} = {node.name}" for key, node in self.writes_back
        ]
        lines += [f"  guard {guard}" for guard in self.guards]
        if self.assumptions.count:
            lines.append(f"  assumes {counted(self.assumptions.count, 'value')} of attributes and globals")
        count = len(self.outputs.placeholders)
        lines.append(f"  return {', '.join(n.name for n in outputs[:count])}")
        if self.returned_argument is not None:
            lines.append(f"  returns its {self.returned_argument}")
        names = (*self.side_outputs.names, *(f"input {name}" for name in self.written_inputs.names))
        if names:
            left = ", ".join(n.name for n in outputs[count:])
            lines.append(f"  leaves {', '.join(names)}" + (f" = {left}" if left else ""))
        return "\n".join(lines)

    def __repr__(self) -> str:
        calls = sum(node.op in CALLS for node in self.graph.nodes)
        return f"<TracedModule {self.name}: {counted(calls, 'call')}, {counted(len(self.state), 'state tensor')}>"

    def _state_lines(self) -> list[str]:
        parameters = [e for e in self.state.values() if e.kind == "parameter"]
        others = [e for e in self.state.values() if e.kind != "parameter"]
        total = sum(e.spec.nbytes for e in parameters)
        other_bytes = sum(e.spec.nbytes for e in others)
        lines = [
            f"  state: {counted(len(parameters), 'parameter')}, {total} bytes; "
            f"{counted(len(others), 'buffer')}, {other_bytes} bytes"
        ]
        for entry in self.state.values():
            lines += [f"  tied: {tie} = {entry.key}" for tie in entry.ties]
        return lines

    def check(self) -> None:
        """Checks that the graph is well-formed, and that every node in it is described.

        Raises:
            TraceError: If a node lacks a key of its meta, or reads state that the inventory lacks or knows otherwise.
        """
        self._check_form()
        for node in self.graph.nodes:
            check_meta(node)
            if node.op == "get_attr":
                self._check_state(node)
        for key, node in self.writes_back:
            if key not in self.state:
                raise TraceError(
                    f"the value of `{node.name}` is written back to `{key}`, which isn't in the inventory of state.\n"
                    "  `state` lists everything that the graph reads or writes.\n  Keep its entry in `state`."
                )
            if not self.state[key].is_writable:
                raise TraceError(
                    f"the model writes into its {self.state[key].kind} `{key}` during forward.\n"
                    "  Only writes to buffers and untrained parameters can be written back after a forward.\n"
                    "  Update trained parameters outside the forward."
                )
            if node.graph is not self.graph:
                raise TraceError(
                    f"the value written back to `{key}` belongs to another graph.\n"
                    "  A pass that copies the graph must use the copy's nodes.\n"
                    "  Change graphs with `Rewriter`, which uses the right nodes."
                )

    def _check_form(self) -> None:
        """Refuses a malformed graph: lint raises bare errors, and the author of the pass needs a clear one."""
        try:
            self.graph.lint()
            returned: Any = self.graph.output_node().args[0]
        except (RuntimeError, StopIteration, IndexError) as error:
            first_line = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise TraceError(
                f"the graph of `{self.name}` is not well-formed: {first_line}.\n"
                "  A graph has one output, and every node comes before its readers.\n"
                "  Change graphs with `Rewriter`, which keeps this order."
            ) from error
        if not isinstance(returned, tuple | list) or not all(isinstance(n, fx.Node) for n in returned):
            raise TraceError(
                f"the graph of `{self.name}` doesn't return a tuple of its nodes.\n"
                "  Results must be in the order of `outputs`, `side_outputs` and `written_inputs`.\n"
                "  Replace them one by one: `Rewriter.replace` keeps the order."
            )

    def _check_state(self, node: fx.Node) -> None:
        entry = self.state.get(str(node.target))
        if entry is None:
            raise TraceError(
                f"the graph reads state `{node.target}`, which isn't in the inventory.\n"
                "  `state` lists everything that the graph reads.\n  Add an entry for this state, or read only "
                "listed state."
            )
        if node.meta["key"] != node.target or node.meta["spec"] != entry.spec:
            refuse_meta(
                node, f"reads `{node.target}`: {entry.spec}, but its meta says {node.meta['key']}: {node.meta['spec']}"
            )


# What a node's meta says besides the user's line.
_FACTS = (
    "spec", "requires_grad", "storage", "storage_bytes", "modules", "grad", "autocast", "is_random", "key", "results",
)  # fmt: skip
# Compared below, or of no account for what is computed.
_SEPARATE = ("graph", "outputs", "side_outputs", "constants", "writes_back", "guards", "assumptions")
# What else differs where numbers are followed: these are further inputs, and copies of tensors that hold numbers.
_OF_NUMBERS = ("input_names", "num_numbers")


def is_same_capture(left: TracedModule, right: TracedModule) -> bool:
    """Tells whether two captures of one model, for arguments of one signature, have equal graphs and guards.

    What they assumed, the lines they came from and the objects around their outputs may differ.
    """
    if left.constants.keys() != right.constants.keys():
        return False
    if any(tensor is not right.constants[key] for key, tensor in left.constants.items()):
        return False
    return _are_alike(left, right, list(left.graph.nodes), list(right.graph.nodes), by_numbers=False)


def is_same_but_for_numbers(plain: TracedModule, followed: TracedModule) -> bool:
    """Tells whether a capture that follows numbers computes what one of the same call with the numbers itself does."""
    more = set(followed.inputs[len(plain.inputs) :])
    ours = [node for node in plain.graph.nodes if not _is_read(node)]
    others = [node for node in followed.graph.nodes if node not in more and not node.meta.get("is_read")]
    return _are_alike(plain, followed, ours, others, by_numbers=True)


def _are_alike(
    left: TracedModule, right: TracedModule, ours: list[fx.Node], others: list[fx.Node], *, by_numbers: bool
) -> bool:
    ignored = (*_SEPARATE, *(_OF_NUMBERS if by_numbers else ()))
    plain = [f.name for f in fields(TracedModule) if f.name not in ignored]
    nodes = dict(zip(ours, others, strict=False))
    return (
        len(ours) == len(others)
        and all(getattr(left, name) == getattr(right, name) for name in plain)
        and all(_is_same_node(a, b, nodes, by_numbers=by_numbers) for a, b in nodes.items())
        and [(k, nodes[n]) for k, n in left.writes_back] == list(right.writes_back)
        and len(left.guards) == len(right.guards)
        and all(_is_same_guard(a, b, nodes) for a, b in zip(left.guards, right.guards, strict=True))
    )


def _is_read(node: fx.Node) -> bool:
    """Tells whether a node compares a number that Python reads; `Arguments.follows_reads` has it followed."""
    return isinstance(node.target, Expectation) and node.target.target == "item"


def _is_same_node(left: fx.Node, right: fx.Node, nodes: Mapping[fx.Node, fx.Node], *, by_numbers: bool) -> bool:
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
