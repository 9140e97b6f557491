"""Which of the three ways to divide a step among devices a plan takes: weights whole, in shards, or dealt blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from tests.planning.test_several_devices import ONLY_COMPUTE, planned, replicated
from tests.tiers import wide

RATES = ((1e6, "1TB"), (1e6, "1kB"), (1e7, "20MB"), (1e9, "1TB"))
CASES = tuple((*rates, micro_batches) for rates in RATES for micro_batches in (1, 4))


@pytest.mark.parametrize("cases", [(CASES[0], *CASES[5:7]), wide((CASES,))], ids=["some", "all"])
def test_the_shortest_step_of_the_three_ways_is_taken_of_those_that_the_host_feeds(
    cases: Sequence[tuple[float, str, int]],
):
    fast = Hardware(1e9, 1e9, 1e9, host_bytes_per_s=1e12)
    ways = ("replicate", "shard", "round")
    taken: set[str] = set()
    for bus, link, micro_batches in cases:
        machine = replace(fast, h2d_bytes_per_s=bus)
        plan = planned(machine, 12, micro_batches=micro_batches)
        made = {way: plan.on_devices(4, link=None if way == "round" else link, across_devices=way) for way in ways}
        assert [each.across_devices for each in made.values()] == list(ways)
        best = plan.on_devices(4, link=link)
        fed = [each.step_s for each in made.values() if not each.is_refused]
        # Where compute holds the step up, a further way is not planned: it could gain 2 % at most.
        assert best.step_s <= 1.02 * min(fed)
        assert best.step_s == made[best.across_devices].step_s
        assert not best.is_refused
        taken.add(best.across_devices)
    assert taken == set(ways)


def test_blocks_are_dealt_where_the_host_cannot_feed_whole_weights():
    plan = planned(Hardware(1e9, 1e9, 1e9, host_bytes_per_s=2e8))
    assert replicated(plan, 4).is_refused
    found = plan.on_devices(4)
    assert found.across_devices == "round"
    found.check()


def test_shards_need_links():
    for machine, wrong in (
        (ONLY_COMPUTE, {}),
        (ONLY_COMPUTE, {"link": "none"}),
        (Hardware.preset("a100"), {"num_hosts": 4}),
    ):
        with pytest.raises(OptionError, match='across_devices="shard" is impossible'):
            planned(machine).on_devices(4, across_devices="shard", **wrong)  # type: ignore[arg-type]
