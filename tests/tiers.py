"""Which tests `make quick` runs: one case of each test function, but for the functions that tests/slow.txt lists.

Nothing has to be kept by hand. A new function is run by `make quick` from its first day; if its case takes more than
`SLOW_S`, the last lines of the run say so, and `make slow` lists it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

LIST = Path(__file__).parent / "slow.txt"
SLOW_S = 0.5
"""Of CPU time, own and of children: the load of a machine doesn't count."""


def every_other(cases: Iterable[Any]) -> list[Any]:
    """Marks every other case as wide: `make wide` runs these, and `make test` their neighbours, of the same kinds."""
    return [case if index % 2 == 0 else wide(case) for index, case in enumerate(cases)]


def one_in(count: int, cases: Iterable[Any], *, first: int = 0) -> list[Any]:
    """Marks all but every `count`-th case as wide."""
    return [case if index % count == first else wide(case) for index, case in enumerate(cases)]


def checkered(*axes: Iterable[Any]) -> list[Any]:
    """Marks every other combination as wide, like the fields of a chessboard: each value meets half of the others."""
    fields = product(*(enumerate(axis) for axis in axes))
    return [
        case if sum(index for index, _ in field) % 2 == 0 else wide(case)
        for field in fields
        for case in [tuple(value for _, value in field)]
    ]


def diagonal(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Marks all but one of the combinations of each case of `first` as wide; the cases of `second` take turns."""
    others = list(second)
    return [
        (one, other) if row % len(others) == column else wide((one, other))
        for row, one in enumerate(first)
        for column, other in enumerate(others)
    ]


def wide(case: Any) -> Any:
    """Marks a case as one of `make wide`."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.wide)


def function_of(case: str) -> str:
    return case.partition("[")[0]


def one_case_of_each(cases: Iterable[str]) -> dict[str, str]:
    """Maps test functions to one of their cases: an arbitrary one, so that all kinds of cases are among those chosen.

    It is the same one in each run, and few functions get another when a case is added.
    """
    found: dict[str, str] = {}
    for case in cases:
        function = function_of(case)
        found[function] = min(found.get(function, case), case, key=lambda name: (crc32(name.encode()), name))
    return found


def listed() -> set[str]:
    return set(LIST.read_text().splitlines())


def relisted(before: set[str], seconds: Mapping[str, float]) -> set[str]:
    """The list after a run: files that ran are judged anew, but what took nearly as much as before stays listed."""
    chosen = one_case_of_each(seconds)
    files = {function.partition("::")[0] for function in chosen}
    kept = {function for function in before if function.partition("::")[0] not in files}
    slow = {f for f, case in chosen.items() if seconds[case] > (SLOW_S / 2 if f in before else SLOW_S)}
    return kept | slow


def cpu_s() -> float:
    return sum(os.times()[:4])


class Tiers:
    """The plugin of pytest: marks the slow tests, chooses the quick ones, measures both."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.listed = config, listed()
        self.seconds: dict[str, float] = {}  # of each case
        self.began_s = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if function_of(item.nodeid) in self.listed:
                item.add_marker(pytest.mark.slow)
        if self.config.getoption("--quick"):
            chosen = one_case_of_each(item.nodeid for item in items)
            quick = {case for function, case in chosen.items() if function not in self.listed}
            self.config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in quick])
            items[:] = [item for item in items if item.nodeid in quick]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.began_s = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":  # a worker of xdist sends it to the process that prints
            report.user_properties.append(("cpu_s", cpu_s() - self.began_s))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_s" and isinstance(value, float):
                self.seconds[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.getoption("--write-slow"):
            found = relisted(self.listed, self.seconds)
            LIST.write_text("".join(f"{function}\n" for function in sorted(found)))
            terminalreporter.write_line(f"{LIST.name} lists {len(found)} slow tests: {len(found - self.listed)} new")
        elif self.config.getoption("--quick"):
            slow = {case: s for case, s in self.seconds.items() if s > 2 * SLOW_S}
            for case in sorted(slow, key=lambda case: -slow[case]):
                terminalreporter.write_line(
                    f"slow for a quick test, {slow[case]:.1f} s of CPU: {case}; `make slow` lists it"
                )
