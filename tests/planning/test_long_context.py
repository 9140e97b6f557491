"""What docs/long-context.md shows is what is planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "long-context.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SHOWN = re.findall(r"^    ([a-z]+: .*)$", PAGE, re.MULTILINE)
ROWS = re.findall(
    r"^\| `(planned\(.*?\))` \| [^|]+ \| ([\d.]+ GiB) \| ([\d.]+ GiB) \| (\d+) s \| (\d+) \| ([\d.]+%) \|$",
    PAGE,
    re.MULTILINE,
)


def assert_has_figures(text: str, row: tuple[str, ...]) -> None:
    _, device, host, seconds, rate, above = row
    assert f"\ndevice: {device} of " in text
    assert f"\nhost: {host} of " in text
    took = re.search(r"^time: step ([\d.]+) s;.*; (\d+) tokens/s$", text, re.MULTILINE)
    assert took is not None
    assert (f"{float(took[1]):.0f}", took[2]) == (seconds, rate)
    assert f"the step takes {above} more" in text


def test_the_rows_and_the_lines_of_the_first_are_found():
    assert (len(ROWS), len(SHOWN)) == (3, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_plan_of_a_row_is_the_one_that_is_made(row: tuple[str, ...]):
    found: dict[str, Any] = {}
    exec(compile(CODE, "long-context.md", "exec"), found)
    text = f"{eval(row[0], found)}\n"
    assert_has_figures(text, row)
    if row == ROWS[0]:
        printed = {line.strip() for line in text.splitlines()}
        assert [line for line in SHOWN if line not in printed] == []
