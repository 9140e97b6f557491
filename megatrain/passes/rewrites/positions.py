"""PositionProof: proves of tensors of a graph that they are functions of positions alone, and of which.

A mask of causality, or of a window, depends on the difference of two positions. So one element for each difference
tells all of them: 2 x tokens elements instead of tokens x tokens. The calls that make the mask are made for real on
these elements; dtypes, promotion and NaN are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megatrain.passes.call_trial import called, followed, marked
from megatrain.tracer.calls import target_name
from megatrain.tracer.spec import CALLS, TensorSpec

# Up to these numbers each whole number is an element of the dtype, and so are sums of two such elements.
_EXACT = {torch.int64: 2**61, torch.int32: 2**30, torch.float64: 2**52, torch.float32: 2**23}
# Calls that compute each element from the elements at its place; the first ones from what two numbers differ by.
_OF_DIFFERENCES = frozenset("lt le gt ge eq ne sub rsub".split())
_POINTWISE = _OF_DIFFERENCES | frozenset(
    "and or xor invert logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "add radd mul rmul neg where masked_fill minimum maximum".split()
)
_VIEWS = frozenset(
    "getitem unsqueeze squeeze expand expand_as broadcast_to transpose swapaxes swapdims permute movedim t T mT view "
    "reshape view_as narrow select alias detach".split()
)
# Calls that give the same numbers back, in another dtype or memory.
_COPIES = frozenset("to bool int long float double half bfloat16 type type_as clone contiguous".split())
_FILLED = {"ones": 1, "new_ones": 1, "ones_like": 1, "zeros": 0, "new_zeros": 0, "zeros_like": 0}
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "tensor": 0, "scalar_tensor": 0}


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor that is a function of positions: of the indices along none, one or two of its dimensions.

    Args:
        dims: These dimensions, counted from the last; (-2, -1) in a mask of queries and keys.
        values: Along one dimension all elements. With two dimensions elements depend on column minus row: one for each
            difference, from the lowest left to the highest right. With none one element, which all are.
    """

    dims: tuple[int, ...]
    values: torch.Tensor

    @staticmethod
    def of(dims: tuple[int, ...], values: torch.Tensor, spec: TensorSpec) -> Known | None:
        """What is known of a tensor; None if its elements depend on a position that isn't among `dims`."""
        if values.dtype != spec.dtype:
            return None
        if bool((values == values[0]).all()):
            return Known((), values[:1])
        return Known(dims, values) if all(spec.shape[dim] > 1 for dim in dims) else None

    def along(self, dims: tuple[int, ...], shape: Sequence[int]) -> torch.Tensor:
        """The elements of the tensor, broadcast to more dimensions and a shape."""
        if len(dims) < 2 or self.dims == dims:
            return self.values if self.dims else self.values.expand(shape[dims[0]] if dims else 1)
        rows, columns = (shape[dim] for dim in dims)
        if not self.dims:
            return self.values.expand(rows + columns - 1)
        # Elements of the first column from below, then those of the first row.
        if self.dims == dims[1:]:
            return torch.cat([self.values[:1].expand(rows - 1), self.values])
        return torch.cat([self.values.flip(0), self.values[:1].expand(columns - 1)])


class PositionProof:
    """What is known of the tensors of a graph that are functions of positions: of their own indices.

    Followed are `arange`, views, sums and comparisons of positions, fills, `tril` and `triu`, logical functions,
    `where`, `masked_fill`, and casts. Whatever depends on inputs, weights or random numbers, and all memory that is
    written into, is unknown.
    """

    def __init__(self, graph: fx.Graph):
        self._written = {w.meta["storage"] for n in graph.nodes for w in n.meta.get("writes", ())}
        self._known: dict[fx.Node, Known] = {}
        for node in graph.nodes:
            found = self._found(node) if self._is_followed(node) else None
            if found is not None:
                self._known[node] = found

    def of(self, node: fx.Node) -> Known | None:
        """What is known of a tensor; None if nothing is."""
        return self._known.get(node)

    def is_written(self, node: fx.Node) -> bool:
        """Tells whether something writes into a tensor's memory."""
        return node.meta["storage"] in self._written

    def _is_followed(self, node: fx.Node) -> bool:
        meta, name, operands = node.meta, target_name(node), node.all_input_nodes
        if node.op not in CALLS or "spec" not in meta or meta["requires_grad"] or meta.get("is_random"):
            return False
        if name.endswith("_like") or name.startswith("new_"):  # reads a shape or dtype alone, as the next three
            operands = ()
        elif name in ("expand_as", "view_as", "type_as") and node.args:
            operands = operands[:1]
        return not self.is_written(node) and all(operand in self._known for operand in operands)

    def _found(self, node: fx.Node) -> Known | None:
        name = str(node.args[1]) if node.target is getattr else target_name(node)  # `x.mT` is a call of getattr
        operands = [self._known[operand] for operand in node.all_input_nodes if operand in self._known]
        if name == "arange" or name in _FILLED or name in _FILLS:
            return _made(node, name)
        if name in _POINTWISE:
            return self._pointwise(node, name)
        if not operands:
            return None
        if name in ("tril", "triu"):
            return _triangle(node, name, operands[0])
        if name in _COPIES:
            return Known(operands[0].dims, operands[0].values.to(node.meta["spec"].dtype))
        return _view(node, operands[0]) if name in _VIEWS else None

    def _pointwise(self, node: fx.Node, name: str) -> Known | None:
        operands = {operand: self._known[operand] for operand in node.all_input_nodes}
        dims, spec = tuple(sorted({dim for known in operands.values() for dim in known.dims})), node.meta["spec"]
        if len(dims) > 2 or any(len(known.dims) == 2 and known.dims != dims for known in operands.values()):
            return None
        if any(len(known.dims) == 1 < len(dims) for known in operands.values()):
            # Of numbers of two positions: a result must depend on the positions' difference alone.
            dtypes = [operand.meta["spec"].dtype for operand in operands]
            slopes = [_slope(known, torch.promote_types(dtypes[0], dtypes[-1])) for known in operands.values()]
            if len(slopes) != 2 or node.kwargs or None in slopes:
                return None
            one, other = slopes
            if not (one == other if name in _OF_DIFFERENCES else name in ("add", "radd") and slopes == [one, -one]):  # pyright: ignore
                return None

        def sample(operand: fx.Node) -> torch.Tensor:
            values = operands[operand].along(dims, spec.shape)
            # Torch treats the dtype of a tensor without dimensions as that of a number.
            return values if operand.meta["spec"].shape else values[0]

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), sample)  # pyright: ignore
        result = called(node.target, args, kwargs)  # pyright: ignore
        if not isinstance(result, torch.Tensor):
            return None
        return Known.of(dims, result if dims else result.reshape(-1), spec)


