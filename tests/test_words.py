"""No habit of `CONTRIBUTING.md` comes back: the code and the pages are in plain English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A phrase may be broken over two lines, of text or of comments.
HABITS = ("hangs on", "hang on", "can't be had", "can't bear", "whoever", "shall", "but for", "by chance")
# "1 blocks": `counted` finds the word. Counts of bytes, "2 of 3 blocks", and what is never one are left out.
UNCOUNTED = re.compile(
    r"(?<!of )\{(len\([^}]*\)|[a-z_.]*\bnum_[a-z_]+)\} "
    r"(?!bytes|others|tokens|numbers)[a-z]+(?<!s)s\b"
)
HABIT = re.compile(r"\b(" + "|".join(HABITS).replace(" ", r"[\s#]+") + r")\b", re.IGNORECASE)


def files() -> list[Path]:
    """All that people read: the library, examples and benchmarks, the pages of the root and of the documentation."""
    folders = (("megatrain", "py"), ("examples", "py"), ("benchmarks", "py"), ("docs", "md"), ("benchmarks", "md"))
    found = [path for folder, ending in folders for path in sorted((ROOT / folder).rglob(f"*.{ending}"))]
    return [*found, ROOT / "README.md", ROOT / "CHANGELOG.md"]


def habits_in(text: str) -> list[str]:
    """Returns the line and the phrase of each habit in a text."""
    return [f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}" for found in HABIT.finditer(text)]


def test_no_habit_comes_back():
    found = [f"{path.relative_to(ROOT)}:{habit}" for path in files() for habit in habits_in(path.read_text())]
    assert not found, "CONTRIBUTING.md says which words to use instead:\n" + "\n".join(found)


def test_what_is_counted_is_in_the_singular_where_it_is_one():
    sources = sorted((ROOT / "megatrain").rglob("*.py"))
    found = [f"{path.name}: {each[0]}" for path in sources for each in UNCOUNTED.finditer(path.read_text())]
    assert not found, "megatrain.base.counts.counted knows when there is one:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What it hangs\n    # on is unknown.", ["1: 'hangs\\n    # on'"]),
        ("one\ntwo\nWhoever reads, shall find.", ["3: 'Whoever'", "3: 'shall'"]),
        ("a shallow copy, which changes on each call", []),
    ],
)
def test_a_habit_is_found_in_any_line(text: str, found: list[str]):
    assert habits_in(text) == found


def test_the_rule_names_every_habit():
    rule = (ROOT / "CONTRIBUTING.md").read_text()
    assert [habit for habit in HABITS if f'"{habit}"' not in rule and habit != "hang on"] == []
