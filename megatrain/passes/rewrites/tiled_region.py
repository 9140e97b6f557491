"""TiledRegion: calls that treat each token alone, run tile by tile of tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import getitem, itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.function import once_differentiable

from megatrain.passes.canonicalize import copied_graph
from megatrain.passes.interpret import Code
from megatrain.passes.rewrites.parts import GradientSum, InParts, Piece, Range, computed_parts
from megatrain.tracer.calls import target_name
from megatrain.tracer.spec import CALLS, TensorSpec


class _LinearInto(torch.autograd.Function):
    """Computes `F.linear(x, weight, bias)`; gradients of weight and bias go into sums, if these aren't None.

    Where the values of the result are unread they aren't computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        of_weight: GradientSum | None,
        of_bias: GradientSum | None,
        is_unread: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = of_weight, of_bias
        return x.new_empty((*x.shape[:-1], weight.shape[0])) if is_unread else F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.sums
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if of_weight is not None:
            of_weight.add_product(rows.t(), x.reshape(-1, x.shape[-1]))
        if of_bias is not None:
            of_bias.add_rows(rows)
        return of_x, None, None, None, None, None


# Kernels of the CPU compute whole vectors of elements by one formula, and what is left over by another: tiles that
# begin at multiples of so many tokens begin and end with whole vectors.
_UNIT = 64


