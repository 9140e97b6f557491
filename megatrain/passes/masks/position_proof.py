"""PositionProof: proves of tensors of a graph that they are functions of positions alone, and of which."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from megatrain.passes.masks.diagonals import Diagonals, Line, compared, joint_cuts
from megatrain.passes.masks.moved_axes import Moved, moved
from megatrain.passes.rewriting.call_trial import called
from megatrain.tracer.calls import target_name
from megatrain.tracer.node_meta import CALLS
from megatrain.tracer.spec import TensorSpec

Known = Line | Diagonals

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
# Calls that compute each element from the elements at its place.
_POINTWISE = frozenset(
    "and or xor invert logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "add sub rsub mul rmul neg radd where masked_fill minimum maximum lt le gt ge eq ne".split()
)
_VIEWS = frozenset(
    "getitem unsqueeze squeeze expand expand_as broadcast_to transpose swapaxes swapdims permute movedim t T mT view "
    "reshape view_as narrow select alias detach".split()
)
# Calls that give the same numbers back, in another dtype or memory.
_COPIES = frozenset("to bool int long float double half bfloat16 type type_as clone contiguous".split())
_FILLED = {"ones": 1, "new_ones": 1, "ones_like": 1, "zeros": 0, "new_zeros": 0, "zeros_like": 0}
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "tensor": 0, "scalar_tensor": 0}
_MOST_PIECES = 64


class PositionProof:
    """What is known of the tensors of a graph that are functions of positions: of their own indices.

    The calls that make a mask of causality, a window, or the like, are interpreted once: `arange`, views, sums and
    comparisons of positions, `tril` and `triu`, logical functions, `where`, `masked_fill`, casts. Calls that treat each
    element alone are made for real, on one element for each piece, so that their meaning is torch's own. Whatever
    depends on inputs, weights or random numbers, and all memory that is written into, is unknown.

    Args:
        graph: Of a capture.
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

    def bands(self, node: fx.Node) -> Diagonals | None:
        """The elements of a tensor as a function of two positions' difference; None if they aren't known to be one."""
        found = self._known.get(node)
        return found if isinstance(found, Diagonals) else None

    def is_written(self, node: fx.Node) -> bool:
        """Tells whether something writes into a tensor's memory."""
        return node.meta["storage"] in self._written

    def _is_followed(self, node: fx.Node) -> bool:
        meta = node.meta
        if node.op not in CALLS or "spec" not in meta or meta["requires_grad"] or meta.get("is_random"):
            return False
        return meta["storage"] not in self._written and all(a in self._known for a in self._read(node))

    def _read(self, node: fx.Node) -> Sequence[fx.Node]:
        """The operands whose values count: of some calls only the shape or dtype does."""
        name = target_name(node)
        if name.endswith("_like") or name.startswith("new_"):
            return ()
        only_first = name in ("expand_as", "view_as", "type_as") and node.args
        return node.all_input_nodes[:1] if only_first else node.all_input_nodes

    def _found(self, node: fx.Node) -> Known | None:
        name = _name(node)
        operands = [self._known[operand] for operand in node.all_input_nodes if operand in self._known]
        if name == "arange":
            found = _arange(node)
        elif name in _FILLED or name in _FILLS:
            found = _constant(node, name)
        elif name in ("tril", "triu"):
            found = self._triangle(node, name)
        elif name in _VIEWS:
            found = self._view(node, operands)
        elif name in _COPIES and operands:
            found = self._copy(node, operands[0])
        elif name in _POINTWISE:
            are_bands = all(isinstance(operand, Diagonals) for operand in operands)
            found = self._pointwise(node) if are_bands else self._of_lines(node, name)
        else:
            found = None
        return found

    # -- calls on each element alone ----------------------------------------------------------------------

    def _pointwise(self, node: fx.Node) -> Diagonals | None:
        """Makes a call on one element for each piece."""
        operands: list[Any] = [self._known[operand] for operand in node.all_input_nodes]
        cuts = joint_cuts(operands)
        if cuts is None or len(cuts[1]) > _MOST_PIECES:
            return None
        pair, runs = cuts

        def sample(operand: fx.Node) -> torch.Tensor:
            bands, spec = self._known[operand], operand.meta["spec"]
            assert isinstance(bands, Diagonals)
            values = [bands.at(first) for first, _ in runs]
            # Torch treats the dtype of a tensor without dimensions as that of a number.
            return torch.tensor(values if spec.shape else values[0], dtype=spec.dtype)

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), sample)  # pyright: ignore
        return _valued(node, pair, runs, called(node.target, args, kwargs))  # pyright: ignore

    def _copy(self, node: fx.Node, known: Known) -> Known | None:
        spec = node.meta["spec"]
        if isinstance(known, Line):
            return known.within(spec.shape, spec.dtype)
        values = torch.tensor([value for _, _, value in known.pieces], dtype=node.all_input_nodes[0].meta["spec"].dtype)
        return _valued(node, known.pair, [piece[:2] for piece in known.pieces], values.to(spec.dtype))

    def _triangle(self, node: fx.Node, name: str) -> Diagonals | None:
        bands, spec = self.bands(node.all_input_nodes[0]), node.meta["spec"]
        given: list[Any] = [*node.args[1:], *node.kwargs.values()] or [0]
        if bands is None or bands.pair not in (None, (-2, -1)) or len(given) > 1 or type(given[0]) is not int:
            return None
        diagonal, far = given[0], max(spec.shape[-2:])
        zero = torch.zeros((), dtype=spec.dtype).item()
        pieces = bands.pieces if bands.pair else ((-far, far, bands.value),)
        if name == "tril":
            kept = [(first, min(last, diagonal), value) for first, last, value in pieces]
            return Diagonals.of((-2, -1), [*kept, (diagonal + 1, far, zero)], spec.shape)
        kept = [(max(first, diagonal), last, value) for first, last, value in pieces]
        return Diagonals.of((-2, -1), [(-far, diagonal - 1, zero), *kept], spec.shape)

    # -- numbers of positions -----------------------------------------------------------------------------

    def _of_lines(self, node: fx.Node, name: str) -> Known | None:
        """Sums, multiples and comparisons of numbers of positions."""
        if len(node.args) != (1 if name == "neg" else 2) or node.kwargs:
            return None
        lines = [_line(self._known.get(a, a) if isinstance(a, fx.Node) else a) for a in node.args]  # pyright: ignore
        spec = node.meta["spec"]
        if None in lines:
            return None
        one: Any = lines[0]
        if name == "neg":
            return one.times(-1).within(spec.shape, spec.dtype)
        other: Any = lines[1]
        if name in _COMPARISONS:
            return self._comparison(node, name, one, other)
        made = None
        if name in ("mul", "rmul") and (not one.slopes or not other.slopes):
            made = one.times(other.offset) if not other.slopes else other.times(one.offset)
        elif name in ("add", "radd"):
            made = one.plus(other)
        elif name in ("sub", "rsub"):
            made = one.plus(other, -1) if name == "sub" else other.plus(one, -1)
        return None if made is None else made.within(spec.shape, spec.dtype)

    def _comparison(self, node: fx.Node, name: str, one: Line, other: Line) -> Diagonals | None:
        shape = node.meta["spec"].shape
        samples = [
            torch.zeros((0,) if a.meta["spec"].shape else (), dtype=a.meta["spec"].dtype)
            if isinstance(a, fx.Node)
            else a
            for a in node.args
        ]
        dtype = torch.result_type(*samples)  # pyright: ignore  # in which torch compares
        if any(line.within(shape, dtype) is None for line in (one, other)):
            return None
        return compared(one.plus(other, -1), _COMPARISONS[name], shape)

    # -- views --------------------------------------------------------------------------------------------

    def _view(self, node: fx.Node, operands: Sequence[Known]) -> Known | None:
        first = node.args[0]
        if not operands or not isinstance(first, fx.Node):
            return None
        known, spec = operands[0], node.meta["spec"]
        if isinstance(known, Diagonals) and known.pair is None:
            return known
        others = {operand: operand.meta["spec"].shape for operand in node.all_input_nodes[1:]}
        view = moved(node, first.meta["spec"].shape, others)
        if view is None:
            return None
        return _moved_line(known, view, spec) if isinstance(known, Line) else _moved_bands(known, view, spec)


