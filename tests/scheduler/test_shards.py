"""Weights that come in shards: which tables are refused, one order on all ranks, and no circle."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import networkx as nx
import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import OptionError, ScheduleError
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.gather_rules import check_gathers
from megatrain.scheduler.check.schedule_rules import check_schedule
from megatrain.scheduler.dependency import dependency_graph, derive_waits
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from megatrain.sizes import gathered_bytes
from tests.draws import draws
from tests.scheduler import gathering
from tests.scheduler.ledger import Harm
from tests.scheduler.mutations import mutants, with_cells, with_figures
from tests.scheduler.rank_graph import graph_of_ranks
from tests.scheduler.test_between_ranks import of_rank, place, position
from tests.scheduler.workloads import Options, assert_checked_and_read_back, trained, whole_steps, workloads


def sharded(workload: Workload, chosen: Options, ranks: str, shards: int = 2) -> Schedule:
    kind = replace(of_rank(workload, replace(chosen, transfer="copy"), ranks).kind, store="shared", shards=shards)
    return build(workload, kind, num_slots=chosen.num_slots, keep=chosen.keep, activations=chosen.activations)


def gathered(schedule: Schedule) -> list[int]:
    return [op.block for op in schedule.ops if op.what == "C"]


@given(workloads(), whole_steps(), whole_steps(), st.sampled_from([2, 3, 8]))
@draws(60, usual=8)
def test_all_ranks_gather_the_same_blocks_in_the_same_order(
    workload: Workload, chosen: Options, other: Options, shards: int
):
    alike = {"updates": chosen.updates, "clip": chosen.clip, "reports_norm": chosen.reports_norm}
    one, two = sharded(workload, chosen, "first", shards), sharded(workload, replace(other, **alike), "last", shards)
    assert gathered(one) == gathered(two)
    for found in (one, two):
        assert_checked_and_read_back(found, workload)
        assert (f"\nshards: {shards}" in str(found), '"shards"' in found.to_json()) == (True, True)
        sizes = [workload.blocks[op.block].state_bytes for op in found.ops if op.what == "W"]
        parts = [gathered_bytes(nbytes, found.kind.shards) for nbytes in sizes]
        assert len(gathered(found)) == sum(part > 0 for part in parts)
        moved = (
            sum(sizes)
            - sum(parts)
            + sum(
                workload.values[v].nbytes
                for op in found.ops
                if (op.stream, op.what) == ("h2d", "A")
                for v in found.parked()[op.block]
            )
        )
        assert found.h2d_bytes == moved


@given(workloads(), st.lists(whole_steps(), min_size=2, max_size=4))
@draws(40)
def test_ranks_that_gather_never_wait_for_each_other_in_a_circle(workload: Workload, chosen: list[Options]):
    first = chosen[0]
    alike = {"updates": first.updates, "clip": first.clip, "reports_norm": first.reports_norm}
    size = len(chosen)
    schedules = [
        sharded(workload, replace(options, **alike), place(rank, size), size) for rank, options in enumerate(chosen)
    ]
    assert nx.is_directed_acyclic_graph(graph_of_ranks(schedules))


@given(workloads(), whole_steps(), whole_steps(), st.integers(0, 2**20))
@draws(40)
def test_weights_are_whole_where_they_are_read_in_any_order(
    workload: Workload, chosen: Options, other: Options, seed: int
):
    alike = {"updates": chosen.updates, "clip": chosen.clip, "reports_norm": chosen.reports_norm}
    tables = [sharded(workload, chosen, "first"), sharded(workload, replace(other, **alike), "last")]
    for number in range(3):
        gathering.run(tables, Random(seed + number))


@given(workloads(), whole_steps(), st.integers(0, 2**20))
@draws(10)
def test_a_table_that_differs_in_one_place_is_refused_or_harmless(workload: Workload, chosen: Options, seed: int):
    good = sharded(workload, chosen, "first")
    assume(gathered(good))
    mate = sharded(workload, chosen, "last")
    for name, mutant in islice(mutants(good, Random(seed)), 150):
        changed = with_figures(mutant)
        try:
            changed.check()
        except ScheduleError:
            continue
        for number in range(3):
            try:
                gathering.run([changed, mate], Random(seed + number))
            except Harm as harm:
                raise AssertionError(f"{name} passed the check, but {harm}") from None


def first(updates: str = "overlap", num: int = 4, micro_batches: int = 1) -> Schedule:
    kind = StepKind(updates=updates, micro_batches=micro_batches, ranks="first", store="shared", shards=2)
    return build(trained(num), kind, num_slots=2)


def test_a_gather_follows_each_copy():
    text = str(first(num=3))
    assert_expected_inline(
        text[text.index("ranks:") :],
        """\
ranks: first
store: shared
shards: 2
tick  h2d   compute  d2h  host  gather  send  peers  live_bytes
   0  W0@0  .        .    .     .       .     .          265984
   1  W1@1  .        .    .     C0@0    .     .          265984
   2  .     F0       .    .     C1@1    .     .          274176
   3  W2@0  F1       .    .     .       .     .          282368
   4  W1@1  .        .    .     C2@0    .     .          282368
   5  .     F2*      .    .     C1@1    .     .          306944
   6  .     B2       .    .     .       .     .          456192
   7  W0@0  B1       .    .     .       P2    .          564480
   8  .     .        G2   .     C0@0    .     .          415232
   9  .     B0       .    .     .       P1    .          548096
  10  .     .        G1   U2    .       P0    .          406784
  11  .     .        G0   U1    .       .     V2         273920
  12  .     .        .    U0    .       .     V1         273920
  13  .     .        .    .     .       .     V0         273920""",
    )


@pytest.mark.parametrize(
    ("token", "rule"),
    [
        ("C1", "gather:C2@[01] at tick \\d+ stands where C1 is due"),
        ("C3", "stands where C3 is due"),
        ("W2", "compute:F2|W2|there are"),
    ],
)
def test_an_op_that_is_missing_is_refused(token: str, rule: str):
    schedule = first()
    at = next(at for at, op in schedule.positions() if str(op).startswith(token))
    broken = with_cells(schedule, {at: None})
    with pytest.raises(ScheduleError, match=rule):
        with_figures(broken).check()


def test_a_gather_that_does_not_wait_for_its_shard_is_refused():
    schedule = first()
    waits = derive_waits(schedule)
    check_gathers(Case(schedule, schedule.known_workload(), waits))
    at = next(at for at, op in schedule.positions() if op.what == "C")
    waits[at] = ()
    with pytest.raises(ScheduleError, match="gathers what belongs to the shard of"):
        check_gathers(Case(schedule, schedule.known_workload(), waits))


def test_a_wait_that_may_close_a_circle_is_refused():
    schedule = first(num=5)
    graph = dependency_graph(schedule)
    check_schedule(schedule, schedule.known_workload(), graph)
    weights = [at for at, op in schedule.positions() if str(op).startswith("C1@")][-1]
    graph.add_edge(weights, position(schedule, "P2"), kind="data")
    with pytest.raises(ScheduleError, match=r"send:P2 at tick \d+ waits for gather:C1@\d at tick \d+, which may wait"):
        check_schedule(schedule, schedule.known_workload(), graph)


def test_shards_are_of_a_shared_store():
    with pytest.raises(OptionError, match='shards=2 with store="own"'):
        StepKind(updates="overlap", ranks="first", shards=2)
    with pytest.raises(OptionError, match='transfer="bind" is impossible'):
        StepKind(updates="overlap", ranks="first", store="shared", transfer="bind", shards=2)