@dataclass(frozen=True, repr=False)
class TiledRegion(InParts):
    """The target of a call: a part of a graph in which each token is computed alone (token tiling, tiled MLP).

    The forward runs the graph on some tokens at a time, and keeps its operands alone. The backward runs it once more on
    each tile, under autograd, and differentiates this tile. What only the region's own calls read never exists whole.

    Args:
        graph: Straight-line; its placeholders are the operands.
        key: Equal for graphs that compute the same.
        axes: Of each operand the dimension along which tokens lie; None for what all tokens share.
        out_axes: Likewise of each result.
        rows: Tokens of a tile, at most.
        is_hollow: The results have no values: only their gradients are asked for.
    """

    graph: fx.Graph = field(compare=False)
    key: Any
    axes: tuple[int | None, ...]
    out_axes: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    rows: int
    is_hollow: bool = False

    __name__ = "tiled"

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        calls = ", ".join(target_name(node) for node in self.graph.nodes if node.op in CALLS)
        return f"tiled({arguments}: {calls}; {self.rows} tokens at a time)"

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole."""
        return self.specs[0].shape[self.out_axes[0]]

    @property
    def num_calls(self) -> int:
        """Calls in a tile."""
        return sum(node.op in CALLS for node in self.graph.nodes)

    @property
    def inner_bytes(self) -> int:
        """Bytes that the calls would make for one another, for all tokens."""
        outer = [n for n in self.graph.nodes if n.op == "placeholder"] + [*self.graph.output_node().all_input_nodes]
        known = {node.meta["storage"] for node in outer}
        made = {n.meta["storage"]: n.meta["storage_bytes"] for n in self.graph.nodes if "storage_bytes" in n.meta}
        return sum(size for storage, size in made.items() if storage not in known)

    @cached_property
    def code(self) -> Code:
        """Runs the region on the operands of a tile."""
        return Code(self.graph)

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The operands that are weights or biases of linear layers: their gradients are added up in fp32."""
        places = {node: index for index, node in enumerate(_placeholders(self.graph))}
        found = {
            places[operand] for node in self.graph.nodes if _is_linear(node) for operand in node.args[1:] if operand
        }
        return tuple(sorted(found))

    @cached_property
    def unread(self) -> frozenset[fx.Node]:
        """The linear layers whose values no backward reads: there they aren't computed."""
        return frozenset(node for node in self.graph.nodes if _is_linear(node) and not _is_read(node))

    @cached_property
    def graph_code(self) -> Code:
        """Like `code`, where linear layers leave the gradients of their weights in `GradientSum`s.

        Its arguments are the operands, and then a sum, or None, for each of `summed`.
        """
        graph, copies = copied_graph(self.graph)
        operands = _placeholders(graph)
        sums: dict[fx.Node, fx.Node] = {}
        with graph.inserting_after(operands[-1]):
            for index in reversed(self.summed):
                sums[operands[index]] = graph.placeholder(f"sum_of_{operands[index].name}")
        for original, node in copies.items():
            if _is_linear(node):
                x, weight, bias = (*node.args, None)[:3]
                node.target = _LinearInto.apply
                node.args = (x, weight, bias, sums[weight], sums.get(bias), original in self.unread)  # pyright: ignore
        return Code(graph)

    def parts(self, operands: Sequence[torch.Tensor]) -> Iterator[Piece]:
        """Yields the tiles, which are about equally long."""
        tokens = self.num_tokens
        unit = min(_UNIT, self.rows)
        number = max(1, min(-(-tokens // self.rows), tokens // unit))
        few, more = divmod(tokens // unit, number)
        lengths = [(few + (index < more)) * unit for index in range(number - 1)]
        lengths.append(tokens - sum(lengths))
        tiles = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
        # Tiles of one length are cut alike from the same operands.
        return (
            self._tile(*tile) for is_computed, tile in computed_parts(operands, tiles, itemgetter(1)) if is_computed
        )

    @property
    def sample(self) -> Piece | None:
        """A few tokens, where the results have no values."""
        return self._tile(0, 2) if self.is_hollow else None

    def _tile(self, start: int, length: int) -> Piece:
        places = [None if axis is None else Range(axis, start, length) for axis in (*self.axes, *self.out_axes)]
        return Piece(places[: len(self.axes)], places[len(self.axes) :])  # pyright: ignore  # each result has tokens

    def is_shared(self, index: int) -> bool:
        """What all tokens share is."""
        return self.axes[index] is None

    def compute(self, part: Piece, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the graph on a tile."""
        return self.code(operands, is_checked=False)

    def recompute(
        self, part: Piece, operands: Sequence[torch.Tensor], sums: Sequence[GradientSum | None]
    ) -> Sequence[torch.Tensor]:
        """Runs it with linear layers that leave the gradients of their weights in `sums`."""
        return self.graph_code([*operands, *(sums[index] for index in self.summed)], is_checked=False)  # pyright: ignore


def without_results(graph: fx.Graph) -> fx.Graph:
    """Lets regions whose results leave the graph, and are read by nothing in it, leave out their values.

    A forward that is repeated for its backward needs the history of its results alone: so each region is computed twice
    in a training step, not three times. Returns the graph itself if nothing changes.
    """
    output = graph.output_node()
    found = {n for n in graph.nodes if isinstance(n.target, TiledRegion) and _only_leaves(n, output)}
    if not found:
        return graph
    changed, copies = copied_graph(graph)
    for node in found:
        target: Any = node.target
        copies[node].target = replace(target, is_hollow=True)
    return changed


def _only_leaves(node: fx.Node, output: fx.Node) -> bool:
    return all(user is output or (user.target is getitem and set(user.users) == {output}) for user in node.users)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _is_linear(node: fx.Node) -> bool:
    """Tells whether a node is a linear layer over weights that all tokens share."""
    if node.target is not F.linear or node.kwargs or node.meta["autocast"] or not node.meta["grad"]:
        return False
    _, weight, *bias = node.args
    shared: Any = [weight, *(each for each in bias if each is not None)]
    is_plain = all(isinstance(each, fx.Node) and each.op == "placeholder" and each.meta["is_shared"] for each in shared)
    return is_plain and len(weight.meta["spec"].shape) == 2  # pyright: ignore


# Calls whose backward reads the values of no operand.
_MOVES = frozenset(
    "add radd sub rsub neg view reshape flatten unflatten squeeze unsqueeze expand transpose permute movedim swapaxes "
    "contiguous clone to float half bfloat16 double type_as getitem split chunk unbind select narrow cat stack".split()
)
_SCALES = frozenset("mul rmul div truediv".split())


def _is_read(node: fx.Node) -> bool:
    """Tells whether a backward may read the values of a call's result: not if they are only moved, added or scaled."""
    return any(user.op != "output" and (not _moves(user, node) or _is_read(user)) for user in node.users)


def _moves(node: fx.Node, operand: fx.Node) -> bool:
    name = target_name(node)
    if name not in _SCALES:
        return name in _MOVES
    # A product keeps a factor for the gradient of the other one, a quotient the dividend for that of the divisor.
    factors = [each for each in node.args if each is not operand]
    is_first = node.args[0] is operand or name in ("mul", "rmul")
    return len(factors) == 1 and is_first and not (isinstance(factors[0], fx.Node) and factors[0].meta["requires_grad"])
