"""Costs of templates are measured once for all programs of a planner, and are those that measuring anew would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megatrain
from megatrain.passes import measure as measuring
from megatrain.passes.measure import KnownCosts
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program
from megatrain.planning.options import Limits
from megatrain.planning.step_programs import StepPrograms, lowered
from megatrain.tracer.trace import trace
from tests.captures import traced


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The templates that are measured."""
    names, measure = list[str](), measuring._measured  # pyright: ignore[reportPrivateUsage]

    def noted(template: Any, needs: Any, program: Any, **options: Any) -> Any:
        names.append(template.name)
        return measure(template, needs, program, **options)

    monkeypatch.setattr(measuring, "_measured", noted)
    return names


class Forgetful(KnownCosts):
    """Measures each template anew."""

    def of(self, template: Any, needs: Any, device: Any, measure: Any, *, fuses: bool = False) -> Any:
        return measure()


def test_costs_of_all_levels_are_those_that_measuring_anew_gives(measured: list[str]):
    made, costs, limits = traced("gpt_loss"), KnownCosts(), Limits(block_bytes=4096)
    anew = StepPrograms(made, limits, Forgetful()).in_own_blocks
    count = len(measured)
    measured.clear()
    shared = StepPrograms(made, limits, costs).in_own_blocks
    assert len(anew) == len(shared)
    for one, other in zip(anew, shared, strict=True):
        assert {n: t.cost for n, t in one.templates.items()} == {n: t.cost for n, t in other.templates.items()}
    assert len(measured) <= count
    measured.clear()
    lowered(made, limits, costs=costs)
    assert measured == []


class Gated(nn.Module):
    def __init__(self, width: int, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x))


def layers(width: int = 8, function: Any = F.silu, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(*(Gated(width, function) for _ in range(3)))
    return model.requires_grad_(not frozen)


def shared(model: nn.Module, x: torch.Tensor, costs: KnownCosts) -> Program:
    return lowered(trace(model, (x,)), Limits(chunking="never"), costs=costs)


@pytest.mark.parametrize(
    "other",
    [{"width": 16}, {"function": F.gelu}, {"frozen": True}],
    ids=["other shapes", "other calls", "other needs"],
)
def test_what_differs_is_measured(other: dict[str, Any], measured: list[str]):
    costs = KnownCosts()
    shared(layers(), torch.zeros(2, 8), costs)
    count = len(measured)
    shared(layers(), torch.zeros(2, 8), costs)
    assert len(measured) == count > 0
    model, x = layers(**other), torch.zeros(2, other.get("width", 8), requires_grad=True)
    program = shared(model, x, costs)
    assert len(measured) > count
    assert {t.cost for t in program.templates.values()} == {
        t.cost for t in lower(trace(model, (x,))).templates.values()
    }


def test_a_plan_measures_each_template_once(measured: list[str]):
    model = layers()
    plan = megatrain.plan(model, torch.zeros(4, 8), optimizer="AdamW", hardware="rtx-4090", device_memory="1MiB")
    count = len(measured)
    assert plan.asked is not None
    again = plan.asked.again({"micro_batches": 2, "chunking": "always"})
    assert again.schedule.kind.micro_batches == 2
    assert len(measured) == count
