"""Processes of one group whose models were compiled without it: nobody trains apart in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def calls(rank: int) -> dict[str, Any]:
    """Calls models with gradients and without."""
    batch = stack_batch(rank, 2)
    alone, _ = dist.new_subgroups(1)
    plain, wrapped = compiled_here(), DistributedDataParallel(compiled_here())
    on_purpose, frozen = compiled_here(process_group=alone), compiled_here().requires_grad_(False)

    def backward(model: nn.Module) -> None:
        square(model(batch), batch).backward()

    found = {name: said_by(lambda m=model: backward(m)) for name, model in {"plain": plain, "again": plain}.items()}
    found |= {"wrapped": said_by(lambda: backward(wrapped)), "on purpose": said_by(lambda: backward(on_purpose))}
    found["frozen"] = said_by(lambda: frozen(batch))
    with torch.no_grad():
        found["no_grad"] = said_by(lambda: compiled_here()(batch))
    return {**found, "gradients": [p.grad for p in wrapped.parameters()]}


@pytest.mark.nightly
def test_a_backward_that_nobody_exchanges_is_noted_once(three: Processes):
    found = three.run(calls)
    eager = seeded_stack(3)
    for rank in range(3):
        (square(eager(stack_batch(rank, 2)), None) / 3).backward()
    for each in found:
        assert len(each["plain"]) == 1
        assert each["plain"][0].startswith(
            "ApartWarning: loss.backward() leaves the gradients of this process alone, and"
        )
        for name in ("again", "wrapped", "on purpose", "frozen", "no_grad"):
            assert each[name] == [], name
        assert_same([p.grad for p in eager.parameters()], each["gradients"], tolerance=1e-6)
