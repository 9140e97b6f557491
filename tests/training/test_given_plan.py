"""TrainStep(plan=): exactly the plan's choices, the same bits, or a refusal with the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from megatrain import SavedPlan, TrainStep
from megatrain.errors import ScheduleError
from tests.comparing import assert_same, snapshot
from tests.planning.steps import IDS, Words

BUDGET = "600KiB"
OPTIONS: dict[str, Any] = {"device": "cpu", "device_memory": BUDGET, "optimizer": "AdamW", "micro_batches": 2}


def loss(out: torch.Tensor, batch: object) -> torch.Tensor:
    return out.square().mean()


def plan_of(ids: torch.Tensor = IDS, **options: Any) -> megatrain.Plan:
    return megatrain.plan(Words(), ids, **{**OPTIONS, "loss": loss, **options})


def step_of(plan: Any = None, memory: str = BUDGET, **options: Any) -> tuple[TrainStep, Words]:
    torch.manual_seed(0)
    model = Words()
    compiled = megatrain.compile(model, device="cpu", memory=memory)
    return TrainStep(compiled, torch.optim.AdamW(model.parameters()), loss=loss, plan=plan, **options), model


def test_a_step_takes_the_choices_of_its_plan_with_the_same_bits():
    """In this memory a step of its own would choose otherwise."""
    plan = plan_of(device_memory="500KiB")
    given, model = step_of(plan)
    own, other = step_of()
    for _ in range(2):
        assert torch.equal(given([IDS, IDS]), own([IDS, IDS]))
    assert given.schedule == plan.schedule != own.schedule
    assert_same(snapshot(model), snapshot(other))


def test_the_plan_of_a_step_is_saved_and_given_to_another():
    first, _ = step_of()
    first([IDS, IDS])
    text = first.plan.to_json()
    second, _ = step_of(SavedPlan.from_json(text))
    second([IDS, IDS])
    assert second.plan == first.plan
    assert second.plan.to_json() == text
    assert first.plan.device_memory == 600 * 1024


def test_a_clipped_step_takes_its_plan_from_the_second_on():
    """The first of deferred updates has none to run: it has a schedule of its own."""
    plan = plan_of(max_grad_norm=1.0)
    assert plan.schedule.kind.updates == "deferred"
    step, _ = step_of(plan, max_grad_norm=1.0)
    schedules = []
    for _ in range(3):
        step([IDS, IDS])
        schedules.append(step.schedule)
    assert schedules[0].kind.updates == "none"
    assert schedules[1] == schedules[2] == plan.schedule


@pytest.mark.parametrize(
    ("plan", "step", "said"),
    [
        ({}, {"max_grad_norm": 1.0}, "updates: overlap -> none"),
        ({}, {"overlap": False}, "updates: overlap -> serial"),
        ({"micro_batches": 1}, {}, "micro_batches: 1 -> 2"),
        ({"ids": IDS[:2]}, {}, r"value 0 \(ids\): nbytes 128 -> 256"),
        ({"loss": None}, {}, "the loss: 0 -> "),
        ({"block_bytes": "1KiB"}, {}, "blocks: "),
        ({}, {"memory": "520KiB"}, "memory of the device: .* -> 520.00 KiB"),
    ],
    ids=["norm", "order", "micro-batches", "shape", "loss", "blocks", "memory"],
)
def test_a_step_that_was_not_planned_is_refused_with_the_difference(
    plan: dict[str, Any], step: dict[str, Any], said: str
):
    taken, model = step_of(plan_of(**plan), **step)
    before = snapshot(model)
    with pytest.raises(ScheduleError, match=f"isn't one of this step: (?s:.*){said}"):
        taken([IDS, IDS])
    assert_same(snapshot(model), before)


def test_a_batch_of_another_shape_is_refused_and_the_next_one_goes_on():
    step, _ = step_of(plan_of())
    step([IDS, IDS])
    with pytest.raises(ScheduleError, match=r"value 0 \(ids\): nbytes 256 -> 128"):
        step([IDS[:2], IDS[:2]])
    step([IDS, IDS])
    assert step.progress.count == 2


def test_looks_at_parameters_do_not_change_when_planned_updates_run():
    works = plan_of().schedule.known_workload()
    spread = megatrain.schedule(works, memory=BUDGET, micro_batches=2, updates="spread", outputs="release")
    step, model = step_of(SavedPlan("Words", "fp32", spread), spread=True)
    for _ in range(6):
        step([IDS, IDS])
        snapshot(model)
    assert step.schedule == spread
