"""What docs/extending.md and docs/passes.md show is what happens, and the examples run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [(ROOT / "docs" / name).read_text() for name in ("extending.md", "passes.md")]
SECTIONS = [section.split("\n", 1) for page in PAGES for section in page.split("\n## ")[1:]]


@pytest.mark.parametrize(("title", "text"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_the_python_of_a_section_runs(title: str, text: str, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "extending"}
    # One namespace for a section: a later block goes on where an earlier one ended, as a reader would.
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)):
        exec(compile(block, f"{title}, block {number}", "exec"), namespace)
    shown = re.findall(r'# "(?:\.\.\. )?(.*?)(?: \.\.\.)?"$', text, re.MULTILINE)
    printed = capsys.readouterr().out
    assert [line for line in shown if line not in printed] == []


def test_the_pass_of_the_page_is_that_of_the_example():
    source = (ROOT / "examples" / "your_own_pass.py").read_text()
    function = re.search(r"^def head_loss.*?^    return rewriter\.done\(\)\n", source, re.DOTALL | re.MULTILINE)
    assert function is not None
    assert function[0] in PAGES[1]
    assert len(function[0].splitlines()) <= 25


def test_the_links_of_the_pages_lead_to_files():
    links = re.findall(r"\]\(([^):#]+)\)", "".join(PAGES))
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_example_of_a_pass_runs(capsys: pytest.CaptureFixture[str]):
    script = ROOT / "examples" / "your_own_pass.py"
    assert len(script.read_text().splitlines()) < 60
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "from canonicalize, chunked_cross_entropy, partition" in said
    assert "verified" in said or "equal" in said, said[-2000:]
