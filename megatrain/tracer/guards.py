"""Guards: what the forward's Python code read from its inputs, checked again before every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megatrain.tracer.source import SourceLine
from megatrain.tracer.targets import literal_text

_METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_floating_point", "is_complex",
    "is_signed", "is_contiguous", "element_size", "get_device", "data_ptr", "type", "is_same_size", "is_set_to",
    "is_pinned", "is_shared", "is_inference", "is_conj", "is_neg", "is_tensor", "__len__", "__hash__", "__repr__",
    "__format__", "untyped_storage", "result_type", "has_names", "is_coalesced", "is_distributed", "register_hook",
}  # fmt: skip


def is_metadata_read(name: str) -> bool:
    """Tells whether a call named `name` can only tell what the input's spec already fixes."""
    return name in _METADATA


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A value that Python code read, and the recorded call that reads it again.

    Args:
        op: `"call_method"` or `"call_function"`.
        target: What is called.
        args: Its arguments, with nodes of the traced graph in place of tensors.
        kwargs: Its keyword arguments, likewise.
        expected: The value read at capture.
        source: The user's line.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any
    source: SourceLine | None

    def __str__(self) -> str:
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "call")
        arguments = ", ".join(literal_text(a) for a in self.args)
        return f"{name}({arguments}) == {self.expected!r} at {self.source}"

    def holds(self, values: Mapping[fx.Node, torch.Tensor]) -> bool:
        """Reads the value again and compares; NaN equals NaN."""
        args, kwargs = fx.node.map_arg((self.args, self.kwargs), lambda n: values[n])
        found = getattr(args[0], self.target)(*args[1:], **kwargs) if self.op == "call_method" else self.target(*args, **kwargs)
        return bool(found == self.expected) or (found != found and self.expected != self.expected)

    def nodes(self) -> list[fx.Node]:
        """Returns the nodes it reads."""
        found: list[fx.Node] = []
        fx.node.map_arg((self.args, self.kwargs), found.append)
        return found


class GuardCheck:
    """Computes what guards read, which depends on inputs and constants alone, and compares.

    Args:
        guards: Of one capture.
        graph: The captured graph.
        constants: Its constants, by key.
    """

    def __init__(self, guards: Sequence[Guard], graph: fx.Graph, constants: Mapping[str, torch.Tensor]):
        needed: set[fx.Node] = set()
        stack = [node for guard in guards for node in guard.nodes()]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        self._guards = tuple(guards)
        self._placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._order = [n for n in graph.nodes if n in needed and n.op != "placeholder"]
        self._constants = constants

    def first_failure(self, inputs: Sequence[torch.Tensor]) -> Guard | None:
        """Returns the first guard that doesn't hold for `inputs`, or None."""
        if not self._guards:
            return None
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, inputs, strict=True))
        with torch.no_grad():
            for node in self._order:
                is_constant = node.op == "get_attr"
                values[node] = self._constants[str(node.target)] if is_constant else _compute(node, values)
            return next((g for g in self._guards if not g.holds(values)), None)


def _compute(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)
