"""Packet: tensors on their way from one rank to another, few of them alone, the many small ones together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import torch

_ALONE_BYTES = 1 << 16
"""A tensor that is larger goes alone, from its own memory to its own memory; a transfer of nothing takes as long as a
copy of some such tensors."""


class Spec(Protocol):
    """Shape and dtype of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, one per dimension."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...


class Packet:
    """Tensors of one block as the parts of a transfer: which there are, with all small ones, then each large one.

    Both sides know shapes and dtypes, so the first part has the same size whichever tensors there are.

    Args:
        tensors: On the host, contiguous.
        is_received: They are to be filled.

    Attributes:
        present: Which tensors there are; known to the receiver after the first part.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], present: list[bool], *, is_received: bool):
        self._flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self.present = present
        self._is_received = is_received

    @staticmethod
    def of(tensors: Sequence[torch.Tensor | None], specs: Sequence[Spec]) -> Packet:
        """What is sent.

        Args:
            tensors: None where there is none.
            specs: Their shapes and dtypes, also of those that aren't there.
        """
        given: list[torch.Tensor] = []
        for tensor, spec in zip(tensors, specs, strict=True):
            assert tensor is None or (tuple(tensor.shape), tensor.dtype) == (tuple(spec.shape), spec.dtype)
            is_alone = prod(spec.shape) * spec.dtype.itemsize > _ALONE_BYTES
            # Of a large one that isn't there nothing is sent.
            given.append(torch.zeros(0 if is_alone else spec.shape, dtype=spec.dtype) if tensor is None else tensor)
        present = [tensor is not None for tensor in tensors]
        return Packet([tensor.contiguous() for tensor in given], present, is_received=False)

    @staticmethod
    def into(out: Sequence[torch.Tensor]) -> Packet:
        """What is received into these tensors."""
        return Packet(out, [False] * len(out), is_received=True)

    def parts(self) -> Iterator[torch.Tensor]:
        """The parts in their order; each must be over before the next is asked for."""
        small = [flat for flat in self._flat if flat.numel() <= _ALONE_BYTES]
        flags = torch.tensor(self.present, dtype=torch.uint8)
        first = torch.cat([flags, *small])
        yield first
        if self._is_received:
            self.present[:] = map(bool, first[: len(flags)].tolist())
            contents = first[len(flags) :].split([flat.numel() for flat in small])
            for flat, content in zip(small, contents, strict=True):
                flat.copy_(content)
        for flat, is_there in zip(self._flat, self.present, strict=True):
            if is_there and flat.numel() > _ALONE_BYTES:
                yield flat
