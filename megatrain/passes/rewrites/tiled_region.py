"""TiledRegion: calls that treat each token alone, run tile by tile of tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import getitem, itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.function import once_differentiable

from megatrain.passes.canonicalize import copied_graph
from megatrain.passes.interpret import Code
from megatrain.passes.rewrites.parts import AlikeParts, GradientSum, computed_parts
from megatrain.tracer.calls import target_name
from megatrain.tracer.spec import CALLS, TensorSpec


def linear_into(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    of_weight: GradientSum | None,
    of_bias: GradientSum | None,
    is_unread: bool,
) -> torch.Tensor:
    """Computes `F.linear(x, weight, bias)`, with a gradient for `x` alone.

    Args:
        x: Floating point, of shape [..., inner].
        weight: Of shape [outer, inner].
        bias: Of shape [outer], or None.
        of_weight: Takes the gradient of the weight; None if nobody needs it.
        of_bias: Likewise that of the bias.
        is_unread: Nobody reads the values of the result, so that they aren't computed.
    """
    return _LinearInto.apply(x, weight, bias, (of_weight, of_bias), is_unread)  # pyright: ignore[reportReturnType]


class _LinearInto(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: tuple[GradientSum | None, GradientSum | None],
        is_unread: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
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
        return of_x, None, None, None, None


# Kernels of the CPU compute whole vectors of elements by one formula, and what is left over by another: tiles that
# begin at multiples of so many tokens begin and end with whole vectors.
_UNIT = 64


@dataclass(frozen=True, repr=False)
class TiledRegion:
    """The target of a call: a part of a graph in which each token is computed alone (token tiling, tiled MLP).

    The forward runs the graph on some tokens at a time, and keeps its operands alone. The backward runs it once more on
    each tile, under autograd, and differentiates this tile. What only the region's own calls read never exists whole.

    Args:
        graph: Straight-line; its placeholders are the operands.
        key: Equal for graphs that compute the same.
        axes: Of each operand the dimension along which tokens lie; None for what all tokens share.
        out_axes: Likewise of each result.
        specs: Of the results.
        unread: Numbers of the nodes of linear layers whose values no backward reads: they aren't computed there.
        rows: Tokens of a tile, at most.
        is_hollow: The results have no values: only their gradients are asked for.
        alike: Says which tiles a measurement computes.
    """

    graph: fx.Graph = field(compare=False)
    key: Any
    axes: tuple[int | None, ...]
    out_axes: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    unread: tuple[int, ...]
    rows: int
    is_hollow: bool = False
    alike: AlikeParts | None = field(default=None, compare=False)

    __name__ = "tiled"

    def __call__(self, *operands: torch.Tensor) -> Any:
        """Computes the results; one alone, or a tuple."""
        results = _Tiles.apply(self, *operands)
        return results[0] if len(self.specs) == 1 else results  # pyright: ignore[reportOptionalSubscript]

    def with_alike_parts(self, alike: AlikeParts) -> TiledRegion:
        """See `InParts`."""
        return replace(self, alike=alike)

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
    def graph_code(self) -> Code:
        """Like `code`, where linear layers leave the gradients of their weights in `GradientSum`s.

        Its arguments are the operands, and then a sum, or None, for each of `summed`.
        """
        unread = {node for index, node in enumerate(self.graph.nodes) if index in self.unread}
        graph, copies = copied_graph(self.graph)
        operands = _placeholders(graph)
        sums: dict[fx.Node, fx.Node] = {}
        with graph.inserting_after(operands[-1]):
            for index in reversed(self.summed):
                sums[operands[index]] = graph.placeholder(f"sum_of_{operands[index].name}")
        for original, node in copies.items():
            if _is_linear(node):
                x, weight, bias = (*node.args, None)[:3]
                node.target = linear_into
                node.args = (x, weight, bias, sums[weight], sums.get(bias), original in unread)  # pyright: ignore
        return Code(graph)

    def tiles(self, operands: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
        """Start and length of the tiles that are computed, which are about equally long."""
        tokens = next(t.shape[axis] for t, axis in zip(operands, self.axes, strict=True) if axis is not None)
        unit = min(_UNIT, self.rows)
        number = max(1, min(-(-tokens // self.rows), tokens // unit))
        few, more = divmod(tokens // unit, number)
        start, tiles = 0, list[tuple[int, int]]()
        for index in range(number):
            length = (few + (index < more)) * unit if index < number - 1 else tokens - start
            tiles.append((start, length))
            start += length
        # Tiles of one length are cut alike from the same operands.
        return (tile for is_computed, tile in computed_parts(self.alike, tiles, itemgetter(1)) if is_computed)

    def cut(self, operands: Sequence[torch.Tensor], start: int, length: int) -> list[torch.Tensor]:
        """The operands of a tile."""
        return [
            t if axis is None else t.narrow(axis, start, length) for t, axis in zip(operands, self.axes, strict=True)
        ]


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


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: TiledRegion, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        needs = ctx.needs_input_grad[1:]
        if region.is_hollow:
            return _hollow(ctx, region, operands)
        results: list[torch.Tensor] = []
        constant: list[torch.Tensor] = []
        for start, length in region.tiles(operands):
            # Kernels look at whether a tensor requires a gradient, so each must, as in the whole.
            with torch.set_grad_enabled(any(needs)), _forgetting():
                made = region.code(_leaves(region.cut(operands, start, length), needs), is_checked=False)
            if not results:
                results = [_empty(spec, tile) for spec, tile in zip(region.specs, made, strict=True)]
                constant = [whole for whole, tile in zip(results, made, strict=True) if not tile.requires_grad]
            for whole, axis, tile in zip(results, region.out_axes, made, strict=True):
                _copy(whole.narrow(axis, start, length), tile.detach())
            del made  # before the next tile's
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        region: TiledRegion = ctx.region
        return None, *_Backward(region, ctx.saved_tensors, ctx.needs_input_grad[1:]).run(gradients)


def _hollow(ctx: Any, region: TiledRegion, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results without memory; a few tokens tell which of them have a gradient."""
    with torch.enable_grad(), _forgetting():
        made = region.code(_leaves(region.cut(operands, 0, 2), ctx.needs_input_grad[1:]), is_checked=False)
    results = [tile.new_empty(()).expand(spec.shape) for spec, tile in zip(region.specs, made, strict=True)]
    ctx.mark_non_differentiable(*(whole for whole, tile in zip(results, made, strict=True) if not tile.requires_grad))
    return tuple(results)


