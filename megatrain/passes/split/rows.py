"""How a call acts on the rows of one operand: where they lie in its result, and which operands go with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megatrain.passes.call_trial import called, followed, marked
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """A call, the operand of it that is cut, and what it does to that."""

    node: fx.Node
    operand: fx.Node
    act: Act


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One road of a tensor into the data.

    Args:
        before: Views and casts of the tensor alone.
        call: Where it meets other data.
        after: The views and the product that follow, if parts compute them, too.
    """

    before: tuple[Cut, ...]
    call: Cut
    after: tuple[Cut, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The calls that are rewritten, without the shared views in front; the parts make up the result of the last."""
        return (self.call.node, *(step.node for step in self.after))


class Batch(Use):
    """A product batched over the rows: each part gives a stretch of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Use):
    """One row, by a number that never changes: one part gives it."""

    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Use):
    """Rows picked by number."""

    gather: Gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped(Use):
    """A grouped product: consecutive runs of `tokens`, each with its own row; `ends` tells where the runs end."""

    tokens: fx.Node
    ends: fx.Node


@dataclass(frozen=True, slots=True)
class Act:
    """What a call does to a tensor that may be cut along one of its dimensions.

    Args:
        dim: The dimension of the result along which the rows lie.
        aligned: Other operands with one row for each of these rows, each with the dimension they lie along.
        is_view: The result shares the operand's memory.
        is_product: The call contracts the operand with another one.
    """

    dim: int
    aligned: tuple[tuple[fx.Node, int], ...] = ()
    is_view: bool = False
    is_product: bool = False


_VIEWS = {"transpose", "swapaxes", "swapdims", "permute", "unsqueeze", "squeeze", "mT"}
_CASTS = {"to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone"}
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
}  # fmt: skip
_PRODUCTS = {"bmm", "matmul", "__matmul__", "__rmatmul__"}
_FUNCTIONS: dict[Any, str] = {
    getattr(torch, name): name
    for name in (*_VIEWS, *_ELEMENTWISE, *_PRODUCTS, "clone", "einsum", "select", "index_select", "_grouped_mm")
    if hasattr(torch, name)
}
_FUNCTIONS[F.embedding] = "embedding"
if hasattr(F, "grouped_mm"):
    _FUNCTIONS[F.grouped_mm] = "_grouped_mm"


def known_name(node: fx.Node) -> str:
    """Returns the name of a torch function or tensor method that the rules here may know; else an empty text."""
    if node.op == "call_method":
        return str(node.target)
    if node.target is getattr:
        return str(node.args[1])
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


