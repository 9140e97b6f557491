"""Steps of several devices of one host on paper: who waits for whom, and what the host's memory feeds."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, LowerError, MegatrainError, OptionError, ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.planning.what_if.devices_host import sent_bytes
from megatrain.planning.what_if.devices_plan import DevicesPlan
from megatrain.planning.what_if.several_devices import _on_devices, hosts_of, on_devices
from megatrain.reporting.ranks_figures import figures_of_plan
from megatrain.scheduler.timing.dealt_waits import waits_of
from megatrain.scheduler.timing.rank_waits import books_of_ranks
from megatrain.scheduler.timing.simulate_devices import ONE_HOST, Hosts, simulate_devices
from tests.tiers import diagonal, wide

# Copies and updates take no time, so that the order of sums is all that ranks wait for.
ONLY_COMPUTE = Hardware(1e30, 1e30, 1e9)


def planned(machine: Hardware, num_layers: int = 4, **options: object) -> megatrain.Plan:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(num_layers)])
    asked = {"optimizer": "SGD", "hardware": machine, "micro_batches": 2, **options}
    return megatrain.plan(model, torch.zeros(32, 64), **asked)  # type: ignore[arg-type]


def replicated(plan: megatrain.Plan, number: int, hosts: Hosts = ONE_HOST, link: str | None = None) -> DevicesPlan:
    """Each device streams all weights."""
    return on_devices(plan, number, hosts, link, "replicate")


@pytest.mark.parametrize(("number", "micro_batches"), diagonal([2, 3, 5], [1, 2, 4]))
def test_a_rank_is_further_micro_batches_of_one_block_behind_the_one_before_it(number: int, micro_batches: int):
    plan = planned(ONLY_COMPUTE, micro_batches=micro_batches)
    found = replicated(plan, number)
    simulation = plan.simulation
    assert simulation is not None
    # A rank's first micro-batch waits for nobody; its second waits for the last one of the rank before.
    whats = {position: op.what for position, op in plan.schedule.positions()}
    block = max(t.end_s - t.start_s for t in simulation.timeline if whats[t.position] == "B")
    assert found.step_s == pytest.approx(found.alone_s + (number - 1) * (micro_batches - 1) * block, rel=1e-6)
    assert found.alone_s == simulation.step_s


def test_links_are_each_rank_s_own_and_the_host_s_memory_is_all_of_theirs():
    slow_links = Hardware(1e6, 1e6, 1e15)
    plan = planned(slow_links, 8)
    alone, both = (replicated(plan, number).step_s for number in (2, 4))
    assert both < 1.5 * alone
    plan = planned(replace(slow_links, host_bytes_per_s=1e6), 8)
    found = {number: replicated(plan, number) for number in (2, 4)}
    for number, each in found.items():
        assert each.step_s >= each.simulation.host_s * (1 - 1e-9)
        assert each.simulation.host_bytes > number * 2 * plan_bytes(plan)
    assert found[4].step_s > 1.5 * found[2].step_s


def plan_bytes(plan: megatrain.Plan) -> int:
    return plan.schedule.h2d_bytes // 2


def several_devices_error(several: DevicesPlan) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        several.check()
    return caught.value


def test_a_host_that_feeds_fewer_devices_is_named_with_its_figure():
    machine = Hardware(1e9, 1e9, 1e9, host_bytes_per_s=2e8)
    plan = planned(machine)
    several = replicated(plan, 8)
    with pytest.raises(ScheduleError, match=r"the host's memory can't feed 8 devices: copies and updates take .* "):
        several.check()
    assert "  Of these devices each streams all weights, and gradients go" in str(several_devices_error(several))
    assert "devices with links between them may gather weights (link)" in str(several_devices_error(several))
    linked = _on_devices(plan, 8, ONE_HOST, replace(machine, further_rates={"gather": 2 << 30}), 8)
    text = str(several_devices_error(linked))
    assert "each copies 1/8 of all weights and gathers the rest at 2.00 GiB/s, and gradients go" in text
    assert "(link)" not in text
    fed = replace(machine, host_bytes_per_s=1e15)
    found = replicated(planned(fed), 8)
    found.check()
    assert "devices: 8 of one host, each streams all weights (replicate); predicted" in str(found)
    assert f"{found.efficiency:.2f} of what as many devices alone would do" in str(found)


def test_no_wait_of_another_rank_is_left_out():
    """Each rank's step alone is shorter than that of all of them, and the step is at least what the chain takes."""
    machine = Hardware(1e7, 1e7, 1e9, host_bytes_per_s=1e8)
    found = replicated(planned(machine, 6), 4)
    alone = [each.schedule.simulate(machine).step_s for each in found.ranks]
    assert found.step_s > max(alone)
    tables = [each.schedule for each in found.ranks]
    with pytest.raises(OptionError, match="doesn't have the first rank first"):
        simulate_devices(tables[::-1], machine)
    faster = simulate_devices(tables, replace(machine, host_bytes_per_s=inf))
    assert faster.step_s < found.step_s


