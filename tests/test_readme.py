"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_of_the_readme_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert blocks
    namespace = {"__name__": "readme"}
    # One namespace: a later block goes on where an earlier one ended, as a reader would.
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    assert "schedule:" in capsys.readouterr().out
    shown = re.search(r"^```text\n(schedule:.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert shown[1] == str(namespace["step"].schedule) + "\n"
    assert (tmp_path / "runs" / "first" / "checkpoint.json").exists()
    assert all(p.grad is not None for p in namespace["model"].parameters())


def test_the_commands_of_the_readme_are_targets_of_make():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= shown <= targets


def test_the_files_that_the_readme_links_to_exist():
    links = re.findall(r"\]\(([^):#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
