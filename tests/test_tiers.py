"""`make quick` leaves out what tests/slow.txt lists, and nothing else, and reaches each folder."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from tests.tiers import SLOW_S, checkered, diagonal, listed, one_case_of_each, one_in, relisted

ROOT = Path(__file__).parents[1]
NEEDS_MINUTES = {"faults"}
"""A folder whose tests are processes that train."""


def functions(path: Path) -> set[str]:
    tree, file = ast.parse(path.read_text()), path.relative_to(ROOT).as_posix()
    classes = [(f"{file}::{node.name}", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        f"{where}::{node.name}"
        for where, body in [(file, tree.body), *classes]
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_list_names_functions_that_exist_and_is_sorted():
    everything = set[str]().union(*(functions(path) for path in (ROOT / "tests").rglob("test_*.py")))
    assert listed() - everything == set(), "`make slow` rewrites the list; or take these lines out"
    lines = (ROOT / "tests" / "slow.txt").read_text().splitlines()
    assert lines == sorted(set(lines))


def test_the_quick_tests_reach_each_folder():
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    slow = listed()
    left = [f.name for f in folders if not set[str]().union(*(functions(path) for path in f.glob("test_*.py"))) - slow]
    assert set(left) == NEEDS_MINUTES


def test_one_case_of_each_function_is_quick_and_the_same_one_in_each_run():
    cases = [f"a.py::test_x[{mode}-{size}]" for mode in ("keep", "offload") for size in range(9)]
    chosen = one_case_of_each([*cases, "a.py::test_y", "b.py::test_x"])
    assert set(chosen) == {"a.py::test_x", "a.py::test_y", "b.py::test_x"}
    assert chosen["a.py::test_x"] in cases
    assert one_case_of_each(reversed(cases))["a.py::test_x"] == chosen["a.py::test_x"]


def test_each_value_of_a_table_is_met_where_the_rest_is_wide():
    def kept(cases: list[Any]) -> list[Any]:
        return [case for case in cases if not hasattr(case, "marks")]

    assert kept(one_in(3, range(7))) == [0, 3, 6]
    assert kept(one_in(3, range(7), first=1)) == [1, 4]
    assert kept(checkered("ab", range(3))) == [("a", 0), ("a", 2), ("b", 1)]
    assert kept(diagonal("abcd", range(3))) == [("a", 0), ("b", 1), ("c", 2), ("d", 0)]
    (left_out,) = [case for case in checkered("a", range(2)) if hasattr(case, "marks")]
    assert (left_out.values, left_out.marks[0].name) == (("a", 1), "wide")


def test_the_list_is_judged_anew_by_what_ran():
    before = {"a.py::test_gone", "a.py::test_faster", "a.py::test_as_before", "b.py::test_did_not_run"}
    nearly, more = 0.7 * SLOW_S, 1.5 * SLOW_S
    seconds = {"a.py::test_faster": 0.1 * SLOW_S, "a.py::test_as_before": nearly, "a.py::test_quick": nearly}
    seconds["a.py::test_new[1]"] = more
    assert relisted(before, seconds) == {"a.py::test_as_before", "a.py::test_new", "b.py::test_did_not_run"}