def test_a_network_between_hosts_is_waited_for():
    machine = Hardware(1e7, 1e7, 1e12, host_bytes_per_s=1e12)
    plan = planned(machine, 6)
    near = replicated(plan, 4)
    fast, slow = (replicated(plan, 4, hosts_of(2, network)) for network in ("1TB", "10kB"))
    assert "devices: 4 of one host, each" in str(near)
    assert "devices: 2 of each of 2 hosts, 9.77 KiB/s between them" in str(slow)
    assert fast.step_s == pytest.approx(near.step_s, rel=0.01)
    # Sums cross one way, and totals the other way, the last of them behind the last sum.
    sizes = [work.gradient_bytes for work in plan.schedule.known_workload().blocks]
    assert slow.step_s == pytest.approx((sum(sizes) + sizes[0]) / 10_000 + near.step_s, rel=0.01)
    assert near.simulation.host_bytes > fast.simulation.host_bytes > near.simulation.host_bytes / 4


def test_hosts_have_as_many_devices_each():
    with pytest.raises(OptionError, match="2 hosts can't have as many of 5 devices each"):
        planned(ONLY_COMPUTE).on_devices(5, 2)
    with pytest.raises(OptionError, match="network='25GB' says nothing about one host"):
        planned(ONLY_COMPUTE).on_devices(4, network="25GB")


def test_a_plan_without_a_machine_has_no_seconds():
    model = nn.Linear(4, 4)
    plan = megatrain.plan(model, torch.zeros(2, 4), optimizer="SGD")
    with pytest.raises(MegatrainError, match="it has no machine"):
        replicated(plan, 2)


def test_the_plan_says_tokens_of_all():
    found = replicated(planned(ONLY_COMPUTE), 2)
    assert isinstance(found, DevicesPlan)
    assert found.tokens_per_s is None


def test_devices_with_links_get_weights_in_shards_where_that_is_faster():
    # Copies of weights hold the step up: each device brings a quarter of them, and links are no limit.
    slow = Hardware(1e6, 1e9, 1e12, host_bytes_per_s=1e12)
    plan = planned(slow, 12, micro_batches=1)
    whole, dealt, linked, useless = replicated(plan, 4), *(plan.on_devices(4, link=x) for x in ("none", "1TB", "1kB"))
    ways = [each.across_devices for each in (whole, dealt, linked, useless)]
    assert ways == ["replicate", "round", "shard", "round"]
    assert "4 of one host, each copies 1/4 of all weights and gathers the rest at 931.32 GiB/s (shard)" in str(linked)
    assert whole.step_s > useless.step_s == dealt.step_s > linked.step_s
    busy = [each.simulation.busy["h2d"] * each.step_s for each in (whole, linked)]
    assert busy[1] < busy[0] / 2
    assert whole.simulation.host_bytes > linked.simulation.host_bytes
    for each in linked.ranks:
        each.schedule.check()


