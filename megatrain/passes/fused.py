"""Fused kernels: what chains of element-wise calls read and write where a compiler makes one kernel of each chain.

The chains are found by what calls read and make, not by their names. A call joins the kernel of what it reads if it
computes element by element, or sums along the last dimensions, and if no other kernel must run between the two. A fused
kernel reads once what others have made, and writes once what others read, or what is left. What it makes for itself
stays in registers. Sums along the first dimensions (of a norm's weight) have kernels of their own. No compiled
kernels were compared with these counts.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain.hardware.work import MEMORY, Kernels, Works, put_together
from megatrain.passes.interpret import Code
from megatrain.passes.kernels import KernelWork, repeats, tensor_bytes

# Element by element as well, though torch doesn't say so.
_ELEMENTS = {"aten::_to_copy", "aten::cat"}
# Likewise; they don't read their first argument.
_FILLS = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::zeros_like"}
_SUMS = {"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var", "aten::var_mean"}
# One kernel of eager's is several calls to a compiler, row by row.
_OF_ROWS = {
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::_fused_rms_norm",
    "aten::_fused_rms_norm_backward", "aten::_softmax", "aten::_softmax_backward_data",
}  # fmt: skip


_Views = dict[Any, int]


@dataclass(slots=True, eq=False)
class _Chain:
    """One kernel of several calls.

    Args:
        depth: How many kernels of other kinds must run before it, one after the other.
        repeats: How many such kernels it stands for.
        reads: What others have made, by storage: the bytes of each view of it.
        makes: What the calls make, likewise.
        merged: The chain that has taken it in.
    """

    depth: int
    repeats: int = 1
    reads: dict[int, _Views] = field(default_factory=dict[int, "_Views"])
    makes: dict[int, _Views] = field(default_factory=dict[int, "_Views"])
    merged: _Chain | None = None

    def last(self) -> _Chain:
        """The chain that it is part of by now."""
        found = self
        while found.merged is not None:
            found = found.merged
        return found

    def take_in(self, other: _Chain) -> None:
        """Makes one chain of two."""
        for mine, others in ((self.makes, other.makes), (self.reads, other.reads)):
            for number, views in others.items():
                mine.setdefault(number, {}).update(views)
        other.merged = self


class FusedWork(KernelWork):
    """Notes kernels as a compiler would make them, while the mode is active."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._chains: list[_Chain] = []
        self._makers: dict[int, _Chain] = {}
        self._depths: dict[int, int] = {}
        self._read_by_others: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._alive: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._count = itertools.count()

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        given, made = self._there((args, kwargs)), self._there((result,))
        depth = max((self._depths.get(self._number(tensor), 0) for tensor in given), default=0)
        if _joins(func, given, made):
            is_fill = func._schema.name in _FILLS
            self._join(depth, [t for t in given if not (is_fill and t is args[0])], made)
            return
        super()._note(func, args, kwargs, result)
        self._read_by_others.update(self._number(tensor) for tensor in given)
        for tensor in made:
            self._depths[self._number(tensor)] = depth + 1
            self._makers.pop(self._number(tensor), None)

    def _join(self, depth: int, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        chain = _Chain(depth, max((repeats(tensor) for tensor in (*given, *made)), default=1))
        self._chains.append(chain)
        for tensor in given:
            number = self._number(tensor)
            maker = self._makers.get(number)
            maker = None if maker is None else maker.last()
            if maker is not None and (maker.depth, maker.repeats) == (depth, chain.repeats):
                if maker is not chain:
                    chain.take_in(maker)
                continue
            self._read_by_others.add(number)
            _note_view(chain.reads, number, tensor)
        for tensor in made:
            number = self._number(tensor)
            if number in chain.reads:  # it writes into what others have made
                self._read_by_others.add(number)
            _note_view(chain.makes, number, tensor)
            self._makers[number], self._depths[number] = chain, depth

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which no later one gets."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key not in self._numbers:
            number = self._numbers[key] = next(self._count)
            self._alive.add(number)
            self._sizes[number] = storage.nbytes()
            weakref.finalize(storage, self._gone, key, number)
        return self._numbers[key]

    def _gone(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self._alive.discard(number)

    def _nbytes(self, storages: Mapping[int, _Views]) -> int:
        return sum(min(self._sizes[number], sum(views.values())) for number, views in storages.items())

    def take(self) -> Works:
        """What was noted, put together: what is still there is written."""
        found, needed = list(self._found), self._read_by_others | self._alive
        for chain in self._chains:
            if chain.merged is None:
                written = {number: views for number, views in chain.makes.items() if number in needed}
                nbytes = self._nbytes(chain.reads) + self._nbytes(written)
                found += [Kernels(MEMORY, 0, chain.repeats * nbytes, chain.repeats)] if nbytes else []
        self._found.clear()
        self._chains.clear()
        return put_together(found)


def _note_view(views: dict[int, _Views], number: int, tensor: torch.Tensor) -> None:
    view = tensor.storage_offset(), tensor.shape, tensor.stride()
    views.setdefault(number, {})[view] = tensor_bytes(tensor)


def _joins(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Whether a call may be a part of a fused kernel."""
    name = func._schema.name
    if any(tensor.layout != torch.strided for tensor in (*given, *made)):
        return False
    if name in _SUMS:
        return all(_is_along_rows(tensor, result) for tensor in given for result in made)
    return name in _OF_ROWS | _ELEMENTS | _FILLS or _is_of_elements(func)


@functools.cache
def _is_of_elements(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def _is_along_rows(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether each element of a result is one of a row: the first dimensions stay."""
    left = [size for size in result.shape if size != 1]
    first = [size for size in tensor.shape[: -1 if tensor.dim() else None] if size != 1]
    return bool(left) and left == first[: len(left)] and math.prod(left) < tensor.numel()


def fused_kernels(
    code: Code, leaves: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> tuple[Works, Iterator[Works]]:
    """Runs a template without values; returns the fused kernels of its forward, and those of backwards.

    Args:
        leaves: For each backward the inputs and state, of which those that need a gradient require one.
    """
    with torch.no_grad(), FusedWork(device) as kernels:
        outputs: Any = code(list(leaves[0]))
    forward = kernels.take()
    del outputs
    return forward, (_backward(code, each, device) for each in leaves)


def _backward(code: Code, leaves: Sequence[torch.Tensor], device: torch.device) -> Works:
    with torch.enable_grad():
        outputs = code(list(leaves))
    roots = [o for o in outputs if o.grad_fn is not None]
    wanted, seeds = [leaf for leaf in leaves if leaf.requires_grad], [torch.ones_like(r) for r in roots]
    gradients: Any = ()
    with FusedWork(device) as kernels:
        if roots and wanted:
            gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    works = kernels.take()
    del gradients
    return works
