"""The public steps one by one, as a compiler engineer uses them: trace, lower, schedule, Executor."""

from __future__ import annotations

import copy

import torch

import megatrain
from tests.models import MODELS


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
    call = executor.forward(list(traced.arguments.tensors))
    logits, loss = call.outputs
    executor.backward(call, [None, torch.ones(())])
    torch.manual_seed(0)
    expected_logits, expected_loss = eager(*args, **kwargs)
    expected_loss.backward()
    assert torch.equal(logits, expected_logits)
    assert torch.equal(loss, expected_loss)
    for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


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
    for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


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