class _Backward:
    """The backward of a region.

    Args:
        region: The region.
        operands: Its operands.
        needs: Whether each needs a gradient.
    """

    def __init__(self, region: TiledRegion, operands: Sequence[torch.Tensor], needs: Sequence[bool]):
        self._region, self._operands, self._needs = region, operands, needs
        shared = [axis is None and need for axis, need in zip(region.axes, needs, strict=True)]
        self._sums = [GradientSum(t) if each else None for t, each in zip(operands, shared, strict=True)]
        self._whole: list[torch.Tensor | None] = [None for _ in operands]

    def run(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the gradients of the operands, for those of the results."""
        for start, length in self._region.tiles(self._operands):
            self._tile(gradients, start, length)
        return [
            whole if total is None else total.rounded() for whole, total in zip(self._whole, self._sums, strict=True)
        ]

    def _tile(self, gradients: Sequence[torch.Tensor | None], start: int, length: int) -> None:
        region = self._region
        leaves = _leaves(region.cut(self._operands, start, length), self._needs)
        with torch.enable_grad():
            made = region.graph_code([*leaves, *(self._sums[i] for i in region.summed)], is_checked=False)  # pyright: ignore
        pairs = [
            (tile, whole.narrow(axis, start, length))
            for tile, axis, whole in zip(made, region.out_axes, gradients, strict=True)
            if whole is not None and tile.requires_grad
        ]
        del made
        wanted = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
        if not pairs or not wanted:
            return
        roots, seeds = map(list, zip(*pairs, strict=True))
        found = torch.autograd.grad(roots, [leaves[i] for i in wanted], seeds, allow_unused=True)
        del roots, pairs
        for index, gradient in zip(wanted, found, strict=True):
            self._land(index, gradient, start, length)

    def _land(self, index: int, gradient: torch.Tensor | None, start: int, length: int) -> None:
        axis, total = self._region.axes[index], self._sums[index]
        if gradient is None:
            return
        if total is not None:
            total.add(gradient)
            return
        assert axis is not None, "what all tokens share is summed"
        whole = self._whole[index]
        if whole is None:
            whole = self._whole[index] = torch.empty_like(self._operands[index])
        whole.narrow(axis, start, length).copy_(gradient)


def _copy(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a tensor; what repeats along a dimension that was expanded lies there once."""
    for dim, stride in enumerate(place.stride()):
        if stride == 0:
            place, values = place.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    place.copy_(values)


def _leaves(operands: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[torch.Tensor]:
    return [t.detach().requires_grad_(need) for t, need in zip(operands, needs, strict=True)]


def _forgetting() -> Any:
    """Throws away what autograd would save."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse)


def _refuse(_: Any) -> torch.Tensor:
    raise AssertionError("the forward of a tile was differentiated")


def _empty(spec: TensorSpec, like: torch.Tensor) -> torch.Tensor:
    return spec.empty(like.device)


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
