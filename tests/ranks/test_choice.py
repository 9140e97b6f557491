"""What ranks agree on before the first step: weights whole or in shards (`"auto"`), and room on their host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comparing import assert_same
from tests.ranks.choosing import choosing, failing_to_choose, lacking_room, measuring
from tests.ranks.processes import Processes
from tests.ranks.sides import Case, train
from tests.ranks.there import train_alone_there
from tests.tiers import wide

DEAL = ((1, 1, 1), (2, 1, 3), (1, 2, 1))
AUTO: dict[str, Any] = {"across_devices": "auto", "transfer": "copy"}
SLOW, FAST = 1e5, 1e12


def rates(*each: float) -> dict[int, float]:
    return dict(enumerate(each))


@pytest.mark.parametrize(
    ("task", "links", "buses", "shards"),
    [
        ("tied", (FAST, FAST, FAST), (SLOW, SLOW, SLOW), 3),
        wide(("tied", (SLOW, SLOW, SLOW), (FAST, FAST, FAST), 1)),
        # The slowest link of all counts.
        wide(("tied", (FAST, SLOW, FAST), (FAST, FAST, FAST), 1)),
        # One rank would be faster with whole weights; the longest step of each way counts.
        wide(("adapted", (FAST, FAST, FAST), (FAST, SLOW, SLOW), 3)),
        ("branching", (FAST, FAST, FAST), (SLOW, SLOW, SLOW), 1),
    ],
)
def test_ranks_take_the_way_that_is_faster_with_the_bits_of_one_process(
    task: str, links: tuple[float, ...], buses: tuple[float, ...], shards: int, devices: Processes
):
    case = Case(task, "deferred", DEAL, order="late", compile=AUTO, draws=True)
    found = devices.run(choosing, case, rates(*links), rates(*buses))
    assert all(not isinstance(each, BaseException) for each in found), found
    assert [each["shards"] for each in found] == [[shards]] * 3  # it is chosen once
    assert len({text for each in found for text in each["texts"]}) == 1
    text = found[0]["texts"][0]
    assert text.startswith("shard: a step is predicted" if shards > 1 else "replicate")
    assert ("since Python code reads values" in text) == (task == "branching")
    expected, *_ = devices.run(train_alone_there, Case(task, "deferred", DEAL, order="late", draws=True))
    for rank, each in enumerate(found):
        assert_same({key: expected[key] for key in each["found"]}, each["found"], f"rank {rank}")


def test_links_are_measured_and_a_second_training_step_takes_the_same_way(three: Processes):
    found = three.run(measuring, Case("tied", "spread", DEAL, compile=AUTO))
    assert all(not isinstance(each, BaseException) for each in found), found
    assert all(each["rate"] == found[0]["rate"] > 0 for each in found)
    for each in found:
        assert "weights across devices whole or in shards, whichever is faster" in each["before"]
        assert "a step is predicted to take" not in each["before"]
        assert "/s from the others of its host, measured" in each["after"]
        assert ("weights across devices: shard" in each["after"]) == (each["shards"] == 3)


@pytest.mark.parametrize("hosts", ["aba", wide("abc")])
def test_where_a_rank_has_its_host_to_itself_weights_come_whole(hosts: str, three: Processes):
    found = three.run(measuring, Case("tied", "spread", DEAL, compile=AUTO, hosts=hosts))
    assert [(each["rate"], each["shards"]) for each in found] == [(None, 1)] * 3


def test_a_rank_that_finds_no_schedule_is_named_and_the_next_step_chooses(three: Processes):
    case = Case("tied", "spread", DEAL, compile=AUTO)
    found = three.run(failing_to_choose, case)
    assert all(not isinstance(each, BaseException) for each in found), found
    assert "no room here" in found[1]["error"]
    assert all("rank 1" in found[rank]["error"] for rank in (0, 2))
    expected = train(case, None, None)
    for rank, each in enumerate(found):
        assert_same({key: expected[key] for key in each["found"]}, each["found"], f"rank {rank}")


def test_ranks_that_their_host_has_no_room_for_are_refused_before_anything_is_allocated(three: Processes):
    case = Case("tied", "deferred", DEAL)
    found = three.run(lacking_room, case)
    assert all(not isinstance(each, BaseException) for each in found), found
    for each in found:
        assert each["error"].startswith("ExecuteError: 3 ranks of one host need "), each["error"]
        assert "1 B are missing" in each["error"]
        assert each["is_untouched"]
        assert each["needed"] == found[0]["needed"]
    expected = train(case, None, None)
    for rank, each in enumerate(found):
        assert_same({key: expected[key] for key in each["found"]}, each["found"], f"rank {rank}")