def test_all_devices_of_a_host_gather_at_the_same_time():
    machine = Hardware(1e7, 1e7, 1e12, host_bytes_per_s=1e12)
    found = planned(machine, 6).on_devices(4, 2, link="20MB")
    assert found.across_devices == "shard"
    assert found.ranks[0].schedule.kind.shards == 2
    begun: list[list[float]] = []
    for rank, timeline in zip(found.ranks, found.simulation.timelines, strict=True):
        ops = dict(rank.schedule.positions())
        begun.append([timing.start_s for timing in timeline if ops[timing.position].what == "C"])
    # Those of one host begin together; hosts wait for each other only with their sums.
    assert begun[0] == begun[1]
    assert begun[2] == begun[3]


def test_a_link_is_between_devices_of_a_host():
    with pytest.raises(OptionError, match="link='1TB' says nothing about hosts of one device"):
        planned(ONLY_COMPUTE).on_devices(4, 4, link="1TB")


@pytest.mark.parametrize("number", [wide(2), 4])
def test_ranks_of_a_host_share_one_copy_of_what_is_updated(number: int):
    plan = planned(ONLY_COMPUTE, max_grad_norm=1.0, optimizer="AdamW")
    found, alone = replicated(plan, number), plan.host
    largest = 4 * (64 * 64 + 64)  # the gradients of a layer
    shared = sum(map(alone.bytes_of, ("parameters", "AdamW", "gradients")))
    assert found.host.shared_bytes == shared >= 4 * 4 * largest
    assert found.host.room_bytes == (number - 1) * 2 * largest
    own = [each.host.total_bytes - shared for each in found.ranks]
    assert found.host.total_bytes == shared + sum(own) + found.host.room_bytes
    assert found.host.own_bytes == max(own)
    assert "host memory: " in str(found)
    assert "All share " in str(found)


def test_gradients_that_leave_at_once_are_each_rank_s_own():
    found = replicated(planned(ONLY_COMPUTE, optimizer="AdamW"), 3)
    gradients = [each.host.bytes_of("gradients") for each in found.ranks]
    assert min(gradients) > 0
    assert found.host.own_bytes >= max(gradients)
    # Two pairs of neighbours, and the totals on their way back.
    assert found.host.room_bytes == 3 * 2 * 4 * (64 * 64 + 64)


def test_two_hosts_have_a_copy_each():
    plan = planned(ONLY_COMPUTE, max_grad_norm=1.0)
    one, two = replicated(plan, 4), replicated(plan, 4, hosts_of(2, None))
    assert two.host.num_ranks == 2
    assert two.host.shared_bytes == one.host.shared_bytes
    assert two.host.total_bytes < one.host.total_bytes


def test_ranks_with_rounded_masters_share_nothing_and_make_all_updates():
    machine = Hardware(1e9, 1e9, 1e12, host_bytes_per_s=1e6)
    rounded, exact = (
        replicated(planned(machine, optimizer="AdamW", precision="bf16", masters=masters), 2, link=link)
        for masters, link in (("rounded", "1TB"), ("exact", None))
    )
    assert rounded.host.shared_bytes == 0
    assert rounded.host.total_bytes == sum(each.host.total_bytes for each in rounded.ranks) + rounded.host.room_bytes
    assert rounded.across_devices == "replicate"
    assert rounded.step_s > 1.3 * exact.step_s
    assert "they share nothing" in str(rounded)
    for way in ("shard", "round"):
        with pytest.raises(OptionError, match=f'across_devices="{way}" with masters="rounded" is impossible'):
            on_devices(rounded.alone, 2, link="1TB", across_devices=way)


def test_ranks_that_need_more_memory_than_their_host_has_are_refused():
    plan = planned(ONLY_COMPUTE, max_grad_norm=1.0, optimizer="AdamW")
    needed = replicated(plan, 4).host.total_bytes
    enough, short = (replace(plan, host_memory=nbytes) for nbytes in (needed, needed - 1))
    replicated(enough, 4).check()
    with pytest.raises(ExecuteError, match=r"4 ranks of one host need .* of its memory") as caught:
        replicated(short, 4).check()
    assert "Use fewer devices" in str(caught.value)


