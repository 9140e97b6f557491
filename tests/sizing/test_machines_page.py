"""docs/machines.md has what `python -m benchmarks.machines` plans: one cell is planned anew."""

from __future__ import annotations

import re

import pytest

from benchmarks.machines import END, PAGE, RANK, SHAPES, SHOWN, START, cells, table, written
from megatrain.hardware.hardware import Hardware

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is its own
TEXT = PAGE.read_text()
WRITTEN = TEXT[TEXT.index(START) + len(START) : TEXT.index(END)]


@pytest.mark.nightly
def test_a_cell_planned_anew_is_that_of_the_page():
    (cell,) = cells("8B", 0, ("h200",))
    shown = next(line for line in WRITTEN.splitlines() if line.startswith("| h200 "))
    assert shown.split(" | ")[1:3] == table({"8B": [cell]}).splitlines()[-1].removesuffix(" |").split(" | ")[1:3]


def test_the_page_has_all_models_machines_and_ways():
    heads = [line for line in WRITTEN.splitlines() if line.startswith("| |")]
    assert heads == [f"| | {' | '.join(f'{size} | smallest host' for size in SHAPES)} |"] * 2
    rows = re.findall(r"^\| ([a-z]\S+) \|", WRITTEN, re.MULTILINE)
    assert rows == [*SHOWN] * 2
    assert set(SHOWN) <= {*Hardware.presets()}
    assert WRITTEN.count("*predicted*") == 2
    assert f"LoRA, rank {RANK}" in WRITTEN


def test_predicted_and_published_figures_are_apart():
    predicted, published = TEXT.split("## Published")
    assert "*published*" in published
    assert START in predicted
    assert "*predicted*" not in published
    assert written({}) == ""
