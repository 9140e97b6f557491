"""Hosts that each deal the blocks to their devices: all tables are safe, and together they never stand still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.check.devices_rules import check_devices
from megatrain.scheduler.check.hosts_rules import HostSums, check_hosts, host_sums
from megatrain.scheduler.op import Op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.dealing import deals, needed_waits, schedules
from tests.scheduler.hosts_machine import Hosts, numbers, totals_of_one_process
from tests.scheduler.mutations import mutants, with_cells, with_figures
from tests.scheduler.workloads import EMBED, LAYER, chain

CHOICES = st.tuples(st.integers(1, 3), st.sampled_from(["recompute", "keep", "offload"]))
PLACES = {2: ("first", "last"), 3: ("first", "middle", "last")}


@st.composite
def kinds(draw: st.DrawFn) -> list[StepKind]:
    """Of each of two or three hosts, which have micro-batches of their own."""
    of_all: dict[str, Any] = {
        "updates": draw(st.sampled_from(["none", "overlap", "serial"])),
        "clip": draw(st.booleans()),
        "outputs": "release",
        "transfer": draw(st.sampled_from(["copy", "copy", "bind"])),
    }
    places = PLACES[draw(st.integers(2, 3))]
    return [StepKind(**of_all, ranks=place, micro_batches=draw(st.integers(2, 4))) for place in places]


def tables(
    deal: tuple[Workload, list[int]], of_hosts: Sequence[StepKind], chosen: tuple[int, str]
) -> list[list[Schedule]]:
    return [schedules(*deal, kind, num_slots=chosen[0], activations=chosen[1]) for kind in of_hosts]


def check(hosts: Sequence[Sequence[Schedule]]) -> list[HostSums]:
    graphs = [check_devices(each) for each in hosts]
    found = [host_sums(*each) for each in zip(hosts, graphs, strict=True)]
    assert [HostSums.from_json(each.to_json()) for each in found] == found
    said = refused(found)
    assert has_circle(hosts, graphs) == ("in a circle" in said), said
    check_hosts(found)
    return found


def refused(hosts: Sequence[HostSums]) -> str:
    try:
        check_hosts(hosts)
    except ScheduleError as error:
        return str(error)
    return ""


def has_circle(hosts: Sequence[Sequence[Schedule]], graphs: Sequence[nx.DiGraph[Any]]) -> bool:
    """Whether hosts wait for each other, by all ops of all hosts."""
    whole: nx.DiGraph[Any] = nx.DiGraph()
    for number, (host, graph) in enumerate(zip(hosts, graphs, strict=True)):
        names: dict[Any, Any] = {}
        for node in graph:
            names[node] = number, node
            if isinstance(node, tuple):
                device, position = node
                op = host[device].ticks[position.tick][position.stream]
                block = numbers(host[device])[op.block] if op.what in "RPG" else 0
                joined = {"R": ("sum", number - 1, block), "P": ("sum", number, block), "G": ("total", block)}
                names[node] = joined.get(op.what, names[node])
        whole.add_edges_from((names[a], names[b]) for a, b in graph.edges)
    return not nx.is_directed_acyclic_graph(whole)


@draws(60, usual=8)
@given(deals(), kinds(), CHOICES, st.integers(0, 2**20))
def test_any_timing_adds_gradients_in_the_order_of_one_process(
    deal: tuple[Workload, list[int]], of_hosts: list[StepKind], chosen: tuple[int, str], seed: int
):
    assume(max(deal[1]) > 0)
    hosts = tables(deal, of_hosts, chosen)
    for schedule in (schedule for host in hosts for schedule in host):
        schedule.check()
        assert Schedule.parse(str(schedule), schedule.workload) == schedule
    check(hosts)
    expected = totals_of_one_process(deal[0], [kind.micro_batches for kind in of_hosts])
    for totals in Hosts(hosts).run(Random(seed)):
        assert totals == {block: terms for block, terms in expected.items() if block in totals}
        assert sorted(totals) == sorted(numbers(s)[op.block] for s in hosts[0] for op in s.ops if op.what == "G")


@draws(15)
@given(deals(), kinds(), CHOICES, st.integers(0, 2**20))
def test_a_table_that_differs_in_one_place_is_refused_or_harmless(
    deal: tuple[Workload, list[int]], of_hosts: list[StepKind], chosen: tuple[int, str], seed: int
):
    assume(max(deal[1]) > 0)
    hosts = tables(deal, of_hosts, chosen)
    number = seed % len(hosts)
    device = seed // 7 % len(hosts[number])
    expected = totals_of_one_process(deal[0], [kind.micro_batches for kind in of_hosts])
    all_mutants = [
        (name, mutant)
        for name, mutant in mutants(hosts[number][device], Random(seed))
        if name.removeprefix("without ")[0] in "RPG"
    ]
    for name, mutant in Random(seed).sample(all_mutants, min(50, len(all_mutants))):
        changed = [list(host) for host in hosts]
        changed[number][device] = with_figures(mutant)
        try:
            changed[number][device].check()
            check(changed)
        except ScheduleError:
            continue
        for further in range(3):
            try:
                for totals in Hosts(changed).run(Random(seed + further)):
                    assert totals == {block: terms for block, terms in expected.items() if block in totals}
            except AssertionError as harm:
                raise AssertionError(f"{name} passed the check, but {harm}") from None


def hosts_of(*micro_batches: int, devices: Sequence[int] = (0, 1, 0, 1, 0), updates: str = "overlap") -> list[Any]:
    """Five blocks dealt to two devices in turns, on several hosts."""
    whole = chain([EMBED, LAYER, LAYER, LAYER, EMBED])
    common: dict[str, Any] = {"updates": updates, "outputs": "release", "clip": updates == "serial"}
    of_hosts = [
        StepKind(**common, ranks=place, micro_batches=number)
        for place, number in zip(PLACES[len(micro_batches)], micro_batches, strict=True)
    ]
    return [schedules(whole, devices, kind, num_slots=2) for kind in of_hosts]


def test_a_host_in_the_middle_adds_its_sums_and_hands_them_on(golden: Callable[[str, str], None]):
    golden("dealt_hosts_schedules", "\n\n".join(map(str, hosts_of(2, 3, 2)[1])))


def test_hosts_wait_for_each_other_by_block():
    first, middle, last = check(hosts_of(2, 3, 2))
    assert (first.place, middle.place, last.place) == ("first", "middle", "last")
    assert first.devices == middle.devices == last.devices == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    assert {op[0] for op in first.waits} == {"P", "G"}
    assert {op[0] for op in last.waits} == {"R", "G"}
    assert first.waits["G", 4] == (("P", 4),)
    assert ("R", 4) in middle.waits["P", 4]


@pytest.mark.parametrize("host", [0, 1, 2])
@pytest.mark.parametrize("device", [0, 1])
def test_each_wait_of_a_sum_is_needed(host: int, device: int):
    schedule = hosts_of(2, 2, 3)[host][device]
    assert needed_waits(schedule, "RP") > 1


def exchanged(schedule: Schedule, what: str) -> Schedule:
    """The table with two ops of one letter exchanged."""
    one, other, *_ = [position for position, op in schedule.positions() if op.what == what]
    cells: dict[Position, Op | None] = {
        one: schedule.ticks[other.tick][other.stream],
        other: schedule.ticks[one.tick][one.stream],
    }
    return with_cells(schedule, cells)


@pytest.mark.parametrize(("host", "what"), [(0, "P"), (1, "R"), (1, "P"), (2, "R"), (2, "G")])
def test_another_order_of_sums_on_one_host_is_refused(host: int, what: str):
    hosts = hosts_of(2, 3, 2)
    hosts[host][0] = wrong = exchanged(hosts[host][0], what)
    with pytest.raises(ScheduleError):
        wrong.check()
    with pytest.raises(ScheduleError, match="hosts wait for each other in a circle") as caught:
        check(hosts)
    assert " waits for the " in str(caught.value)


def test_a_sum_that_waits_for_a_later_block_is_refused():
    hosts = hosts_of(2, 2)
    graphs = [check_devices(host) for host in hosts]
    at = {
        (number, str(op)): (device, position)
        for number, host in enumerate(hosts)
        for device, table in enumerate(host)
        for position, op in table.positions()
        if op.what in "RP"
    }
    graphs[1].add_edge(at[1, "R0"], at[1, "R1"])  # blocks 0 and 2, or 1 and 3, each on one device
    with pytest.raises((ScheduleError, nx.NetworkXUnfeasible)):
        check_hosts([host_sums(host, graph) for host, graph in zip(hosts, graphs, strict=True)])
    _, last = (host_sums(host, check_devices(host)) for host in hosts)
    first = host_sums(hosts[0], check_devices(hosts[0]))
    check_hosts([first, last])
    early = replace(first, waits={**first.waits, ("P", 4): (("G", 0),)})
    with pytest.raises(ScheduleError, match="the sum of block 4 from host 0 to 1 waits for the total of block 0"):
        check_hosts([early, last])


def test_hosts_that_are_not_of_one_step_are_refused():
    first, last = check(hosts_of(2, 3))
    other = check(hosts_of(2, 3, devices=(1, 0, 1, 0, 1)))[1]
    fewer = replace(last, devices={block: device for block, device in last.devices.items() if block})
    for hosts, what in (
        ([last, first], "the hosts stand as last, first"),
        ([first, first], "the hosts stand as first, first"),
        ([first, other], "block 0 is on device 1 of host 1, but on device 0 of host 0"),
        ([first, fewer], "host 1 adds up gradients of the blocks"),
        ([replace(first, waits={k: v for k, v in first.waits.items() if k != ("P", 2)}), last], "host 0 has no P of"),
        ([first, replace(last, waits={**last.waits, ("P", 1): ()})], "host 1 has a further P of block 1"),
    ):
        with pytest.raises(ScheduleError) as caught:
            check_hosts(hosts)
        assert str(caught.value).startswith(what), caught.value
    mixed = [hosts_of(2, 2)[0][0], hosts_of(2, 2)[1][1]]
    with pytest.raises(ScheduleError, match="the devices of a host are those of the first and of the last host"):
        host_sums(mixed, check_devices(mixed))


@pytest.mark.parametrize("options", [{"micro_batches": 1}, {"micro_batches": 2, "store": "shared"}])
def test_a_kind_of_step_that_hosts_cannot_take_is_refused(options: dict[str, Any]):
    with pytest.raises(OptionError, match="is impossible"):
        StepKind(updates="overlap", devices=2, ranks="first", **options)
