"""What a plan takes at least is known without its draft: never more than its draft and its step take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.hardware.hardware import Hardware
from megatrain.scheduler.builder.bounds.plan_bound import PlanBound
from megatrain.scheduler.builder.draft import Builder, Choices
from megatrain.scheduler.builder.rows.step_timer import StepTimer
from megatrain.scheduler.items import Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from tests.draws import draws
from tests.scheduler.test_rows import choices, kinds, machines
from tests.scheduler.test_search import MACHINES, chains
from tests.scheduler.workloads import trained, workloads


@given(chains(5) | workloads(), kinds(), MACHINES | machines(), st.data())
@draws(200, usual=20)
def test_no_draft_takes_less(workload: Workload, kind: StepKind, machine: Hardware, data: st.DataObject):
    builder = Builder(workload, kind)
    bound, timer = PlanBound(builder.any_effects, machine), StepTimer(machine)
    for _ in range(2):
        plan = data.draw(choices(workload))
        seconds, nbytes = builder.at_least(plan, bound)
        draft = builder.draft(plan)
        times = builder.times(draft, timer)
        end = max((of_stream[-1][1] for of_stream in times.values()), default=0.0)
        assert seconds <= end * (1 + 1e-9)
        assert nbytes <= draft.device_bytes


def test_it_counts_all_that_copies_and_compute_do():
    builder = Builder(trained(6), StepKind(updates="overlap", outputs="release", micro_batches=2))
    plan = Choices(2, keep=2, saves=(4, 5), resident=(1,))
    draft = builder.draft(plan)
    for machine, stream in ((Hardware(1e5, 1e9, 1e13), Stream.H2D), (Hardware(1e9, 1e9, 1e7), Stream.COMPUTE)):
        seconds, _ = builder.at_least(plan, PlanBound(builder.any_effects, machine))
        times = builder.times(draft, StepTimer(machine))[stream]
        assert seconds >= sum(end - begin for begin, end in times) * (1 - 1e-9)
