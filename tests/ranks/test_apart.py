"""Processes of one group whose models were compiled without it: nobody trains apart in silence."""

from __future__ import annotations

import pytest
import torch

from megatrain.ranks.processes import NoCollectives
from tests.comparing import assert_same
from tests.ranks.apart import calls, collective_in_loss, compiled_here, said_by, step_of, steps
from tests.ranks.processes import Processes
from tests.training.parity import seeded_stack, square, stack_batch


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


@pytest.mark.nightly
def test_a_loss_that_waits_for_others_is_refused_and_nobody_waits(three: Processes):
    for said in three.run(collective_in_loss):
        assert len(said) == 1
        assert "the loss exchanges values with other processes (allreduce), within a training step of all" in said[0]


def test_without_other_processes_nothing_is_said():
    assert said_by(lambda: step_of(compiled_here())(stack_batch(0, 2))) == []
    assert said_by(lambda: compiled_here()(stack_batch(0, 2)).sum().backward()) == []
    with NoCollectives():
        assert torch.ones(2).sum() == 2
