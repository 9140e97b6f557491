"""What docs/long-context.md shows is what is planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "long-context.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PLANS = re.findall(r"^`(planned\(.*?\))`\n\n```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^\| (Llama\S+) \| (\d+) \| .*? \| ([\d.]+ GiB) \| ([\d.]+ GiB) \|", PAGE, re.MULTILINE)


def test_the_table_has_the_figures_of_the_plans():
    assert len(PLANS) == len(ROWS) == 3
    for (call, text), (model, tokens, device, host) in zip(PLANS, ROWS, strict=True):
        assert f'"{model}", {tokens}' in call
        assert f"\ndevice: {device} of " in text
        assert f"\nhost: {host} of " in text


@pytest.mark.nightly
@pytest.mark.parametrize(("call", "text"), PLANS, ids=[call for call, _ in PLANS])
def test_a_plan_of_the_page_is_the_one_that_is_made(call: str, text: str):
    found: dict[str, Any] = {}
    exec(compile(CODE, "long-context.md", "exec"), found)
    assert f"{eval(call, found)}\n" == text
