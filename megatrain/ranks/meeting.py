"""meet(): a meeting of all ranks, in which each tells something and hears what the others tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.errors import RanksError
from megatrain.ranks.ranks import Ranks


def meet(ranks: Ranks, at: str, word: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tells all ranks something, and hears what they tell, by rank.

    Args:
        ranks: Those that meet.
        at: The call in which this rank is, in words.
        word: Numbers, texts, lists and dictionaries. A rank that can't go on tells `failed`.

    Raises:
        RanksError: If another rank failed, or is in another call.
    """
    words = ranks.exchange({"at": at, **word})
    check_words(ranks, words)
    return words


def check_words(ranks: Ranks, words: Sequence[Mapping[str, Any]]) -> None:
    """Looks whether all ranks have met in one call, and can go on.

    Raises:
        RanksError: If not.
    """
    for rank, other in enumerate(words):
        if rank != ranks.rank and "failed" in other:
            raise RanksError(f"rank {rank} failed before the step: {other['failed']}")
    if len({other["at"] for other in words}) > 1:
        places = ", ".join(f"rank {rank} in {other['at']}" for rank, other in enumerate(words))
        raise RanksError(
            f"the ranks are in different calls: {places}.\n"
            "  All ranks make the same calls in the same order: steps and save().\n"
            "  Make this call on each rank: no rank writes a checkpoint or prepares a step for the others."
        )


def compare(ranks: Ranks, at: str, facts: Mapping[str, object], way_out: str) -> None:
    """Looks whether plain values are the same on all ranks, which all meet here.

    Args:
        ranks: See `meet`.
        at: See `meet`.
        facts: What must not differ, by its name in words.
        way_out: What the user can do about a difference.

    Raises:
        RanksError: Naming the first difference: the same on each rank.
    """
    told = [word["facts"] for word in meet(ranks, at, {"facts": {name: str(value) for name, value in facts.items()}})]
    for rank, theirs in enumerate(told[1:], start=1):
        for name in {**told[0], **theirs}:
            first, other = told[0].get(name, "nothing"), theirs.get(name, "nothing")
            if first != other:
                raise RanksError(
                    f"the ranks differ: {name} is {first} on rank 0, but {other} on rank {rank}.\n  {way_out}"
                )


def words_of(error: BaseException) -> str:
    """What other ranks are told of an error: its class and its first line."""
    return f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