def _slope(known: Known, dtype: torch.dtype) -> int | None:
    """What whole numbers grow by along one dimension; None if they don't all, or a dtype may not hold their sums."""
    values = known.values
    if len(known.dims) != 1 or not {dtype, values.dtype} <= _EXACT.keys() or not (values == values.floor()).all():
        return None
    steps = values[1:] - values[:-1]
    is_exact = bool((values.abs() <= min(_EXACT[dtype], _EXACT[values.dtype])).all())
    return int(steps[0]) if is_exact and bool((steps == steps[0]).all()) else None


def _made(node: fx.Node, name: str) -> Known | None:
    spec, given = node.meta["spec"], dict(node.kwargs)
    if name == "arange":
        ends = {key: given[key] for key in ("start", "end", "step") if key in given}
        if not all(type(number) is int for number in (*node.args, *ends.values())):
            return None
        return Known.of((-1,), torch.arange(*node.args, **ends, dtype=spec.dtype), spec)  # pyright: ignore
    value: Any = _FILLED.get(name)
    if name in _FILLS:
        place = _FILLS[name]
        value = node.args[place] if len(node.args) > place else given.get("fill_value")
    return Known((), torch.full((1,), value, dtype=spec.dtype)) if isinstance(value, bool | int | float) else None


def _triangle(node: fx.Node, name: str, known: Known) -> Known | None:
    given, spec = [*node.args[1:], *node.kwargs.values()] or [0], node.meta["spec"]
    if known.dims not in ((), (-2, -1)) or len(given) > 1 or type(given[0]) is not int:
        return None
    differences = torch.arange(1 - spec.shape[-2], spec.shape[-1])
    is_kept = differences <= given[0] if name == "tril" else differences >= given[0]
    return Known.of((-2, -1), torch.where(is_kept, known.values, torch.zeros((), dtype=spec.dtype)), spec)


def _view(node: fx.Node, known: Known) -> Known | None:
    base, spec = node.args[0], node.meta["spec"]
    if not isinstance(base, fx.Node) or not known.dims:
        return known if isinstance(base, fx.Node) else None
    shape, source = base.meta["spec"].shape, _source(node, base)
    places = [] if source is None else [source[1].get(dim) for dim in known.dims]
    if source is None or (len(places) > 1 and any(place is None or place[1] != 1 for place in places)):
        return None
    starts = [source[0][dim] for dim in known.dims]
    if len(places) == 1:
        values, (place, step) = known.values[starts[0] :], places[0] or (None, 1)
        return Known((), values[:1]) if place is None else Known.of((place,), values[::step][: spec.shape[place]], spec)
    (down, _), (right, _) = filter(None, places)
    begin = shape[known.dims[0]] - spec.shape[down] + starts[1] - starts[0]
    values = known.values[begin : begin + spec.shape[down] + spec.shape[right] - 1]
    return Known.of((down, right), values, spec) if down < right else Known.of((right, down), values.flip(0), spec)


def _source(node: fx.Node, base: fx.Node) -> tuple[dict[int, int], dict[int, tuple[int, int]]] | None:
    """Which elements of its operand a view has."""
    tensor = marked(base.meta["spec"].shape)

    def stand_in(operand: fx.Node) -> torch.Tensor:
        return tensor if operand is base else torch.empty(tuple(operand.meta["spec"].shape), device="meta")

    try:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), stand_in)  # pyright: ignore
        return followed(called(node.target, args, kwargs), tensor)  # pyright: ignore
    except Exception:  # an index that isn't known, or a view that these strides don't allow: nothing is claimed
        return None
