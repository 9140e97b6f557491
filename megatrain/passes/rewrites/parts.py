"""Calls that compute part by part: chunks of rows, tiles of tokens, some queries at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatrain.base.torch_private import FakeTensor
from megatrain.device import find
from megatrain.passes.interpret import ExactFakes
from megatrain.tracer.spec import TensorSpec


class GradientSum:
    """A sum of gradients in fp32 or wider, rounded once to the dtype of the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._is_empty = True
        self._total = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))

    def add(self, part: torch.Tensor, place: Range | None = None) -> None:
        """Adds a gradient of the tensor, or of a range of it."""
        self._is_empty = False
        (self._total if place is None else self._total.narrow(*place)).add_(part)

    def add_rows(self, gradients: torch.Tensor) -> None:
        """Adds the sum of all rows of a matrix, as for a bias."""
        self._is_empty = False
        self._total.add_(gradients.sum(0, dtype=self._total.dtype))

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds a product of two matrices, which isn't rounded before."""
        self._is_empty = False
        find(left.device).add_product(self._total, left, right)

    def rounded(self) -> torch.Tensor | None:
        """The sum, in the dtype of the tensor; None if nothing was added."""
        return None if self._is_empty else self._total.to(self._dtype)


class Range(NamedTuple):
    """A range of a tensor, as `narrow` takes it."""

    dim: int
    start: int
    length: int


class Piece(NamedTuple):
    """A part of a call.

    Attributes:
        operands: Where the part's operands are in those of the call; None for what it reads whole.
        results: Likewise its results.
    """

    operands: Sequence[Range | None]
    results: Sequence[Range]
    given: Any = None


class InParts(ABC):
    """The target of a call whose parts compute ranges of its results from ranges of its operands.

    The forward keeps its operands alone. The backward computes each part once more, under autograd, and differentiates
    it. So what is made on the way never exists whole.
    """

    specs: tuple[TensorSpec, ...]
    """Of the results."""

    @property
    def sample(self) -> Piece | None:
        """If the results have no values, because only their gradients are asked for: tells which of them have one."""
        return None

    @abstractmethod
    def parts(self, operands: Sequence[torch.Tensor]) -> Iterator[Piece]:
        """Yields the parts, each when all before it are done; their results make up those of the call."""

    @abstractmethod
    def is_shared(self, index: int) -> bool:
        """Tells whether several parts read the same of an operand, so that its gradient is a sum."""

    @abstractmethod
    def compute(self, part: Piece, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the results of a part."""

    def recompute(
        self, part: Piece, operands: Sequence[torch.Tensor], sums: Sequence[GradientSum | None]
    ) -> Sequence[torch.Tensor]:
        """Does the same to differentiate; gradients that go into `sums` needn't flow to operands."""
        del sums
        return self.compute(part, operands)

    def __call__(self, *operands: torch.Tensor) -> Any:
        """Computes the results; one alone, or a tuple."""
        results = _Parts.apply(self, *operands)
        return results[0] if len(self.specs) == 1 else results  # pyright: ignore[reportOptionalSubscript]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: InParts, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.target = target
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        needs = ctx.needs_input_grad[1:]
        results: list[torch.Tensor] = []
        constant: list[torch.Tensor] = []
        for part in target.parts(operands) if target.sample is None else (target.sample,):
            # Kernels look at whether a tensor requires a gradient, so each must, as in the whole.
            with torch.set_grad_enabled(any(needs)), saved_tensors_hooks(lambda _: None, _refuse):
                made = target.compute(part, _leaves(part, operands, needs))
            if not results:
                results = [_whole(target, *pair) for pair in zip(target.specs, made, strict=True)]
                constant = [whole for whole, own in zip(results, made, strict=True) if not own.requires_grad]
            if target.sample is not None:
                break
            for whole, place, own in zip(results, part.results, made, strict=True):
                _copy(whole.narrow(*place), own.detach())
            del made  # before the next part's
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        target, operands, needs = ctx.target, ctx.saved_tensors, ctx.needs_input_grad[1:]
        sums = [
            GradientSum(operand) if need and target.is_shared(index) else None
            for index, (operand, need) in enumerate(zip(operands, needs, strict=True))
        ]
        wholes: dict[int, torch.Tensor] = {}
        for part in target.parts(operands):
            _differentiate(target, part, operands, needs, gradients, sums, wholes)
        return None, *(wholes.get(i) if total is None else total.rounded() for i, total in enumerate(sums))


def _differentiate(
    target: InParts,
    part: Piece,
    operands: Sequence[torch.Tensor],
    needs: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
    sums: Sequence[GradientSum | None],
    wholes: dict[int, torch.Tensor],
) -> None:
    """Puts the gradients of a part's operands into sums, or where they belong in those of the whole operands.

    All that it makes is gone before the next part's.
    """
    leaves = _leaves(part, operands, needs)
    with torch.enable_grad():
        made = target.recompute(part, leaves, sums)
    pairs = [
        (own, whole.narrow(*place))
        for own, place, whole in zip(made, part.results, gradients, strict=True)
        if whole is not None and own.requires_grad
    ]
    del made
    wanted = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    if not pairs or not wanted:
        return
    roots, seeds = map(list, zip(*pairs, strict=True))
    found: Any = torch.autograd.grad(roots, [leaves[i] for i in wanted], seeds, allow_unused=True)
    del roots, pairs
    for index, gradient in zip(wanted, found, strict=True):
        total, place = sums[index], part.operands[index]
        if gradient is None:
            continue
        if total is not None:
            total.add(gradient, place)
            continue
        assert place is not None, "what all parts share is summed"
        if index not in wholes:
            wholes[index] = torch.empty_like(operands[index])
        wholes[index].narrow(*place).copy_(gradient)


def _leaves(part: Piece, operands: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[torch.Tensor]:
    """The operands of a part."""
    return [
        (t if place is None else t.narrow(*place)).detach().requires_grad_(need)
        for t, place, need in zip(operands, part.operands, needs, strict=True)
    ]


def _whole(target: InParts, spec: TensorSpec, part: torch.Tensor) -> torch.Tensor:
    """Memory for a result, or a result without memory."""
    return part.new_empty(()).expand(spec.shape) if target.sample is not None else spec.empty(part.device)


def _copy(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a tensor; what repeats along a dimension that was expanded is there once."""
    for dim, stride in enumerate(place.stride()):
        if stride == 0:
            place, values = place.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    place.copy_(values)


def _refuse(_: Any) -> torch.Tensor:
    raise AssertionError("the forward of a part was differentiated")


_Each = TypeVar("_Each")


def computed_parts(
    operands: Sequence[torch.Tensor], parts: Sequence[_Each], known_by: Callable[[_Each], Hashable]
) -> Iterator[tuple[bool, _Each]]:
    """Yields for each part whether it is computed, and the part: all of them, unless the operands have no values.

    Parts that follow each other are alike if they run the same code on tensors of the same layouts: without values
    nothing else can make a difference. A measurement computes the first of them, because results and sums are made with
    it, and the last, because all earlier results are there by then. Its kernels count for those in between.

    Args:
        parts: To be asked for the next when one is done.
        known_by: Equal for parts that are alike.
    """
    fakes = next((operand.fake_mode for operand in operands if isinstance(operand, FakeTensor)), None)
    if not isinstance(fakes, ExactFakes):
        yield from ((True, part) for part in parts)
        return
    for _, alike in groupby(parts, known_by):
        first, *others = alike
        yield True, first
        yield from ((False, part) for part in others[:-1])
        if others:
            with fakes.repeated(len(others)):
                yield True, others[-1]
