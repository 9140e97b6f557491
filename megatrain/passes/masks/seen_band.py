"""SeenBand: which keys a query may see, by the difference of their positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.passes.masks.diagonals import Diagonals

# A mask is made in so many steps, so that a comparison takes a small part of its memory.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class SeenBand:
    """Query `i` sees key `j` if `j - i` is from `first` to `last`; the others are masked.

    Args:
        first: Of a causal window of w tokens 1 - w; None where queries see all keys before.
        last: Of causality 0; None where queries see all keys behind.
    """

    first: int | None
    last: int | None

    @staticmethod
    def of(bands: Diagonals | None, queries: int, keys: int) -> SeenBand | None:
        """The band that a mask of [..., queries, keys] says; None if it says something else.

        A mask of flags says True where a query sees a key, one of numbers adds 0 there and -inf elsewhere.
        """
        if bands is None or bands.pair not in (None, (-2, -1)):
            return None
        pieces = bands.pieces if bands.pair else ((1 - queries, keys - 1, bands.value),)
        seen = [(first, last) for first, last, value in pieces if _is_seen(value)]
        if len(seen) != 1 or not all(_is_seen(value) or _is_masked(value) for _, _, value in pieces):
            return None
        first, last = seen[0]
        return SeenBand(first if first > 1 - queries else None, last if last < keys - 1 else None)

    @staticmethod
    def of_all(bands: Sequence[SeenBand]) -> SeenBand:
        """The band in which all of these let queries see a key."""
        firsts = [band.first for band in bands if band.first is not None]
        lasts = [band.last for band in bands if band.last is not None]
        return SeenBand(max(firsts, default=None), min(lasts, default=None))

    @property
    def is_causal(self) -> bool:
        """Whether queries see themselves and what comes before."""
        return self.first is None and self.last == 0

    @property
    def is_full(self) -> bool:
        """Whether queries see all keys."""
        return self.first is None and self.last is None

    def keys_of(self, start: int, end: int, keys: int) -> tuple[int, int]:
        """The range of the keys that queries from `start` to before `end` see."""
        least = 0 if self.first is None else max(0, start + self.first)
        most = keys if self.last is None else min(keys, end + self.last)
        return least, most

    def reaches_all(self, queries: int, keys: int) -> bool:
        """Tells whether each query sees a key."""
        return (self.last is None or self.last >= 0) and (self.first is None or queries - 1 + self.first < keys)

    def flags(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> torch.Tensor:
        """The mask of a range of queries and a range of keys: bool [queries, keys], True where a query sees a key."""
        queries, keys = torch.arange(*rows, device=device)[:, None], torch.arange(*columns, device=device)
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        step = max(1, -(-len(queries) // _STEPS))
        for start in range(0, len(queries), step):
            part, chunk = seen[start : start + step], queries[start : start + step]
            if self.last is not None:
                part.logical_and_(keys <= chunk + self.last)
            if self.first is not None:
                part.logical_and_(keys >= chunk + self.first)
        return seen

    def __str__(self) -> str:
        if self.is_full:
            return "all keys"
        first = "" if self.first is None else f"{self.first} <= "
        last = "" if self.last is None else f" <= {self.last}"
        return f"{first}key - query{last}"


@dataclass(frozen=True, slots=True)
class BandMask:
    """The target of a call without operands: makes a mask of attention from two lengths.

    Args:
        band: What it says.
        queries: Their number.
        keys: Their number.
        dtype: bool, or of the numbers that are added: 0 where a query sees a key, else -inf.
        device: Where the model computes.
    """

    band: SeenBand
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device

    __name__ = "band_mask"

    def __call__(self) -> torch.Tensor:
        """Makes the mask, of shape [queries, keys]."""
        seen = self.band.flags((0, self.queries), (0, self.keys), self.device)
        if self.dtype == torch.bool:
            return seen
        return torch.full(seen.shape, -math.inf, dtype=self.dtype, device=self.device).masked_fill_(seen, 0)

    def call_text(self, arguments: str) -> str:
        """Prints the call."""
        return f"band_mask({self.queries} queries, {self.keys} keys: {self.band}; {self.dtype})"


def _is_seen(value: bool | float) -> bool:
    return value is True or (not isinstance(value, bool) and value == 0)


def _is_masked(value: bool | float) -> bool:
    return value is False or value == -math.inf
