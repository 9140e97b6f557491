"""Sections: which block is divided, what waits for what, what they save, and which tables are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from megatrain.errors import ScheduleError
from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.builder.sections import ENOUGH, LEAST_BYTES, worthwhile_sections
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import Op, parse_op
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.table import Position
from megatrain.scheduler.timing.costs import Measured
from megatrain.scheduler.workload import Workload
from tests.scheduler.mutations import with_cells, with_figures
from tests.scheduler.symbolic import find_harm
from tests.scheduler.workloads import LAYER, chain, with_updates

DEFERRED = StepKind(updates="deferred", outputs="release")
# The link takes half as long as the host for the same weights.
MACHINE = Hardware(1e9, 1e9, 4e10, host_bytes_per_s=3.5e9)


def with_embedding(layers: int = 2, times: int = 8) -> Workload:
    return with_updates(chain([times * LAYER, *[LAYER] * layers]))


def divided(num_sections: int = 3, kind: StepKind = DEFERRED) -> Schedule:
    return build(with_embedding(), kind, sections=num_sections)


def test_a_table_with_sections():
    plan = divided()
    plan.check()
    find_harm(plan, plan.known_workload(), runs=30)
    assert_expected_inline(
        "\n".join(str(plan).splitlines()[7:14]),
        """\
