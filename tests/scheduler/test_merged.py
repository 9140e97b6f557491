"""Micro-batches of several captures: one workload as large as each of them, or a difference that is named."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ScheduleError
from megatrain.hardware.work import products, total_flops
from megatrain.scheduler.from_program import Merged, merge
from megatrain.scheduler.lifetimes import slab_bytes
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Op, Position
from megatrain.scheduler.workload import ValueWork, Workload
from tests.draws import draws
from tests.scheduler.mutations import with_figures
from tests.scheduler.symbolic import Machine, run
from tests.scheduler.workloads import trained, whole_steps, workloads


def whole_of(family: list[Workload]) -> Workload:
    return merge(family).workload


@st.composite
def families(draw: st.DrawFn, count: int = 3) -> list[Workload]:
    """Workloads of one structure, whose sizes differ in both directions."""
    base = draw(workloads())
    size = st.integers(0, 40)
    found = [base]
    for _ in range(count - 1):
        blocks = tuple(
            replace(
                block,
                name=f"{block.name}'",
                saved_bytes=draw(size),
                forward_workspace_bytes=draw(size),
                backward_workspace_bytes=draw(size),
                forward=products(draw(size)),
                backward=products(draw(size)),
            )
            for block in base.blocks
        )
        values = tuple(replace(value, nbytes=draw(size)) for value in base.values)
        held = [max([0, *(v.nbytes for v in values if v.storage == s)]) for s in range(len(base.storages))]
        found.append(Workload(blocks, values, tuple(n + draw(st.sampled_from([0, 0, 9])) for n in held)))
    return found


def sizes(workload: Workload) -> list[int]:
    found = [n for v in workload.values for n in (v.nbytes, v.storage)]
    for block in workload.blocks:
        found += [block.saved_bytes, block.forward_workspace_bytes, block.backward_workspace_bytes]
        found += [total_flops(block.forward), total_flops(block.backward)]
    return [*found, *workload.storages]


@given(families())
@draws(60, usual=8)
def test_a_merged_workload_has_the_largest_of_each_size_and_one_structure(family: list[Workload]):
    whole = whole_of(family)
    whole.check()
    assert sizes(whole) == list(map(max, *map(sizes, family)))
    assert whole_of([whole, *family]) == replace(whole)
    assert whole_of(family[:1]) == family[0]
    assert sizes(whole_of(family[::-1])) == sizes(whole)
    assert [b.name for b in whole.blocks] == [b.name for b in family[0].blocks]


@given(families(count=2), whole_steps())
@draws(60, usual=8)
def test_no_member_takes_more_than_a_table_for_all_says(family: list[Workload], options):
    plan = options.build(whole_of(family))
    for member in family:
        alone = with_figures(replace(plan, workload=member))
        if not plan.kind.holds_gradients:
            host_bytes = alone.park_bytes + slab_bytes(member, plan.kind) + alone.host_value_bytes
            alone = replace(alone, host_bytes=host_bytes)
        assert alone.device_bytes <= plan.device_bytes
        assert alone.peak_bytes <= plan.peak_bytes
        assert alone.host_bytes <= plan.host_bytes
        alone.check()


class Mixed(Machine):
    """Runs a table with a workload of its own for each micro-batch."""

    def __init__(self, plan: Schedule, members: list[Workload]) -> None:
        self.members = members
        super().__init__(plan, plan.known_workload())

    def allocate_value(self, index: int, number: int, *, is_there: bool) -> None:
        self.workload = self.members[number % len(self.members)]
        super().allocate_value(index, number, is_there=is_there)

    def start(self, position: Position, op: Op) -> None:
        self.workload = self.members[(op.micro_batch or 0) % len(self.members)]
        super().start(position, op)


def test_each_difference_is_named_with_the_rule_and_the_way_out():
    other = trained(4)
    blocks = (*other.blocks[:2], replace(other.blocks[2], gradient_bytes=0, update_bytes=0), other.blocks[3])
    with pytest.raises(ScheduleError) as caught:
        whole_of([trained(4), trained(4), replace(other, blocks=blocks)])
    assert str(caught.value) == (
        "micro-batch 2 differs from micro-batch 0: of block 2 (layers.2), gradient_bytes is 0, not 132864.\n"
        "  All micro-batches of a step use the weights of a block while they are on the device, and hand on "
        "their buffers.\n"
        "  Use micro-batches for which the model runs the same layers in the same order, or separate steps."
    )
    with pytest.raises(ScheduleError, match=r"^micro-batch 1 differs from micro-batch 0: it has 2 blocks, not 4"):
        whole_of([other, trained(2)])
    for changes in ({"has_backward": False}, {"state_bytes": 64}, {"update_bytes": 0}, {"shares": (0,)}):
        last = replace(other.blocks[-1], **changes)
        with pytest.raises(ScheduleError, match=rf"block 3 \(layers.3\), {next(iter(changes))} is .*, not "):
            whole_of([other, replace(other, blocks=(*other.blocks[:-1], last))])
    with pytest.raises(ScheduleError, match="at least one micro-batch"):
        whole_of([])


# -- values that not all have ------------------------------------------------------------------------------------


@st.composite
def mixed_families(draw: st.DrawFn) -> list[Workload]:
    """Workloads over the same blocks, of which each lacks some of the storages, with all of their values."""
    found: list[Workload] = []
    for member in draw(families()):
        kept = [storage for storage in range(len(member.storages)) if draw(st.booleans())]
        values = [replace(v, storage=kept.index(v.storage)) for v in member.values if v.storage in kept]
        found.append(Workload(member.blocks, tuple(values), tuple(member.storages[s] for s in kept)))
    return found


def projected(both: Merged, number: int, family: list[Workload]) -> Workload:
    """A member as the table sees it: a value that it lacks takes nothing."""
    member, places, storages = family[number], both.places[number], [0] * len(both.workload.storages)
    values: list[ValueWork] = []
    for value, place in zip(both.workload.values, places, strict=True):
        own = None if place is None else member.values[place]
        values.append(replace(value, nbytes=0 if own is None else own.nbytes))
        if own is not None:
            storages[value.storage] = member.storages[own.storage]
    return Workload(member.blocks, tuple(values), tuple(storages))


@given(mixed_families(), whole_steps(), st.integers(0, 2**20))
@draws(60, usual=8)
def test_micro_batches_with_other_values_do_no_harm_in_any_order(family: list[Workload], options, seed: int):
    both = merge(family)
    plan = options.build(both.workload)
    members = [projected(both, number, family) for number in range(len(family))]
    random = Random(seed)
    for attempt in range(6):
        run(Mixed(plan, members), plan.waits(), random, is_fixed=attempt % 3 != 0)
