"""Processes of one group whose models were compiled without it: nobody trains apart in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatrain
from megatrain.ranks.processes import NoCollectives
from tests.comparing import assert_same
from tests.ranks.processes import Processes
from tests.training.parity import seeded_stack, square, stack_batch


def compiled_here(**options: Any) -> Any:
    return megatrain.compile(seeded_stack(3), device="cpu", transfer="copy", **options)


def said_by(code: Callable[[], object]) -> list[str]:
    """The warnings and the error of some code."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            code()
        except megatrain.MegatrainError as error:
            return [str(error)]
    return [f"{warning.category.__name__}: {warning.message}" for warning in found]


def step_of(compiled: Any) -> megatrain.TrainStep:
    return megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), 0.1), loss=square)


def steps(rank: int) -> dict[str, Any]:
    """Takes steps without a group, in a group of one, and where there is no other process."""
    batch = stack_batch(rank, 2)
    alone, _ = dist.new_subgroups(1)
    refused, on_purpose = compiled_here(), compiled_here(process_group=alone)
    before = [p.detach().clone() for p in refused.parameters()]
    found: dict[str, Any] = {"without": said_by(lambda: step_of(refused)(batch))}
    found["unchanged"] = all(torch.equal(p, q) for p, q in zip(refused.parameters(), before, strict=True))
    found["on purpose"] = said_by(lambda: step_of(on_purpose)(batch))
    found["values"] = [p.detach().clone() for p in on_purpose.parameters()]
    return found


@pytest.mark.nightly
def test_a_step_that_others_know_nothing_of_is_refused(three: Processes):
    found = three.run(steps)
    for rank, each in enumerate(found):
        assert each["without"][0].startswith(
            "this step would train the model apart from the 2 other processes of torch"
        )
        assert each["unchanged"]
        assert each["on purpose"] == []
        expected = compiled_here()
        step_of(expected)(stack_batch(rank, 2))
        assert_same([p.detach() for p in expected.parameters()], each["values"])


def test_without_other_processes_nothing_is_said():
    assert said_by(lambda: step_of(compiled_here())(stack_batch(0, 2))) == []
    assert said_by(lambda: compiled_here()(stack_batch(0, 2)).sum().backward()) == []
    with NoCollectives():
        assert torch.ones(2).sum() == 2
