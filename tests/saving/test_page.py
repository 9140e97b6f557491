"""The snippet of docs/checkpoints.md runs, in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(code, "checkpoints.md", "exec"), found)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]
    assert found["checkpoint"].extra["step"] == 7
    files = {str(path.relative_to(tmp_path / "runs/first")) for path in (tmp_path / "runs").rglob("*.*")}
    assert {re.sub(r"-\d{5}-of-\d{5}", "", name) for name in files} == {
        "model.safetensors",
        "model.safetensors.index.json",
        "training/extra.safetensors",
        "checkpoint.json",
    }
