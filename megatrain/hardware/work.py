"""Work: what kernels and updates compute and move, in so few figures that a machine's rates make seconds of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log2
from typing import NamedTuple

from megatrain.base.checks import shown

MEMORY = "memory"
"""The rate of kernels that compute nothing which counts: they take as long as their bytes."""

SHARED_BYTES = 512 << 10
"""A kernel of the host that reads and writes so much is shared among threads: torch does from 32769 elements on."""

_DTYPES = ("bf16", "tf32", "fp32", "fp64", "fp8", "int8")
RATES = (*_DTYPES, *(f"{dtype} attention" for dtype in _DTYPES))
"""The names that rates of products have."""

# Kernels are put together if their FLOPs per byte differ by less than a factor of two to the power of 1/4, and their
# bytes by less than four: then the sum of their times is the time of their sums, within a few percent at worst.
_OF_INTENSITY = 4
_OF_SIZE = 0.5


class Kernels(NamedTuple):
    """Kernels of one kind, put together.

    Attributes:
        rate: The rate of a machine that counts: `"bf16"`, `"tf32"`, `"fp32"`, `"fp64"`, `"fp8"` or `"int8"` for
            products of that dtype (fp16 counts as bf16), the same with ` attention`, or `"memory"`.
        flops: Floating-point operations of all of them.
        nbytes: Bytes of device memory that all of them read and write.
        number: How many they are.
    """

    rate: str
    flops: int
    nbytes: int
    number: int = 1


Works = tuple[Kernels, ...]


def fault_of_works(works: Works) -> str | None:
    """Says what is wrong with kernels that came from outside, such as a file; None if nothing is."""
    for work in works:
        if work.rate not in (*RATES, MEMORY):
            return f"has kernels of the rate {shown(work.rate)}, which isn't known"
        if any(type(figure) is not int or figure < 0 for figure in work[1:]):
            return "has kernels with a figure that is no count"
    return None


def put_together(kernels: Iterable[Kernels]) -> Works:
    """Sums alike kernels: of one rate, about the same bytes, and about the same FLOPs per byte.

    >>> put_together([Kernels("fp32", 64, 8), Kernels("memory", 0, 8), Kernels("fp32", 64, 8)])
    (Kernels(rate='fp32', flops=128, nbytes=16, number=2), Kernels(rate='memory', flops=0, nbytes=8, number=1))
    """
    found: dict[tuple[str, int, int], Kernels] = {}
    for work in kernels:
        each = max(1, work.nbytes // max(1, work.number))
        intensity = round(_OF_INTENSITY * log2(work.flops / max(1, work.nbytes))) if work.flops else 0
        key = (work.rate, intensity, round(_OF_SIZE * log2(each)))
        before = found.get(key)
        found[key] = work if before is None else _sum(before, work)
    return tuple(found[key] for key in sorted(found))


def total_flops(works: Iterable[Kernels]) -> int:
    """Floating-point operations of all of it."""
    return sum(work.flops for work in works)


def total_bytes(works: Iterable[Kernels]) -> int:
    """Bytes of device memory that all of it reads and writes."""
    return sum(work.nbytes for work in works)


def total_kernels(works: Iterable[Kernels]) -> int:
    """The number of kernels."""
    return sum(work.number for work in works)


def most(each: Sequence[Works]) -> Works:
    """The one that computes most; if several do, that which moves most, then that of most kernels."""
    return max(each, key=lambda works: (total_flops(works), total_bytes(works), total_kernels(works), works))


def products(flops: int, nbytes: int = 0, *, rate: str = "fp32") -> Works:
    """One kernel that computes so much; for workloads written by hand. No FLOPs are no kernel."""
    return (Kernels(rate, flops, nbytes),) if flops or nbytes else ()


def _sum(one: Kernels, other: Kernels) -> Kernels:
    return Kernels(one.rate, one.flops + other.flops, one.nbytes + other.nbytes, one.number + other.number)


UPDATE_TRAFFIC: Mapping[str, int] = {"whole": 7, "exact": 13, "rounded": 11}
"""What an update of AdamW touches per byte of a parameter, by the kind of its master.

An update reads the gradient, and reads and writes the parameter and two moments: 28 bytes of an fp32 parameter. The
moments of a bf16 parameter with a master are fp32: with an exact master, whose low half is read and written, too, that
makes 2 + 2 * (2 + 2 + 8) = 26 bytes, without low halves 22.
"""


def update_traffic(dtype: str, masters: str) -> int:
    """The same of a parameter, by the text of its dtype; all but those of bf16 are their own masters."""
    return UPDATE_TRAFFIC[masters if dtype == "torch.bfloat16" else "whole"]


UPDATE_PIECE = 1 << 18
"""Elements that the device updates at a time where it has only torch's kernel: bf16 ones become fp32 for that time."""
_SCRATCH = 32  # device bytes for each of these elements


def update_scratch(sizes: Iterable[int]) -> int:
    """Device bytes that updates of parameters of so many elements take there, one after the other."""
    return _SCRATCH * min(UPDATE_PIECE, max(sizes, default=0))
