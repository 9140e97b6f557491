"""Sizes in bytes: read from text, and printed."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.sizes import MEMORY, format_bytes, parse_bytes
from megatrain.errors import OptionError


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (1, 1),
        (10**15, 10**15),
        (8e9, 8 * 10**9),
        (numpy.int64(7), 7),
        ("123", 123),
        (" 123 B ", 123),
        ("2 GB", 2 * 10**9),
        ("1PB", 10**15),
        ("3mib", 3 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("0.0015KB", 1),
        ("1.1GB", 1_100_000_000),
    ],
)
def test_sizes_are_read(size: int | str, num_bytes: int):
    assert parse_bytes(size) == num_bytes
    assert type(parse_bytes(size)) is int


@pytest.mark.parametrize(
    "size",
    [
        *("10 quux", "", "GiB", "-1GiB", "1e9", "nan", "inf", "1,5GB", "1.5", "1.5B", "10G", "1iB", "0x10"),
        *("1 2", "\u0661KB", float("nan"), float("inf"), 1.5, True, False, None, [], 1j, b"1KB"),
    ],
)
def test_what_is_no_size_is_refused_with_what_is_accepted(size: object):
    with pytest.raises(OptionError, match=r"(?s)is not a size in bytes.*positive whole number.*10GiB"):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (-2048, "-2.00 KiB"),
        (3 * 2**60, "3072.00 PiB"),
    ],
)
def test_sizes_are_printed(num_bytes: int, text: str):
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**62))
def test_what_is_printed_is_read_back_within_its_precision(num_bytes: int):
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= num_bytes * 0.005 + 1


@pytest.mark.parametrize("size", [22, "22"])
def test_a_memory_without_a_unit_asks_whether_gib_were_meant(size: int | str):
    with pytest.raises(OptionError, match='Give memory="22GiB"'):
        MEMORY.check("memory", size)
    MEMORY.check("memory", 1024)
    MEMORY.check("memory", "22B")