def test_boards_of_the_table_that_have_links_gather_by_them():
    has_links = [name for name in Hardware.presets() if "gather" in Hardware.preset(name).further_rates]
    assert has_links == ["a100", "h100-sxm", "h200", "b200"]
    slow_bus = replace(Hardware.preset("h100-sxm"), h2d_bytes_per_s=1e6)
    plan = planned(slow_bus, 8)
    assert on_devices(plan, 4).across_devices == "shard"
    assert on_devices(plan, 4, link="none").across_devices == "round"  # no links: each streams its own blocks
    assert on_devices(plan, 2, hosts_of(2, None)).across_devices == "replicate"  # a device has its host to itself
    assert on_devices(planned(replace(slow_bus, further_rates={})), 4).across_devices == "round"
    with pytest.raises(OptionError, match="link"):
        plan.on_devices(4, link="fast")


def test_dealt_blocks_keep_all_devices_at_work():
    plan = planned(ONLY_COMPUTE, 8, micro_batches=4)
    found = plan.on_devices(4, across_devices="round")
    assert [each.schedule.kind.micro_batches for each in found.ranks] == [16] * 4
    assert sum(each.schedule.num_blocks for each in found.ranks) == plan.schedule.num_blocks
    assert 0.85 < found.efficiency <= 1.0
    assert found.across_devices == "round"
    lines = str(found).splitlines()
    assert lines[0].endswith(
        "each streams the weights of its own blocks, and micro-batches go from one to the next (round); predicted"
    )
    weights = [each.schedule.h2d_bytes for each in found.ranks]
    assert sum(weights) <= 2 * plan.schedule.h2d_bytes


def test_each_host_deals_the_blocks_to_its_devices():
    plan = planned(ONLY_COMPUTE, 12, micro_batches=4)
    one, several = (plan.on_devices(2 * hosts, hosts, across_devices="round") for hosts in (1, 3))
    kinds = [each.schedule.kind for each in several.ranks]
    assert [kind.ranks for kind in kinds] == ["first"] * 2 + ["middle"] * 2 + ["last"] * 2
    assert {(kind.micro_batches, kind.devices) for kind in kinds} == {(8, 2)}
    assert several.tokens_per_s is None or one.tokens_per_s is None
    assert 0.8 * one.efficiency < several.efficiency <= one.efficiency
    assert str(several).startswith("devices: 2 of each of 3 hosts, ")
    slow = plan.on_devices(4, 2, network="1KB", across_devices="round")
    assert slow.step_s > 1.5 * plan.on_devices(4, 2, network="1TB", across_devices="round").step_s
    # What goes from host to host has a room for each way.
    rooms = [sent_bytes(number % 2, each.schedule) for number, each in enumerate(several.ranks)]
    largest = max(block.landing_bytes for block in several.ranks[0].schedule.known_workload().blocks)
    assert rooms[2] - rooms[0] == rooms[2] - rooms[4] == largest
    pieces = waits_of(books_of_ranks([each.schedule for each in several.ranks]), [0, 0, 1, 1, 2, 2]).pieces
    assert {(place[0], before[0]) for place, before in pieces.items()} == {(2, 0), (3, 1), (4, 2), (5, 3)}
    with pytest.raises(OptionError, match="4 tables of 2 devices each can't be on 1 host"):
        simulate_devices([each.schedule for each in slow.ranks], ONLY_COMPUTE)
    assert "6 devices" in figures_of_plan(several).verdict[0]


def test_blocks_are_dealt_within_a_host():
    plan = planned(ONLY_COMPUTE)
    for wrong in ({"num_hosts": 4}, {"link": "none"}):
        with pytest.raises(OptionError, match='across_devices="round" with num_devices=4, num_hosts='):
            plan.on_devices(4, across_devices="round", **wrong)  # type: ignore[arg-type]
    with pytest.raises(LowerError, match="can't be dealt to 64 devices"):
        plan.on_devices(64, across_devices="round")


def test_clipped_steps_of_dealt_blocks_wait_for_one_norm():
    found = planned(ONLY_COMPUTE, max_grad_norm=1.0).on_devices(2, across_devices="round")
    assert {each.schedule.kind.updates for each in found.ranks} == {"serial"}
    assert found.host.total_bytes < 2 * found.alone.host.total_bytes + (1 << 20)
