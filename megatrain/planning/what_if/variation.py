"""Variation: other options and sizes for a plan, and how somebody who gives options writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.counts import counted
from megatrain.planning.model_sizes import DEPTH, LORA, MICRO_BATCH, SEQUENCE
from megatrain.sizes import format_bytes, parse_bytes

SAME, ROUNDING, OTHER = NUMBERS = "same", "rounding", "other"
"""What becomes of a training's numbers: they stay, sums are rounded in another order, or it is another training."""

Spelling = Mapping[str, Callable[[Any], str]]
"""How an option or a size is written with a value, by name; what is missing can't be given there."""

IN_PYTHON: Spelling = {
    "device_memory": lambda value: f'device_memory="{size(value)}"',
    "host_memory": lambda value: f'host_memory="{size(value)}"',
    "block_bytes": lambda value: f'block_bytes="{size(value)}"',
    "micro_batches": lambda value: f"micro_batches={value}",
    "precision": lambda value: f'precision="{value}"',
    "masters": lambda value: f'masters="{value}"',
    "max_grad_norm": lambda value: f"max_grad_norm={value}",
    "overlap": lambda value: f"overlap={value}",
    "activations": lambda value: f'activations="{value}"',
    "optimizer": lambda value: f'optimizer="{value}"',
    MICRO_BATCH: lambda value: f"an example of {value}",
    SEQUENCE: lambda value: f"an example of length {value}",
    DEPTH: lambda value: counted(value, "layer"),
    LORA: lambda value: f"adapters of rank {value}" if value else "all weights",
}
"""As options of `megatrain.plan`."""

_KEEPS = {"device_memory": SAME, "host_memory": SAME, "activations": SAME, "overlap": SAME, "block_bytes": ROUNDING}


@dataclass(frozen=True, slots=True)
class Variation:
    """Other values of some options and sizes.

    Args:
        values: By name, in the order in which they are written.
    """

    values: tuple[tuple[str, Any], ...] = ()

    @property
    def numbers(self) -> str:
        """One of `NUMBERS`. Micro-batches of another size, as many that a step has the same samples, only round."""
        names = dict(self.values).keys()
        split = {MICRO_BATCH, "micro_batches"}
        found = [_KEEPS.get(name, OTHER) for name in names if not (name in split and split <= names)]
        found += [ROUNDING] if split <= names else []
        return max([SAME, *found], key=NUMBERS.index)

    def words(self, spelling: Spelling = IN_PYTHON) -> str:
        """The variation as it is written."""
        words = (spelling[name](value) for name, value in self.values)
        return ", ".join(filter(None, words)) or "as planned"

    def can_be_given(self, spelling: Spelling) -> bool:
        """Whether there is a way to write it."""
        return all(name in spelling for name, _ in self.values)

    def __add__(self, other: Variation) -> Variation:
        """Both, which have no name in common."""
        return Variation((*self.values, *other.values))


def varied(**values: Any) -> Variation:
    """A variation by the names of options and sizes."""
    return Variation(tuple(values.items()))


def size(nbytes: int) -> str:
    """Bytes as an option is written: without a space.

    >>> size(3 << 29)
    '1.50GiB'
    """
    return format_bytes(nbytes).replace(" ", "")


def as_printed(nbytes: int) -> int:
    """The size that `size` writes, so that a plan is of exactly what is printed; at least a byte."""
    return parse_bytes(size(max(1, nbytes)))


def splits(micro_batch: int, micro_batches: int, factors: tuple[int, ...]) -> Iterator[Variation]:
    """The same samples in larger micro-batches (factors above 1), or smaller ones (divisors, as negative numbers)."""
    for factor in factors:
        if factor > 0 and micro_batches % factor == 0:
            yield varied(micro_batch=micro_batch * factor, micro_batches=micro_batches // factor)
        if factor < 0 and micro_batch % -factor == 0:
            yield varied(micro_batch=micro_batch // -factor, micro_batches=micro_batches * -factor)
