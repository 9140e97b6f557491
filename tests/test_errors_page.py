"""Each snippet of docs/errors.md raises the error of its section, with what, rule and way out."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest
import torch

import megatrain

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()
SNIPPETS = [
    (section.split("\n", 1)[0], code)
    for section in PAGE.split("\n## ")[1:]
    for code in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize(("name", "code"), SNIPPETS)
def test_snippet_raises_its_error(name: str, code: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
    file = f"errors_{name}.py"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    with pytest.raises(getattr(megatrain, name)) as caught:
        exec(compile(code, file, "exec"), {"torch": torch, "megatrain": megatrain, "model": model, "__name__": "page"})
    lines = str(caught.value).splitlines()
    assert len(lines) >= 2, "an error says what is wrong, and then the rule or the way out"
    assert lines[0].endswith((".", ":", ">")) or "`" in lines[0]


def test_every_error_has_a_section() -> None:
    errors = [n for n, e in vars(megatrain).items() if isinstance(e, type) and issubclass(e, Exception)]
    sections = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)
    assert sorted(sections) == sorted(set(errors) - {"MegatrainError"})