def _moved_line(line: Line, view: Moved, spec: TensorSpec) -> Line | None:
    offset = line.offset + sum(slope * view.starts[dim] for dim, slope in line.slopes.items())
    places = {dim: view.places[dim] for dim in line.slopes if dim in view.places}
    slopes = {place: line.slopes[dim] * step for dim, (place, step) in places.items()}
    return Line(offset, slopes).within(spec.shape, spec.dtype)


def _moved_bands(bands: Diagonals, view: Moved, spec: TensorSpec) -> Diagonals | None:
    row, column = bands.pair or (0, 0)
    if not {row, column} <= view.places.keys() or view.places[row][1] != 1 or view.places[column][1] != 1:
        return None
    shift = view.starts[column] - view.starts[row]
    shifted = Diagonals(bands.pair, tuple((first - shift, last - shift, value) for first, last, value in bands.pieces))
    pair = view.places[row][0], view.places[column][0]
    if pair[0] > pair[1]:
        return Diagonals.of((pair[1], pair[0]), shifted.turned(), spec.shape)
    return Diagonals.of(pair, shifted.pieces, spec.shape)


def _name(node: fx.Node) -> str:
    """The name of a call; of a property that is read, such as `x.mT`, its name."""
    if node.target is getattr:
        return str(node.args[1])
    return target_name(node)


def _arange(node: fx.Node) -> Line | None:
    numbers = [a for a in node.args if type(a) is int]
    if len(numbers) != len(node.args) or not 1 <= len(numbers) <= 3 or {"start", "end", "step"} & node.kwargs.keys():
        return None
    start, step = (0, 1) if len(numbers) == 1 else (numbers[0], numbers[2] if len(numbers) == 3 else 1)
    spec = node.meta["spec"]
    return Line(start, {-1: step} if step else {}).within(spec.shape, spec.dtype)


def _constant(node: fx.Node, name: str) -> Diagonals | None:
    value: Any = _FILLED.get(name)
    if name in _FILLS:
        place = _FILLS[name]
        value = node.args[place] if len(node.args) > place else node.kwargs.get("fill_value")
    if not isinstance(value, bool | int | float):
        return None
    return Diagonals.constant(torch.full((), value, dtype=node.meta["spec"].dtype).item())


def _line(value: Any) -> Line | None:
    """A number, or a tensor in which all numbers are equal, as a line."""
    if isinstance(value, Diagonals):
        value = value.value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**24:
        value = int(value)
    if isinstance(value, Line):
        return value
    return Line(value, {}) if type(value) is int else None


def _valued(
    node: fx.Node, pair: tuple[int, int] | None, runs: Sequence[tuple[int, int]], result: Any
) -> Diagonals | None:
    """Diagonals of the results of a call that was made for each piece."""
    spec = node.meta["spec"]
    if not isinstance(result, torch.Tensor) or result.dtype != spec.dtype:
        return None
    values = result.reshape(-1).expand(len(runs)).tolist() if result.numel() == 1 else result.tolist()
    if pair is None:
        return Diagonals.constant(values[0])
    return Diagonals.of(
        pair, [(first, last, value) for (first, last), value in zip(runs, values, strict=True)], spec.shape
    )
