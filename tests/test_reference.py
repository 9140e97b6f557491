"""The API reference has each public name once, and the site each page. `make docs` builds it; this needs no MkDocs."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PUBLIC = (
    "megatrain",
    "megatrain.device",
    "megatrain.extending",
    "megatrain.integrations.hf",
    "megatrain.optim.fast",
    "megatrain.optim.per_parameter",
    "megatrain.passes",
    "megatrain.files",
    "megatrain.tools.verification",
)
"""Modules whose `__all__` is documented. A name that several of them have is documented once."""
FURTHER = (
    "megatrain.training.compiled.inside.Compiled",
    "megatrain.optim.masters.registry.Masters",
    "megatrain.planning.advice.Alternative",
    "megatrain.planning.advice.Alternatives",
    "megatrain.planning.advice.Largest",
    "megatrain.tools.reporting.step_report.StepReport",
    "megatrain.scheduler.builder.bound.StepBound",
    "megatrain.scheduler.instructions.Instructions",
    "megatrain.scheduler.table.Table",
    "megatrain.scheduler.simulate.Measured",
    "megatrain.scheduler.simulate.Simulation",
    "megatrain.scheduler.simulate.TimedRun",
    "megatrain.base.progress.ProgressLine",
)
"""What pages speak of, and no public module names: results of public functions."""
DIRECTIVES = [
    name
    for path in sorted((DOCS / "reference").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
]


def named(path: str) -> Any:
    """The object that a dotted path names."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_each_directive_names_something_that_exists():
    for path in DIRECTIVES:
        assert named(path) is not None, path


def test_each_public_name_is_in_the_reference_exactly_once():
    public = [f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__]
    wanted = {id(named(path)): path for path in [*reversed(public), *FURTHER]}
    found = Counter(id(named(path)) for path in DIRECTIVES)
    assert [path for key, path in wanted.items() if found[key] != 1] == [], "missing, or there more than once"
    assert [path for path in DIRECTIVES if id(named(path)) not in wanted] == [], "named by nothing public"


def test_members_that_a_directive_chooses_exist():
    chosen = re.compile(r"^::: (\S+)\n    options:\n      members: \[([^\]]*)\]", re.MULTILINE)
    found = [each for path in (DOCS / "reference").glob("*.md") for each in chosen.findall(path.read_text())]
    assert len(found) == 2
    for name, members in found:
        for member in re.findall(r"\w+", members):
            assert hasattr(named(name), member), f"{name}.{member}"


def test_the_site_has_each_page():
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    shown = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    left = {page for page in pages if not page.startswith("decisions/0")}  # the index of decisions links these
    assert left - set(shown) == set()
    assert [page for page, count in Counter(shown).items() if count > 1] == []
    for page in set(shown) - pages:
        assert page == "index.md" or (DOCS.parent / page.removeprefix("repository/")).exists(), page
