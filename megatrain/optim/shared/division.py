"""Division: which of several ranks updates which parameters."""

from __future__ import annotations

from collections.abc import Sequence


def rank_of_each(blocks: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Gives each parameter to one rank, the largest of a block first, each to the rank that has the least so far.

    The ranks' shares differ by no more than the largest parameter.

    Args:
        blocks: Bytes of the parameters of each block, in the order in which blocks are updated.
        num_ranks: How many ranks there are.

    Returns:
        The rank of each parameter.

    >>> rank_of_each([[4, 4], [1, 9]], 2)
    [[0, 1], [1, 0]]
    """
    shares = [0] * num_ranks
    found: list[list[int]] = []
    for block in blocks:
        ranks = [0] * len(block)
        for index in sorted(range(len(block)), key=lambda index: -block[index]):
            ranks[index] = min(range(num_ranks), key=shares.__getitem__)
            shares[ranks[index]] += block[index]
        found.append(ranks)
    return found
