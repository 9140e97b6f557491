"""Counts of things, as people write them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number and what it counts.

    Args:
        number: How many there are.
        noun: One of them; its last word gets the plural.

    >>> counted(1, "block"), counted(2, "micro-batch"), counted(0, "state tensor")
    ('1 block', '2 micro-batches', '0 state tensors')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"
