"""The public steps one by one, as a compiler engineer uses them: trace, lower, schedule, Executor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import megatrain
from megatrain.tracer.arguments import tensors_given
from tests.comparing import assert_same_state
from tests.models import MODELS, Stack


def test_trace_lower_schedule_execute() -> None:
    model, args, kwargs = MODELS["gpt_loss"]()
    eager = copy.deepcopy(model)
    traced = megatrain.trace(model, args, kwargs)
    program = megatrain.lower(traced)
    schedule = megatrain.schedule(program, num_slots=2, keep=1)
    schedule.check()
    assert megatrain.Schedule.parse(str(schedule)) == schedule
    executor = megatrain.Executor(program, schedule, model)
    torch.manual_seed(0)
    call = executor.forward(list(tensors_given(args, kwargs)))
    logits, loss = call.outputs
    executor.backward(call, [None, torch.ones(())])
    torch.manual_seed(0)
    expected_logits, expected_loss = eager(*args, **kwargs)
    expected_loss.backward()
    assert torch.equal(logits, expected_logits)
    assert torch.equal(loss, expected_loss)
    assert_same_state(eager, model)


def test_an_edited_schedule_runs() -> None:
    """A schedule read back from its text is what runs, if the checker accepts it."""
    model, args, kwargs = MODELS["mlp"]()
    eager = copy.deepcopy(model)
    program = megatrain.lower(megatrain.trace(model, args, kwargs))
    built = megatrain.schedule(program, num_slots=3)
    read = megatrain.Schedule.parse(str(built), built.workload)
    read.check()
    executor = megatrain.Executor(program, read, model)
    call = executor.forward(list(args))
    executor.backward(call, [torch.ones_like(call.outputs[0])])
    eager(*args).sum().backward()
    assert_same_state(eager, model)


def test_planning_a_hundred_billion_parameters_takes_no_weights() -> None:
    class Big(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(32768, 32768) for _ in range(100)))

        def forward(self, x):
            return self.layers(x)

    with torch.device("meta"):
        model = Big()
    program = megatrain.lower(megatrain.trace(model, (torch.ones(1, 32768, device="meta"),)))
    assert len(program.templates) == 1
    schedule = megatrain.schedule(program)
    schedule.check()
    assert sum(p.numel() for p in model.parameters()) > 100e9
    assert schedule.peak_bytes < 5 * 32768 * 32769 * 4


class Named(torch.nn.Module):
    """The same network under other names."""

    def __init__(self, stem: str, body: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        setattr(self, stem, torch.nn.Linear(4, 8))
        setattr(self, body, torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)))
        self._stem, self._body = stem, body

    def forward(self, x):
        x = getattr(self, self._stem)(x)
        for layer in getattr(self, self._body):
            x = torch.tanh(layer(x))
        return x


def test_renaming_modules_changes_no_schedule() -> None:
    texts = {
        str(megatrain.schedule(megatrain.lower(megatrain.trace(Named(*names), (torch.ones(2, 4),))), num_slots=2))
        for names in (("stem", "layers"), ("zeta", "alpha"), ("a", "b"))
    }
    assert len(texts) == 1


def test_frozen_parameters_make_no_gradient_traffic() -> None:
    model: Any = Named("stem", "layers")
    frozen = [model.stem, model.layers[0], model.layers[2]]
    for module in frozen:
        module.requires_grad_(False)
    x = torch.ones(2, 4)
    schedule = megatrain.schedule(megatrain.lower(megatrain.trace(model, (x,))))
    tokens = [str(op) for op in schedule.ops]
    # Block 0 and 1 need no backward at all; block 3 passes a gradient on but offloads none.
    assert [t for t in tokens if t.startswith("B")] == ["B4", "B3", "B2"]
    assert [t for t in tokens if t.startswith("G")] == ["G4", "G2"]
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    compiled(x).sum().backward()
    assert all(p.grad is None for module in frozen for p in module.parameters())
    assert all(p.grad is not None for p in model.layers[1].parameters())


def test_an_unused_parameter_keeps_no_gradient() -> None:
    model = Named("stem", "layers")
    model.spare = torch.nn.Parameter(torch.ones(3))
    compiled = megatrain.compile(model, device="cpu", transfer="copy")
    compiled(torch.ones(2, 4)).sum().backward()
    assert model.spare.grad is None


@pytest.mark.parametrize("step", [{"micro_batches": 2}, {"updates": "overlap"}, {"updates": "serial", "clip": True}])
def test_a_schedule_of_a_training_step_has_no_forward_of_its_own(step: dict[str, Any]):
    model = Stack()
    program = megatrain.lower(megatrain.trace(model, (torch.ones(2, 3),)))
    schedule = megatrain.schedule(program, transfer="copy", activations="recompute", **step)
    executor = megatrain.Executor([program] * schedule.kind.micro_batches, schedule, model)
    with pytest.raises(megatrain.ScheduleError, match="whole training step"):
        executor.forward([torch.ones(2, 3)])


def test_a_schedule_of_a_call_is_no_training_step():
    model = Stack()
    program = megatrain.lower(megatrain.trace(model, (torch.ones(2, 3),)))
    executor = megatrain.Executor(program, megatrain.schedule(program), model)
    with pytest.raises(megatrain.ScheduleError, match="is a call, not a training step"):
        executor.begin([[torch.ones(2, 3)]])


def test_each_micro_batch_has_a_program():
    model = Stack()
    program = megatrain.lower(megatrain.trace(model, (torch.ones(2, 3),)))
    with pytest.raises(megatrain.ExecuteError, match="3 micro-batches; programs: 1"):
        megatrain.Executor(program, megatrain.schedule(program, micro_batches=3), model)
