"""Draws ahead: each rank learns where the random numbers of its part begin, as if one process drew all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatrain.device import Device
from megatrain.errors import RanksError
from megatrain.files.digest import digest_of
from megatrain.passes.program import Program
from megatrain.passes.split.dealt_program import DealtProgram
from megatrain.ranks.ranks import Ranks
from megatrain.runtime.drawing.draws import Draws
from megatrain.runtime.drawing.rank_draws import BlockDraws, MicroBatchDraws, RankDraws, drawn_ends
from megatrain.runtime.rng import RngState

Tell = Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]
"""Tells all ranks something, and returns what each of them tells."""


def draw_ahead(
    tell: Tell,
    ranks: Ranks,
    counts: Sequence[int],
    programs: Sequence[Program],
    draws: Sequence[Draws | None],
    device: Device,
) -> RankDraws:
    """Draws what forwards draw ahead of them.

    The generators of rank 0 are those of the training; the generators of other ranks stay as they are.

    Args:
        tell: See `Tell`; called as often on each rank.
        ranks: Those that draw.
        counts: How many micro-batches each rank has of its own; where blocks are dealt, the first rank of each host has
            those of its host.
        programs: What this rank runs, one for each micro-batch.
        draws: The random calls of these forwards, whole ones.
        device: Compute device.

    Raises:
        DrawsError: If a forward can't be drawn ahead.
        RanksError: If ranks draw other numbers.
    """
    dealt = [program for program in programs if isinstance(program, DealtProgram)]
    if dealt:
        return _of_blocks(tell, ranks, dealt, draws, device)
    return _of_micro_batches(tell, ranks.rank, counts, draws, device)


def _of_micro_batches(
    tell: Tell, rank: int, counts: Sequence[int], draws: Sequence[Draws | None], device: Device
) -> MicroBatchDraws:
    """Draws what this rank's forwards draw, after the ranks before it, and tells the next where its own begin."""
    own = RngState.now(device)
    begins: list[RngState] = []
    ends: list[RngState] = []
    at = own
    for turn in range(len(counts)):
        word: dict[str, Any] = {}
        if turn == rank:
            ends = [blocks[-1] for blocks in drawn_ends(draws, at, device)]
            word = {"began": _words(at), "ended": _words(ends[-1])}
        said = tell(word)[turn]
        begins.append(at)
        at = _state(said["ended"])
    return MicroBatchDraws(
        begins_at=begins[rank],
        ends=ends,
        first=sum(counts[:rank]),
        leaves_at=at if rank == 0 else own,
    )


def _of_blocks(
    tell: Tell,
    ranks: Ranks,
    programs: Sequence[DealtProgram],
    draws: Sequence[Draws | None],
    device: Device,
) -> BlockDraws:
    """Draws what all forwards of this host draw; so does each of its ranks, and all come to the same numbers.

    The first host begins where rank 0 is, each other one where the host before it ends.
    """
    own = RngState.now(device)
    at = _state(tell({"began": _words(own)} if ranks.rank == 0 else {})[0]["began"])
    begins, ends = at, list[Sequence[RngState]]()
    for mates in ranks.hosts:
        word: dict[str, Any] = {}
        if ranks.rank in mates:
            begins, ends = at, drawn_ends(draws, at, device)
            word = {"drawn": _digest(ends), "ended": _words(ends[-1][-1])}
        words = tell(word)
        _check_same(mates, words)
        at = _state(words[mates[0]]["ended"])
    blocks: list[dict[int, tuple[RngState, RngState]]] = []
    for program, each in zip(programs, ends, strict=True):
        begins_of = [begins, *each]
        blocks.append({here: (begins_of[n], each[n]) for here, n in enumerate(program.numbers)})
        begins = each[-1]
    leaves_at = at if ranks.rank == 0 else own
    return BlockDraws(blocks, leaves_at)


def _check_same(mates: Sequence[int], words: Sequence[Mapping[str, Any]]) -> None:
    for rank in mates:
        if words[rank]["drawn"] != words[mates[0]]["drawn"]:
            raise RanksError(
                f"the ranks differ: rank {rank} has drawn other random numbers than rank {mates[0]} from the same "
                "state.\n"
                "  Each draws ahead what the blocks on all devices draw, to know where its own begin.\n"
                "  Train on devices of one kind, with one version of torch."
            )


def _digest(ends: Sequence[Sequence[RngState]]) -> str:
    """Of all states, in their order; memory that consecutive ones share counts once."""
    content = bytearray()
    host: torch.Tensor | None = None
    for state in (state for blocks in ends for state in blocks):
        if state.host is not host:
            host = state.host
            content += bytes(host.numpy())
        content += b"" if state.device is None else bytes(state.device.numpy())
    return digest_of(bytes(content))


def _words(state: RngState) -> list[str]:
    return ["" if part is None else bytes(part.numpy()).hex() for part in (state.host, state.device)]


def _state(words: Sequence[str]) -> RngState:
    host, device = (torch.frombuffer(bytearray.fromhex(w), dtype=torch.uint8).clone() if w else None for w in words)
    assert host is not None
    return RngState(host, device, None)