def operands(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes among a call's arguments, as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)
    return found


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns an argument of a call, given by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def act_on(node: fx.Node, operand: fx.Node, dim: int) -> Act | None:
    """Tells what `node` does to the rows of `operand` along `dim`; None if they can't be told apart."""
    name = known_name(node)
    if operands(node).count(operand) != 1 or not _has_rows(node):
        return None
    if name in _VIEWS and node.args[0] is operand and operands(node) == [operand]:
        moved = _moved(node, operand, dim)
        return None if moved is None else Act(moved, is_view=True)
    if name in _CASTS and operands(node) == [operand]:
        return Act(dim)
    if name in _ELEMENTWISE and all(isinstance(a, fx.Node | float | int) for a in node.args):
        return _broadcast(node, operand, dim)
    if name in _PRODUCTS and dim - len(_shape(operand)) <= -3 and all(len(_shape(n)) >= 2 for n in operands(node)):
        act = _broadcast(node, operand, dim)
        return None if act is None else Act(act.dim, act.aligned, is_product=True)
    return _einsum(node, operand, dim) if name == "einsum" else None


def _has_rows(node: fx.Node) -> bool:
    """Tells whether a call makes one tensor of the device, and writes into none."""
    return "spec" in node.meta and not node.meta["spec"].on_host and not node.meta.get("writes")


def _shape(node: fx.Node) -> tuple[int, ...]:
    spec: TensorSpec = node.meta["spec"]
    return spec.shape


def _moved(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Follows a dimension through a view; None if the view leaves out some of it."""
    target: Any = node.target
    base = marked(_shape(operand))
    view: torch.Tensor = called(target, (base, *node.args[1:]), node.kwargs)
    _, places = followed(view, base) or ({}, {})
    place, step = places.get(dim - base.dim(), (0, 0))
    return place + view.dim() if step == 1 and view.shape[place] == base.shape[dim] else None


def _broadcast(node: fx.Node, operand: fx.Node, dim: int) -> Act | None:
    """Operands that broadcast match from the right; one that lacks the rows, or has one, serves all of them."""
    from_right = dim - len(_shape(operand))
    aligned: list[tuple[fx.Node, int]] = []
    for other in operands(node):
        if other is operand:
            continue
        shape = _shape(other) if "spec" in other.meta else None
        if shape is None:
            return None
        if len(shape) >= -from_right and shape[from_right] != 1:
            aligned.append((other, from_right + len(shape)))
    return Act(from_right + len(_shape(node)), tuple(aligned))


def _einsum(node: fx.Node, operand: fx.Node, dim: int) -> Act | None:
    equation = node.args[0]
    tensors: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(tensors) != 2:
        return None
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")
    place = list(tensors).index(operand)
    label, other = terms[place][dim], terms[1 - place]
    if [terms[place].count(label), result.count(label)] != [1, 1] or other.count(label) > 1:
        return None
    aligned = ((tensors[1 - place], other.index(label)),) if label in other else ()
    return Act(result.index(label), aligned, is_product=True)


@dataclass(frozen=True, slots=True)
class Gather:
    """A call that picks rows of a table by number.

    Args:
        counts_from_end: A number below zero counts from the end, rather than being out of range.
        padding: The row that gets no gradient.
    """

    index: fx.Node
    counts_from_end: bool = False
    padding: int | None = None


_INTEGERS = (torch.int64, torch.int32)


def gather_of(node: fx.Node, table: fx.Node) -> Gather | None:
    """Recognises `table[index]`, `table.index_select(0, index)` and `F.embedding(index, table)`."""
    name = known_name(node)
    index: Any = None
    padding: Any = None
    if name == "__getitem__" and node.args[0] is table:
        index = node.args[1]
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    elif name == "index_select" and node.args[0] is table and argument(node, 1, "dim") in (0, -len(_shape(table))):
        index = argument(node, 2, "index")
    elif name == "embedding" and argument(node, 1, "weight") is table:
        has_extras = [argument(node, p, n) for p, n in ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse"))]
        index = None if any(x is not None and x is not False for x in has_extras) else argument(node, 0, "input")
        padding = argument(node, 2, "padding_idx")
        padding = None if padding is None else padding % _shape(table)[0]
    if not isinstance(index, fx.Node) or index is table or operands(node).count(table) != 1:
        return None
    spec: TensorSpec | None = index.meta.get("spec")
    if spec is None or spec.dtype not in _INTEGERS or not spec.shape or spec.on_host:
        return None
    return Gather(index, name == "__getitem__", padding)


def row_of(node: fx.Node, table: fx.Node) -> int | None:
    """Recognises `table[3]` and `table.select(0, 3)`; returns the number of the row."""
    name = known_name(node)
    row: Any = None
    if name == "__getitem__" and node.args[0] is table:
        row = node.args[1]
    elif name == "select" and node.args[0] is table and argument(node, 1, "dim") in (0, -len(_shape(table))):
        row = argument(node, 2, "index")
    return row % _shape(table)[0] if isinstance(row, int) and not isinstance(row, bool) else None


def grouped_of(node: fx.Node, weights: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Recognises `grouped_mm(rows, weights, offs=ends)`; returns the rows and the ends of the groups."""
    if known_name(node) != "_grouped_mm" or len(node.args) < 2 or node.args[1] is not weights:
        return None
    rows, ends, bias = node.args[0], argument(node, 2, "offs"), argument(node, 3, "bias")
    if not (isinstance(rows, fx.Node) and isinstance(ends, fx.Node) and bias is None):
        return None
    is_plain = len(_shape(rows)) == 2 and len(_shape(weights)) == 3 and 0 not in _shape(rows)
    return (rows, ends) if is_plain and operands(node).count(weights) == 1 else None


def dims_by_stride(spec: TensorSpec) -> list[int]:
    """Returns the dimensions of a tensor, that with the largest stride first."""
    jumps = spec.stride
    dims = list(range(len(spec.shape)))
    return dims if jumps is None else sorted(dims, key=lambda d: (-jumps[d], d))


def resized(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    """Gives a dense tensor another size along one dimension, its dimensions in the same order in memory."""
    shape = (*spec.shape[:dim], size, *spec.shape[dim + 1 :])
    if spec.stride is None:
        return TensorSpec(shape, spec.dtype)
    strides, step = [0] * len(shape), 1
    for d in reversed(dims_by_stride(spec)):
        strides[d], step = step, step * shape[d]
    return TensorSpec.of(torch.empty_strided(shape, strides, dtype=spec.dtype, device="meta"))
