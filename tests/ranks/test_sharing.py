"""Ranks of one host have one store: what is in it, what that saves, who waits for whom, and what users may write."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.ranks.shared_memory import PAGE, SharedMemory, can_tell_copies
from tests.comparing import assert_same
from tests.nightly import nightly
from tests.ranks.processes import Processes
from tests.ranks.sharing import (
    CASE,
    UPDATED,
    Wide,
    failing_update,
    forking,
    held,
    measured,
    planned,
    slow,
    writing_alone,
)
from tests.ranks.sides import Case, begin, state_of, take

SERIAL_CLIPPED: dict[str, object] = {"max_grad_norm": 1.0, "overlap": False}
needs_files = pytest.mark.skipif(not can_tell_copies(), reason="the system has no such memory")
pytestmark = needs_files


def test_shared_memory_is_one_with_copies_of_what_each_writes_on_its_own():
    one = SharedMemory.made()
    other = SharedMemory.opened(one.address)
    with one.locked():
        offset, start = one.take(PAGE + 1)
        one.post({"at": [offset, start]})
    with other.locked():
        assert [list(other.news()), list(other.news())] == [[{"at": [offset, start]}], []]
        assert other.take(1) != (offset, start)
    mine, theirs = (each.region(offset, one.region_bytes(offset)) for each in (one, other))
    mine.shared[start] = 7
    assert theirs.private[start] == theirs.shared[start] == 7
    theirs.private[start + PAGE] = 9
    assert (mine.private[start + PAGE], theirs.is_written(start, PAGE), theirs.is_written(start, PAGE + 1)) == (0, 0, 1)
    theirs.drop(start, PAGE + 1)
    assert (theirs.private[start + PAGE], theirs.is_written(start, PAGE + 1)) == (0, 0)


@pytest.mark.nightly
def test_ranks_of_one_host_share_parameters_moments_and_masters(three: Processes):
    found = three.run(held, CASE)
    for each in found:
        assert (each["shares"], each["parameters"], each["moments"]) == (True, True, True)
        assert each["lows"] > 0
    updated = [name for each in found for name in each["updated"]]
    assert len(updated) == len(set(updated)), "each parameter is updated by one rank"
    assert all(each["updated"] for each in found), "each rank updates some"


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_a_plan_of_these_ranks_or_of_a_process_alone_is_taken_by_ranks(mode: str, three: Processes):
    """The ops that wait for others are put into a plan that has none."""
    for plain, *others in three.run(planned, replace(CASE, mode=mode)):
        for other in others:
            assert_same(plain, other, "a step with a plan")


@pytest.mark.nightly
def test_state_that_cannot_be_shared_leaves_each_rank_its_own_store(three: Processes):
    rounded = replace(CASE, compile={"precision": "bf16", "masters": "rounded"})
    assert [each["shares"] for each in three.run(held, rounded)] == [False] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["overlap", "spread", nightly("serial"), nightly("deferred")])
def test_ranks_wait_for_a_slow_update_of_another(mode: str, three: Processes):
    case = Case("tied", mode, [(1, 1, 1)] * 3)
    expected = take(case, None, begin(case)[2], range(3))["losses"]
    for found in three.run(slow, mode):
        assert_same(expected, found, "losses")


@pytest.mark.nightly
@pytest.mark.parametrize("times", [1, 2])
def test_an_update_that_fails_leaves_no_trace_and_is_made_with_the_next_step(times: int, three: Processes):
    found = three.run(failing_update, times)
    assert re.fullmatch(r"ExecuteError: host:U\d failed: ValueError: no update today", found[1][0]), found
    compiled, optimizer, step = begin(UPDATED)
    expected = {"losses": take(UPDATED, None, step, range(3))["losses"][1:], **state_of(compiled, optimizer, step)}
    for text, state in found[::2]:
        # A rank hears of it from the store, or from any rank that has heard of it before.
        assert re.match(r"RanksError: rank \d failed before the step|ExecuteError: peers:V", text), text
        del state["norms"]
        assert_same({name: expected[name] for name in state}, state, "state")


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["parameter", "moment"])
def test_what_one_rank_alone_writes_is_refused_and_named(what: str, three: Processes):
    for first, then in three.run(writing_alone, what):
        name = "`embedding.weight`" if what == "parameter" else "`exp_avg` of `embedding.weight` in optimizer 0"
        assert first.startswith(f"RanksError: the ranks differ: the value of {name} is as it was on rank 0, but "), (
            first
        )
        assert then == ""


@pytest.mark.nightly
def test_a_forked_process_makes_no_update_that_others_would_see_and_sees_none(three: Processes):
    for (text, status), (_, later) in three.run(forking):
        assert (text.partition("\n")[0], status) == (
            "ExecuteError: updates are due, and a forked process can't make them.",
            0,
        )
        assert os.WTERMSIG(later) == signal.SIGSEGV


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("transfer", "options"),
    [("auto", {}), ("copy", SERIAL_CLIPPED)],
    ids=["overlap", "serial-clipped-copied"],
)
def test_host_memory_of_three_ranks_is_that_of_one_and_their_landed_gradients(
    transfer: str, options: dict[str, object], three_anew: Callable[[], Processes]
):
    num, size = 256, 3  # what the C library keeps of freed memory, some MB more or less, is far below 3 % of that
    totals: dict[bool, int] = {}
    for is_apart in (True, False):
        processes = three_anew()
        found = processes.run(measured, num, transfer, options, is_apart)
        totals[is_apart], shared = (sum(each) for each in zip(*found, strict=True))
    state = 3 * sum(p.nbytes for p in Wide(num).parameters())
    gradients = state // 3
    # A process alone has its gradients where they land, if copies bring them there; else they go as they are used.
    per_device = (totals[True] - size * state) / size - gradients * (transfer == "copy")
    expected = state + size * (per_device + gradients)
    print(f"state {state}, per device {per_device:.0f}; {totals}, of which {shared} shared; expected {expected:.0f}")
    assert abs(shared - state) <= 0.03 * state
    assert abs(totals[False] - expected) <= 0.03 * expected
