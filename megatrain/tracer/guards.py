"""Guards: what the forward's Python code read from its inputs, checked again before every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from megatrain.tracer.calls import call_name, literal_text
from megatrain.tracer.source_line import SourceLine
from megatrain.tracer.spec import is_equal


class GuardFailedError(Exception):
    """A value in mid-step isn't the one that the capture saw: another graph stands for this call.

    Nothing was committed yet; the call starts again with another variant. Users never see it.
    """

    def __init__(self, text: str, actual: str, calls: tuple[str, ...]):
        super().__init__(f"{text}; it is {actual}")
        self.text = text
        self.actual = actual
        self.calls = calls


class Expectation:
    """Repeats a read of the capture and compares; the target of a graph node without a result.

    Two are equal if they read and expect the same: layers that share a template may check at different places.

    Args:
        op: `"call_method"` or `"call_function"`.
    """

    __name__ = "check"
    __slots__ = ("calls", "expected", "name", "op", "source", "target")

    def __init__(
        self, op: str, target: Any, expected: Any, source: SourceLine | None, calls: tuple[str, ...], name: str = "..."
    ):
        self.op = op
        self.target = target
        self.expected = expected
        self.source = source
        self.calls = calls
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raises `GuardFailedError` if the value isn't the one expected."""
        with torch.no_grad():
            if self.op == "call_method":
                actual = getattr(args[0], self.target)(*args[1:], **kwargs)
            else:
                actual = self.target(*args, **kwargs)
        if not is_equal(actual, self.expected):
            name = str(self.target).strip("_") if self.op == "call_method" else call_name(self.target)
            text = f"{name}({self.name}) == {literal_text(self.expected)} at {self.source}"
            raise GuardFailedError(text, repr(actual), self.calls)

    def call_text(self, arguments: str) -> str:
        """Prints the check on arguments that are printed already."""
        name = self.target if self.op == "call_method" else call_name(self.target)
        return f"check {name}({arguments}) == {literal_text(self.expected)}"

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.op, self.target, type(self.expected), repr(self.expected)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expectation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


_METADATA = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_floating_point is_complex is_signed
    is_contiguous element_size get_device data_ptr type is_same_size is_set_to is_pinned is_shared
    is_inference is_conj is_neg is_tensor __len__ __hash__ untyped_storage
    result_type has_names is_coalesced is_distributed
    """.split()
)

# What a call may give to Python code; a hook's handle or None stands for an effect.
PLAIN = (
    bool, int, float, complex, str, type, np.ndarray, np.generic, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def is_metadata_read(name: str) -> bool:
    """Tells whether a call named `name` can only tell what the input's spec already fixes."""
    return name in _METADATA


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A value that Python code read, and the recorded call that reads it again.

    Args:
        op: `"call_method"` or `"call_function"`.
        args: Its arguments, with nodes of the traced graph in place of tensors.
        place: How many nodes the graph had when it was read.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any
    source: SourceLine | None
    place: int

    def __str__(self) -> str:
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "call")
        arguments = ", ".join(literal_text(a) for a in self.args)
        return f"{name}({arguments}) == {self.expected!r} at {self.source}"

    def holds(self, values: Mapping[fx.Node, torch.Tensor]) -> bool:
        """Reads the value again and compares; NaN equals NaN."""
        return is_equal(compute(self, values), self.expected)

    def nodes(self) -> list[fx.Node]:
        """Returns the nodes it reads."""
        found: list[fx.Node] = []
        map_arg((self.args, self.kwargs), found.append)
        return found


class GuardCheck:
    """Computes what guards read, which depends on inputs and constants alone, and compares."""

    def __init__(self, guards: Sequence[Guard], graph: fx.Graph, constants: Mapping[str, torch.Tensor]):
        self._placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._constants = constants
        place = {node: i for i, node in enumerate(graph.nodes)}
        writers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            for written in node.meta.get("writes", ()):
                writers.setdefault(written, []).append(node)
        known = set(self._placeholders)
        self._steps: list[tuple[list[fx.Node], Guard]] = []
        for guard in guards:
            needed: set[fx.Node] = set()
            stack = guard.nodes()
            while stack:
                node = stack.pop()
                if node not in known:
                    known.add(node)
                    needed.add(node)
                    stack += node.all_input_nodes
                stack += [w for w in writers.get(node, ()) if w not in known and place[w] < guard.place]
            self._steps.append((sorted(needed, key=lambda n: place[n]), guard))

    def first_failure(self, inputs: Sequence[torch.Tensor]) -> Guard | None:
        """Returns the first guard that doesn't hold for `inputs`, or None.

        Calls recorded after a guard may be wrong, even impossible, where it fails: they wait for its answer.
        """
        if not self._steps:
            return None
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, inputs, strict=True))
        with torch.no_grad():
            for nodes, guard in self._steps:
                for node in nodes:
                    is_constant = node.op == "get_attr"
                    values[node] = self._constants[str(node.target)] if is_constant else compute(node, values)
                if not guard.holds(values):
                    return guard
        return None


def compute(call: fx.Node | Guard, values: Mapping[fx.Node, Any]) -> Any:
    """Repeats a call on the values of its nodes."""
    args, kwargs = map_arg((call.args, call.kwargs), lambda n: values[n])
    target: Any = call.target
    if call.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)
