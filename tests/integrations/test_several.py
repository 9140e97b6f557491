"""Trainers in several processes: the bits of one process that has all micro-batches, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comparing import assert_same
from tests.integrations import several
from tests.integrations.runs import run
from tests.integrations.several import SCENARIOS, of_one_process, train_here
from tests.ranks.processes import Processes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("one_thread"),
]
FAST = ("accumulated", "dropout")


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    made = Processes(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    made = Processes(3)
    yield made
    made.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are split among threads, and each of the processes has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.users) for name in names]


def in_several(processes: Processes, name: str, folder: Path, *, streams: bool = True, **training: Any) -> list[Any]:
    found = processes.run(train_here, name, str(folder), streams, training)
    for each in found:
        assert not isinstance(each, BaseException), each
    return found


def in_one(name: str, size: int, folder: Path, **training: Any) -> dict[str, Any]:
    return several.left(run(of_one_process(name, size), folder, streams=True, **training))


def trained(found: dict[str, Any], start: int = 0) -> list[dict[str, Any]]:
    """What was logged of updates; how processes divide an evaluation isn't what one of them does."""
    return [row for row in found["log"] if row["step"] > start and not any("eval" in key for key in row)]


def assert_as_one(found: list[dict[str, Any]], expected: dict[str, Any], start: int = 0) -> None:
    for rank, each in enumerate(found):
        assert_same(each["values"], expected["values"], f"rank {rank}")
        logs = trained(each, start), trained(expected, start)
        assert logs[0] == logs[1] if start == 0 else logs[0][:-1] == logs[1][:-1], f"rank {rank}"
    assert_same(found[0]["generators"], expected["generators"])


@pytest.mark.parametrize("name", some([name for name in SCENARIOS if name not in ("saved", "best")], FAST))
def test_two_processes_train_with_the_bits_of_one(name: str, two: Processes, tmp_path: Path):
    found = in_several(two, name, tmp_path / "two")
    assert_as_one(found, in_one(name, 2, tmp_path / "one"))
