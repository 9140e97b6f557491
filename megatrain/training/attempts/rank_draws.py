"""Rank draws: each rank learns where the random numbers of its micro-batches begin, as if one process drew all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatrain.device import Device
from megatrain.runtime.draws import DealtDraws, Draws, drawn_ends
from megatrain.runtime.rng import RngState

Tell = Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]
"""Tells all ranks something, and returns what each of them tells."""


def deal(tell: Tell, rank: int, counts: Sequence[int], draws: Sequence[Draws | None], device: Device) -> DealtDraws:
    """Draws what this rank's forwards draw, after the ranks before it, and tells the next where its own begin.

    The generators of rank 0 are those of the training; the generators of other ranks stay as they are.

    Args:
        tell: See `Tell`; called once for each rank.
        rank: This rank.
        counts: How many micro-batches each rank has.
        draws: The random calls of this rank's forwards.
        device: Compute device.

    Raises:
        DrawsError: If a forward can't be drawn ahead.
    """
    own = RngState.now(device)
    begins: list[RngState] = []
    ends: list[RngState] = []
    at = starts = own
    for turn in range(len(counts)):
        word: dict[str, Any] = {}
        if turn == rank:
            ends = drawn_ends(draws, at, device)
            word = {"began": _words(at), "ended": _words(ends[-1])}
        said = tell(word)[turn]
        starts = _state(said["began"]) if turn == 0 else starts
        begins.append(at)
        at = _state(said["ended"])
    return DealtDraws(
        starts_at=starts,
        begins_at=begins[rank],
        ends=ends,
        first=sum(counts[:rank]),
        total=sum(counts),
        leaves_at=at if rank == 0 else own,
    )


def _words(state: RngState) -> list[str]:
    return ["" if part is None else bytes(part.numpy()).hex() for part in (state.host, state.device)]


def _state(words: Sequence[str]) -> RngState:
    host, device = (torch.frombuffer(bytearray.fromhex(w), dtype=torch.uint8).clone() if w else None for w in words)
    assert host is not None
    return RngState(host, device, None)
