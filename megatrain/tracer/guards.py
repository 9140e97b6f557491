"""Guards: what the forward's Python code read from its inputs, checked again before every step."""

from __future__ import annotations

from collections.abc import Mapping
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
