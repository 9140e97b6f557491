"""What the README and the pages around it show is what happens, and what they link to is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain.scheduler.effects import KINDS
from megatrain.tools import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
MOST_LINES = 150
FOLDERS = (".github", "benchmarks", "docs", "examples")
TRAIN_STEP = megatrain.TrainStep


def pages() -> list[Path]:
    """Every page that is part of the project."""
    return [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]


def executed(page: str, name: str) -> dict[str, Any]:
    """Runs the Python of a page in one namespace: a later block goes on where an earlier one ended."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{name}, block {number}", "exec"), namespace)
    return namespace


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page can be linked."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_says_why_before_how_and_is_short():
    parts = ("(*measured*", "report.png", "megatrain train model", "megatrain plan Qwen", "pip install", "schedule: ")
    places = [README.index(part) for part in parts]
    assert places == sorted(places)
    assert len(README.splitlines()) <= MOST_LINES


def test_the_python_of_the_readme_prints_the_table_that_it_shows(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = executed(README, "README.md")
    shown = re.search(r"^```text\n(schedule:.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert capsys.readouterr().out.startswith(shown[1])
    assert shown[1] == str(namespace["step"].schedule) + "\n"
    assert namespace["step"].progress.count == 10
    assert (tmp_path / "runs" / "first" / "checkpoint.json").exists()
    # What the text above the table says of it.
    weights = sum(p.nbytes for p in namespace["model"].parameters())
    assert (f"{weights / 1024:.0f}", f"{4 * weights / 1024:.0f}") == ("98", "390")
    assert namespace["step"].schedule.device_bytes <= 84 * 1024


@pytest.mark.nightly
def test_the_plan_of_the_readme_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    command, _, shown = README.partition("$ megatrain ")[2].partition("\n\n")[0].partition("\n")
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out.startswith(inspect.cleandoc(shown) + "\n")


def test_the_commands_of_the_readme_are_targets_of_make():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= shown <= targets


def test_the_figures_of_the_readme_are_those_of_the_pages_with_measurements():
    models = (ROOT / "docs" / "models.md").read_text()
    text = " ".join(README.split())
    said = re.search(r"Of (\d+) models in fp32, (\d+) have eager's bits, (\d+) differ [^,]*, (\d+) is refused", text)
    assert said is not None
    for found in re.findall(r"(\d+) cases: (\d+) exact [^,]*, (\d+) close [^,]*, (\d+) refused", models):
        assert found == said.groups()


def test_a_table_of_ones_own_runs_as_the_page_says():
    own = executed((ROOT / "docs" / "own-table.md").read_text(), "docs/own-table.md")["own"]
    assert own.progress.count == 1


def test_the_life_of_a_step_names_code_that_is_there():
    page = (ROOT / "docs" / "life-of-a-step.md").read_text()
    named = re.findall(r"`([a-z_/]+\.(?:py|c)):(\w+)`", page)
    assert len(named) > 25
    assert [
        f"{path}:{name}"
        for path, name in named
        if not re.search(rf"\b(def |void )?{name}\b", (ROOT / "megatrain" / path).read_text())
    ] == []


def test_the_readme_links_every_page_of_the_documentation():
    links = set(re.findall(r"\]\(([^):#]+)", README))
    there = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    there |= {f"docs/tasks/{path.name}" for path in (ROOT / "docs" / "tasks").glob("*.md")}
    assert {"docs/decisions/README.md", *there} <= links


def test_what_pages_link_to_exists():
    wrong: list[str] = []
    for page in pages():
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link, heading in re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)", prose):
            target = (page.parent / link) if link else page
            if not target.exists() or (heading and heading not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}#{heading}")
    assert wrong == []


def test_the_index_of_decisions_has_every_page():
    folder = ROOT / "docs" / "decisions"
    numbers = {int(path.name[:4]): path.name for path in folder.glob("[0-9]*.md")}
    rows = re.findall(r"^\| \[(\d+)\]\((\S+)\) \| \S.* \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {int(number): name for number, name in rows} == {n: name for n, name in numbers.items() if n > 0}


@pytest.mark.parametrize(
    ("heading", "functions", "not_options"),
    [
        ("compile", (megatrain.compile,), {"model"}),
        (
            "TrainStep",
            (TRAIN_STEP.__init__, TRAIN_STEP.save, TRAIN_STEP.load),
            {"self", "compiled", "optimizer", "folder", "options"},
        ),
        ("plan", (megatrain.plan,), {"model", "args"}),
        ("schedule", (megatrain.schedule,), {"program"}),
        ("verify", (megatrain.verify,), {"model", "args", "kwargs"}),
    ],
)
def test_the_page_of_options_has_each_option_of_each_function(
    heading: str, functions: tuple[Callable[..., Any], ...], not_options: set[str]
):
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", OPTIONS, re.DOTALL | re.MULTILINE)
    assert section is not None
    tables = re.findall(r"^\| option .*\n\| ---.*\n((?:\|.*\n)+)", section[1], re.MULTILINE)
    first_cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) == taken - not_options


def test_the_python_of_the_page_of_options_runs():
    namespace = executed(OPTIONS, "docs/options.md")
    assert all(p.grad is not None for p in namespace["model"].parameters())


def test_the_glossary_has_each_op_of_each_stream():
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for stream, letter in KINDS:
        assert re.search(rf"^\| `{letter}\d?(?:@\d)?`.* \| {stream} \| ", glossary, re.MULTILINE), (stream, letter)
