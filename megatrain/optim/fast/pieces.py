"""A master and its gradient as fp32 pieces that fit the processor's caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatrain.optim.masters.halves import CHUNK, Master, pieces

Piece = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]
"""Values and gradient in scratch memory, and views of the moments; all fp32 and flat."""


def in_pieces(
    master: Master, gradient: torch.Tensor, moments: Sequence[torch.Tensor], *, scale: float = 1.0, start: int = 0
) -> Iterator[Piece]:
    """Yields a parameter piece by piece; the master takes a piece over when the next one is asked for.

    A piece whose loop body raises, or leaves by `break`, is not taken over.

    Args:
        master: Any kind.
        gradient: Contiguous, of the master's shape, fp32 or bf16; not written to.
        moments: fp32, contiguous, of the master's shape.
        scale: Factor of the gradient, rounded to fp32.
        start: The element to begin at.
    """
    numel, flat = gradient.numel() - start, gradient.reshape(-1)
    size = min(numel, CHUNK * torch.get_num_threads())
    values, wide, spare = torch.empty(size), torch.empty(size), torch.empty(size, dtype=torch.int32)
    for begin, end in ((one + start, other + start) for one, other in pieces(numel)):
        part, room = master.part(begin, end), slice(0, end - begin)
        part.load(values[room], spare[room])
        wide[room].copy_(flat[begin:end])
        if scale != 1.0:
            wide[room].mul_(scale)
        yield values[room], wide[room], tuple(moment.view(-1)[begin:end] for moment in moments)
        part.store(values[room], spare[room])
