"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from megatrain.base.checks import Rule

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes in host memory: a cache line, and enough for vector loads of any dtype.
The state of blocks has the alignment of its program, which is the device's."""

PAGE = 4096
"""What begins in a scratch file, and how long it is, are multiples of so many bytes: direct I/O needs that."""

ALIGNMENTS = Rule(
    "a power of two, from 64 to 4096 bytes",
    "{name}=512",
    lambda value: None if type(value) is int and value in {64 << n for n in range(7)} else "is no alignment",
)

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_TEXT = re.compile(r"(?P<number>\d+(\.\d+)?)\s*((?P<prefix>[kmgtp]?)(?P<binary>i?)b)?", re.ASCII)
# More than any machine addresses; and a text of so many digits is no size.
_MOST_BYTES = 2**63 - 1
_MOST_CHARACTERS = 40


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Returns `nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def parse_bytes(size: int | float | str, option: str = "size") -> int:
    """Reads a size in bytes.

    Args:
        size: A positive integer (a float if it is whole), or a text: a number, which may have a fraction,
            and a unit: `B`, `KB` to `PB` (powers of 1000) or `KiB` to `PiB` (powers of 1024). Case does not
            matter. A fraction of a byte is dropped.
        option: Name of the option it was given for, for the message.

    Raises:
        OptionError: If it can't be read, is below one byte, or more than a machine has.

    >>> parse_bytes("1.5KiB"), parse_bytes("10 MB"), parse_bytes(512)
    (1536, 10000000, 512)
    """
    SIZE.check(option, size)
    num_bytes = _parse(size)
    assert num_bytes is not None
    return num_bytes


def _fault(size: object) -> str | None:
    num_bytes = _parse(size)
    if num_bytes is None:
        return "is not a size in bytes"
    if num_bytes < 1:
        return "is less than one byte"
    return "is more bytes than any machine has" if num_bytes > _MOST_BYTES else None


SIZE = Rule(
    "a positive whole number of bytes, or a text: a number and a unit (KiB, MiB, GiB; KB, MB, GB)",
    '{name}="10GiB", "1.5 GiB", "512MB" or 1073741824',
    _fault,
)
"""What `parse_bytes` reads."""


def _has_no_unit(size: object) -> bool:
    number = size.strip() if isinstance(size, str) else str(size)
    return number.isdecimal() and 0 < int(number[:_MOST_CHARACTERS]) < 1000


MEMORY = Rule(
    SIZE.text,
    SIZE.way,
    lambda size: "is fewer than 1000 bytes" if _has_no_unit(size) else SIZE.fault(size),
    lambda size: f'{{name}}="{size}GiB"' if _has_no_unit(size) else None,
)
"""The size of a memory: a number below 1000 is one whose unit was forgotten."""


def _parse(size: object) -> int | None:
    return _parse_text(size) if isinstance(size, str) else _parse_number(size)


def _parse_text(text: str) -> int | None:
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None or len(text) > _MOST_CHARACTERS or (match["binary"] and not match["prefix"]):
        return None
    base = 1024 if match["binary"] else 1000
    number = Fraction(match["number"])
    if not match["prefix"] and number.denominator != 1:
        return None
    return int(number * base ** _POWERS[match["prefix"] or ""])


def _parse_number(number: object) -> int | None:
    if isinstance(number, bool):
        return None
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    try:
        return operator.index(number)  # pyright: ignore[reportArgumentType]  # whatever has no index raises TypeError
    except TypeError:
        return None


def format_bytes(num_bytes: int) -> str:
    """Returns a size for people, in binary units with two decimals; `parse_bytes` reads it back.

    >>> format_bytes(512), format_bytes(1536), format_bytes(10 * 2**30)
    ('512 B', '1.50 KiB', '10.00 GiB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.995 of a unit would print as 1024.00.
        if abs(value) < 1023.995:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
