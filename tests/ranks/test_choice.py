"""What ranks agree on before the first step: weights whole or in shards (`"auto"`), and room on their host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comparing import assert_same
from tests.ranks.choosing import (
    choosing,
    failing_to_choose,
    interrupted_choice,
    kept_from_dealing,
    lacking_room,
    measuring,
    sharing_a_choice,
)
from tests.ranks.processes import Processes
from tests.ranks.shared_processes import processes_fixture
from tests.ranks.sides import Case, train
from tests.ranks.there import train_alone_there
from tests.tiers import wide

DEAL = ((1, 1, 1), (2, 1, 3))
AUTO: dict[str, Any] = {"across_devices": "auto", "transfer": "copy"}
SLOW, FAST = 1e5, 1e12


NO_LINKS = None, None, None


processes = processes_fixture(3, "function")


def rates(*each: float | None) -> dict[int, float | None]:
    return dict(enumerate(each))


@pytest.mark.parametrize(
    ("task", "links", "buses", "way"),
    [
        ("tied", (FAST, FAST, FAST), (SLOW, SLOW, SLOW), "shard"),
        wide(("tied", (SLOW, SLOW, SLOW), (FAST, FAST, FAST), "replicate")),
        # The slowest link of all counts.
        wide(("tied", (FAST, SLOW, FAST), (FAST, FAST, FAST), "replicate")),
        # One rank would be faster with whole weights; the longest step of each way counts.
        wide(("adapted", (FAST, FAST, FAST), (FAST, SLOW, SLOW), "shard")),
        ("branching", (FAST, FAST, FAST), (SLOW, SLOW, SLOW), "replicate"),
        ("scored", NO_LINKS, (SLOW, SLOW, SLOW), "round"),
        wide(("scored", NO_LINKS, (SLOW, FAST, FAST), "round")),
        wide(("scored", (SLOW, SLOW, SLOW), (SLOW, SLOW, SLOW), "round")),
        wide(("scored", NO_LINKS, (FAST, FAST, FAST), "replicate")),
        # Adapters are small beside what goes from block to block.
        wide(("lora", NO_LINKS, (SLOW, SLOW, SLOW), "replicate")),
    ],
)
def test_ranks_take_the_way_that_is_faster_with_the_bits_of_one_process(
    task: str, links: tuple[float | None, ...], buses: tuple[float, ...], way: str, devices: Processes
):
    case = Case(task, "deferred", DEAL, order="late", compile=AUTO, draws=True)
    found = devices.run(choosing, case, rates(*links), rates(*buses))
    assert all(not isinstance(each, BaseException) for each in found), found
    assert [each["ways"] for each in found] == [[way]] * 3, found[0]["texts"]  # it is chosen once
    assert len({text for each in found for text in each["texts"]}) == 1
    text = found[0]["texts"][0]
    assert text.startswith(f"{way}: a step is predicted to take ")
    assert ("no shards, since Python code reads values" in text) == (task == "branching")
    assert ("no dealt blocks, since loss= would" in text) == (task not in ("scored", "lora"))
    assert ("; nothing moves memory from one of these devices to another" in text) == (links == NO_LINKS)
    expected, *_ = devices.run(train_alone_there, Case(task, "deferred", DEAL, order="late", draws=True))
    for rank, each in enumerate(found):
        assert_same({key: expected[key] for key in each["found"]}, each["found"], f"rank {rank}")


def test_links_are_measured_and_a_second_training_step_takes_the_same_way(three: Processes):
    found = three.run(measuring, Case("tied", "spread", DEAL, compile=AUTO))
    assert all(not isinstance(each, BaseException) for each in found), found
    assert all(each["rate"] == found[0]["rate"] > 0 for each in found)
    for each in found:
        assert "work divided among devices as the first step finds fastest" in each["before"]
        assert "a step is predicted to take" not in each["before"]
        assert "/s from the others of its host, measured" in each["after"]
        assert ("\n  across devices: shard" in each["after"]) == (each["kind"].shards == 3)


@pytest.mark.parametrize("hosts", ["aba", wide("abc")])
def test_where_a_rank_has_its_host_to_itself_weights_come_whole(hosts: str, three: Processes):
    found = three.run(measuring, Case("tied", "spread", DEAL, compile=AUTO, hosts=hosts))
    assert [(each["rate"], each["kind"].shards) for each in found] == [(None, 1)] * 3
    assert not any("across devices:" in each["after"] for each in found)


@pytest.mark.parametrize("hosts", ["aaa", wide("aabb")])
def test_training_steps_made_before_and_after_the_choice_deal_blocks(hosts: str, request: pytest.FixtureRequest):
    processes: Processes = request.getfixturevalue({"aaa": "three", "aabb": "four"}[hosts])
    found = processes.run(sharing_a_choice, hosts)
    assert all(not isinstance(each, BaseException) for each in found), found
    expected = sharing_a_choice(None, hosts)
    for rank, each in enumerate(found):
        assert each.pop("text").count("\n  across devices: round: a step is predicted to take ") == 1
        assert each.pop("devices") == [hosts.count("a")] * 4
        assert_same({key: expected[key] for key in each}, each, f"rank {rank}")


@pytest.mark.parametrize(
    ("what", "obstacle"),
    [
        ("hook", "hooks on parameters would run on one rank"),
        wide(("step hook", "hooks run before or after the optimizer's step, and the blocks are dealt to devices")),
        wide(("class", "a micro-batch can't be given to other ranks: PicklingError: Can't pickle <class '")),
    ],
)
def test_blocks_are_not_dealt_where_that_is_impossible(what: str, obstacle: str, three: Processes):
    found = three.run(kept_from_dealing, what)
    assert [each.count(f"; no dealt blocks, since {obstacle}") for each in found] == [1, 1, 1], found
    assert all(each.startswith("replicate: ") for each in found), found


def test_a_rank_that_finds_no_schedule_is_named_and_the_next_step_chooses(three: Processes):
    case = Case("tied", "spread", DEAL, compile=AUTO)
    found = three.run(failing_to_choose, case)
    assert all(not isinstance(each, BaseException) for each in found), found
    assert "no room here" in found[1]["error"]
    assert all("rank 1" in found[rank]["error"] for rank in (0, 2))
    expected = train(case, None, None)
    for rank, each in enumerate(found):
        assert_same({key: expected[key] for key in each["found"]}, each["found"], f"rank {rank}")


def test_all_ranks_hear_of_ctrl_c_while_they_choose(processes: Processes):
    found = processes.run(interrupted_choice, Case("tied", "spread", DEAL, compile=AUTO))
    assert found[1][0] == "KeyboardInterrupt"
    assert "no longer at the same step" in found[1][1], found
    for rank in (0, 2):
        assert all("rank 1 failed: KeyboardInterrupt" in text for text in found[rank]), found


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