tick  h2d     compute  d2h  host  live_bytes
   0  .       .        .    U0/0     1196032
   1  W0/0@0  .        .    U0/1     1196032
   2  W0/1@0  .        .    U0/2     1196032
   3  W0/2@0  .        .    U1       1196032
   4  W1@1    F0       .    U2       1204224
   5  W2@0    F1       .    .        1212416""",
    )
    ops = dict(plan.positions())
    waits = {str(ops[position]): [str(ops[wait]) for wait in found] for position, found in plan.waits().items()}
    assert waits["W0/1@0"] == ["U0/1"]
    assert waits["F0"] == ["W0/2@0"]
    # The copy for the backward is one again.
    assert [str(op) for op in plan.ops if op.what == "W" and op.block == 0][3:] == ["W0@0"]
    assert plan.sections == (0, 3)
    assert divided(1).sections is None


def test_a_section_waits_for_its_own_update_alone():
    """Also where other copies come between, so that the host is ahead by the time of the last ones."""
    kind = StepKind(updates="spread", outputs="release")
    plan = build(with_embedding(9), kind, sections=4, memory=1 << 30)
    ops = dict(plan.positions())
    loads = [position for position, op in ops.items() if op.what == "W" and op.section is not None]
    assert any(ops[Position(tick, Stream.H2D)].block != 0 for tick in range(loads[0].tick, loads[-1].tick))
    for position, op in ops.items():
        if op.what == "W" and op.section is not None:
            assert f"U0/{op.section}" in [str(ops[wait]) for wait in plan.waits()[position]]
    plan.check()
    find_harm(plan, plan.known_workload(), runs=30)


def test_texts_are_read_back():
    plan = divided()
    workload = plan.known_workload()
    assert Schedule.parse(str(plan), workload) == plan
    assert parse_op("W3/1@2", Stream.H2D) == Op(Stream.H2D, "W", 3, 2, section=1)
    for token, stream in (("F3/1", Stream.COMPUTE), ("G3/1", Stream.D2H), ("U3/64", Stream.HOST)):
        with pytest.raises(ScheduleError, match="section"):
            parse_op(token, stream)
    text = divided(1).diff(plan)
    assert "vanished: U0 (host, tick 0)" in text
    assert "appeared: U0/2 (host, tick 2)" in text


def test_sections_move_and_update_as_much_as_the_whole():
    whole, plan = divided(1), divided(5)
    for name in ("h2d_bytes", "d2h_bytes", "peak_bytes", "device_bytes", "host_bytes"):
        assert getattr(whole, name) == getattr(plan, name), name
    for what in "WU":
        moved = [sum(plan.effects().of(*op.key).moves for op in each.ops if op.what == what) for each in (plan, whole)]
        assert moved[0] == moved[1]


@pytest.mark.parametrize("updates", ["deferred", "spread"])
def test_most_of_the_copy_is_hidden_behind_the_update(updates: str):
    workload, kind = with_embedding(2, times=400), replace(DEFERRED, updates=updates)
    seconds = [build(workload, kind, sections=n).simulate(MACHINE).step_s for n in (1, 2, 4, 16)]
    copy = workload.blocks[0].state_bytes / 1e9
    assert seconds[0] - seconds[1] == pytest.approx(copy / 2, rel=0.05)
    assert seconds[0] - seconds[2] == pytest.approx(copy * 3 / 4, rel=0.05)
    assert seconds[0] - seconds[3] == pytest.approx(copy * 15 / 16, rel=0.05)


def test_measured_sections_are_ops_of_their_own():
    plan = divided()
    measured = Measured.of(plan, {position: 1.0 + i for i, (position, _) in enumerate(plan.positions())})
    assert list(measured.durations(plan).values())[:3] == [1.0, 2.0, 3.0]
    assert "U0/2" in str(measured)
    with pytest.raises(ScheduleError, match=r"host:U0 at tick 0 was never measured"):
        measured.durations(divided(1))


def test_a_large_first_block_is_divided():
    layer = 4 * LEAST_BYTES
    for times, expected in ((2.0, 1), (2.1, ENOUGH)):
        workload = with_updates(chain([int(times * layer), layer, layer]))
        assert worthwhile_sections(workload, DEFERRED) == expected
        assert worthwhile_sections(workload, StepKind(updates="spread")) == expected
        for kind in (StepKind(updates="overlap"), StepKind(), StepKind(updates="deferred", transfer="bind")):
            assert worthwhile_sections(workload, kind) == 1
    for size, expected in ((1, 1), (2, 2), (3, 3), (99, ENOUGH)):
        assert worthwhile_sections(with_updates(chain([size * LEAST_BYTES, LAYER, LAYER])), DEFERRED) == expected
    first = with_updates(chain([99 * LEAST_BYTES, LAYER, LAYER]))
    frozen = replace(first.blocks[0], frozen_bytes=50 * LEAST_BYTES)
    assert worthwhile_sections(replace(first, blocks=(frozen, *first.blocks[1:])), DEFERRED) == 1
    assert worthwhile_sections(with_updates(chain([LAYER, 99 * LEAST_BYTES, LAYER])), DEFERRED) == 1


@pytest.mark.parametrize(
    ("kind", "num_sections", "what"),
    [
        (StepKind(updates="overlap"), 2, "a step can't have 2 sections: no update is deferred"),
        (StepKind(updates="deferred", transfer="bind"), 2, "a step can't have 2 sections: no update is deferred"),
        (DEFERRED, 65, "65 sections are impossible"),
        (DEFERRED, 0, "0 sections are impossible"),
    ],
)
def test_impossible_sections_are_refused(kind: StepKind, num_sections: int, what: str):
    with pytest.raises(ScheduleError, match=what):
        build(with_embedding(), kind, sections=num_sections)


def test_a_block_of_frozen_weights_is_not_divided():
    workload = with_embedding()
    frozen = replace(workload.blocks[0], frozen_bytes=workload.blocks[0].state_bytes - 64)
    with pytest.raises(ScheduleError, match="most weights of block 0 are frozen"):
        build(replace(workload, blocks=(frozen, *workload.blocks[1:])), DEFERRED, sections=2)


Edit = Callable[[Schedule], dict[Position, Op | None]]


def _at(plan: Schedule, token: str) -> Position:
    return next(position for position, op in plan.positions() if str(op) == token)


def _made(token: str, other: str, stream: Stream) -> Edit:
    return lambda plan: {_at(plan, token): parse_op(other, stream)}


def _swapped(one: str, other: str) -> Edit:
    def edit(plan: Schedule) -> dict[Position, Op | None]:
        places = _at(plan, one), _at(plan, other)
        ops = [plan.ticks[place.tick][place.stream] for place in places]
        return {places[0]: ops[1], places[1]: ops[0]}

    return edit


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (_made("U0/2", "U1/2", Stream.HOST), "U1/2 at tick 2 is of another block than"),
        (lambda plan: {_at(plan, "W0/1@0"): None}, r"the sections of .*W0/0@0 at tick 1 are \[0, 2\], not 0 to 2"),
        (lambda plan: {_at(plan, "U0/2"): None}, r"the sections of .*U0/0 at tick 0 are \[0, 1\], not 0 to 2"),
        (_swapped("W0/0@0", "W0/1@0"), r"are \[1, 0, 2\], not 0 to 2"),
        (_swapped("U0/0", "U0/1"), r"are \[1, 0, 2\], not 0 to 2"),
        (_made("W0/1@0", "W0/1@1", Stream.H2D), "fills another slot than h2d:W0/0@0|needs .* but its slot has"),
        (_swapped("W0/2@0", "W0@0"), "W0@0 at tick 3 overwrites h2d:W0/1@0 at tick 2 before all of it"),
        (
            _swapped("W0/2@0", "W2@0"),
            "F0 at tick 4 reads weights of which h2d:W0/1@0 at tick 2 brings only a part",
        ),
        (_swapped("U0/2", "U1"), "W0/2@0 at tick 3 reads what is written by host:U0/2"),
    ],
)
def test_wrong_sections_are_refused(edit: Edit, what: str):
    plan = divided()
    with pytest.raises(ScheduleError, match=what):
        with_figures(with_cells(plan, edit(plan))).check()


def test_only_a_deferred_update_is_divided():
    workload = with_embedding(4)
    plan = build(workload, StepKind(updates="spread", outputs="release"))
    late = max(set(workload.update_blocks()) - set(plan.deferred))
    positions = {_at(plan, f"U{late}"): Op(Stream.HOST, "U", late, section=0)}
    load = next(position for position, op in plan.positions() if op.what == "W" and op.block == late)
    positions[load] = replace(plan.ticks[load.tick][Stream.H2D], section=0)
    with pytest.raises(ScheduleError, match=f"block {late} can't be divided"):
        with_figures(with_cells(plan, dict(positions))).check()


def test_other_owners_of_its_weights_come_before_all_sections():
    """Block 3 updates a parameter that block 0 holds rows of, so no section of block 0 may leave before."""
    workload = with_embedding(3)
    blocks = list(workload.blocks)
    blocks[3] = replace(blocks[3], shares=(0,))
    plan = build(replace(workload, blocks=tuple(blocks)), DEFERRED, sections=3)
    plan.check()
    find_harm(plan, plan.known_workload(), runs=30)
    load = _at(plan, "W0/0@0")
    assert _at(plan, "U3").tick < load.tick
    soon = Position(_at(plan, "U0/0").tick + 1, Stream.H2D)
    assert soon.stream not in plan.ticks[soon.tick]
    with pytest.raises(ScheduleError, match="W0/0@0 at tick 1 reads what is written by host:U3"):
        with_figures(with_cells(plan, {load: None, soon: plan.ticks[load.tick][Stream.H2D]})).check()
