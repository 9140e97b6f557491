"""Drafts are placed, counted and timed in ways that save time: the plain ways say the same."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.errors import OptionError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.rows.step_timer import StepTimer
from megatrain.scheduler.builder.stays import Placed, Stay
from megatrain.scheduler.items import Stream
from megatrain.scheduler.lifetimes.books import Books, item_lifetimes
from megatrain.scheduler.lifetimes.lifetime import live_bytes
from megatrain.scheduler.lifetimes.peak import needed_bytes
from megatrain.scheduler.step_kind import RANKS, UPDATES, StepKind
from megatrain.scheduler.table import Table
from megatrain.scheduler.timing.simulate import simulate
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.workloads import trained, workloads


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """Machines on which any stream may be the slow one, which alone shows that others wait for it."""
    slow, share = (
        draw(st.sampled_from(["h2d", "d2h", "compute", "host", "none"])),
        st.sampled_from([1.0, 0.7]),
    )
    rate = {name: 1e7 if name == slow else 1e9 for name in ("h2d", "d2h", "compute", "host")}
    return Hardware(
        rate["h2d"],
        rate["d2h"],
        rate["compute"],
        launch_s=draw(st.sampled_from([0.0, 1e-9])),
        host_bytes_per_s=rate["host"],
        h2d_beside=draw(share),
        d2h_beside=draw(share),
        host_beside=draw(share),
        compute_beside=draw(share),
    )


@st.composite
def kinds(draw: st.DrawFn) -> StepKind:
    """Kinds of training steps, of processes alone and of ranks."""
    ranks = draw(st.sampled_from([RANKS[0], *RANKS]))
    store = "own" if ranks == RANKS[0] else draw(st.sampled_from(["own", "shared"]))
    transfer = draw(st.sampled_from(["copy", "copy", "copy", "bind"]))
    try:
        return StepKind(
            micro_batches=draw(st.integers(1, 4)),
            transfer=transfer,
            updates=draw(st.sampled_from(UPDATES)),
            clip=draw(st.booleans()),
            reports_norm=draw(st.booleans()),
            outputs=draw(st.sampled_from(["keep", "release"])),
            ranks=ranks,
            store=store,
        )
    except OptionError:
        assume(False)
        raise


@st.composite
def choices(draw: st.DrawFn, workload: Workload) -> Choices:
    """Any plan: also those that no search would try."""

    def some(blocks: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(draw(st.sets(st.sampled_from(sorted(blocks)))))) if blocks else ()

    backward = set(workload.backward_blocks())
    with_state = {number for number, block in enumerate(workload.blocks) if block.state_bytes > 0}
    saves, persistent = some(backward), some(with_state)
    with_results = {number for number in backward.difference(saves) if workload.blocks[number].kept is not None}
    return Choices(
        num_slots=draw(st.integers(1, 3)),
        keep=draw(st.integers(0, 7)),
        saves=saves,
        resident=some(with_state.intersection(backward).difference(persistent)),
        persistent=persistent,
        has_giants_alone=draw(st.booleans()),
        has_late_offloads=draw(st.booleans()),
        results=some(with_results),
    )


def times_of(table: Table, machine: Hardware) -> dict[Stream, list[tuple[float, float]]]:
    times: dict[Stream, list[tuple[float, float]]] = {}
    for timing in simulate(table, machine).timeline:
        times.setdefault(timing.position.stream, []).append((timing.start_s, timing.end_s))
    return times


SLOW = {"host": Hardware(1e9, 1e9, 1e13, host_bytes_per_s=1e8), "link": Hardware(1e7, 1e9, 1e13, host_bytes_per_s=1e12)}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("updates", [updates for updates in UPDATES if updates != "none"])
def test_ops_wait_for_a_slow_stream_as_those_of_the_table_do(updates: str, slow: str):
    """A slow host keeps the bytes where gradients land, a slow link those of weights that updates overwrite."""
    for count in (1, 2):
        builder = Builder(trained(8), StepKind(updates=updates, outputs="release", micro_batches=count))
        draft = builder.draft(Choices(2, keep=9, saves=()))
        assert builder.times(draft, StepTimer(SLOW[slow])) == times_of(builder.finish(draft), SLOW[slow])


@given(workloads(), kinds(), st.data())
@draws(200, usual=20)
def test_a_draft_takes_the_time_and_the_memory_of_its_table(workload: Workload, kind: StepKind, data: st.DataObject):
    builder = Builder(workload, kind)
    for _ in range(2):  # the second finds what the first has worked out
        draft = builder.draft(data.draw(choices(workload)))
        table = builder.finish(draft)
        for machine in data.draw(st.lists(machines(), min_size=2, max_size=2)):
            assert builder.times(draft, StepTimer(machine)) == times_of(table, machine)
        books = Books(table)
        lives = item_lifetimes(books.effects, books.ops, "device")
        assert draft.live == live_bytes(lives, len(table.ticks), table.arena_bytes)
        assert draft.device_bytes == max(needed_bytes(books), default=0)


@given(st.lists(st.tuples(st.integers(-3, 40), st.integers(0, 30), st.integers(0, 9), st.integers(0, 3)), max_size=30))
@draws(200)
def test_bytes_that_are_taken_are_those_of_stays_at_the_same_time(drawn: list[tuple[int, int, int, int]]):
    placed, there = Placed(), list[tuple[Stay, int]]()
    for first, length, place, size in drawn:
        stay = Stay(0, first, first, first + length, 1 + size, 0)
        taken = {(at, at + other.nbytes) for other, at in there if other.first <= stay.last and other.last >= first}
        assert set(placed.beside(stay)) == taken
        offset = 4 * place
        if all(stop <= offset or offset + stay.nbytes <= start for start, stop in taken):
            placed.add(stay, offset)
            there.append((stay, offset))
