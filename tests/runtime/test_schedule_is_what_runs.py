"""The executor issues exactly the table's operations, in its order, after its waits, within its memory."""

from __future__ import annotations

import copy

import pytest
import torch

import megatrain
from megatrain.runtime.streams.stream_set import Chaos, Recording
from megatrain.scheduler.items import Stream
from megatrain.tracer.arguments import Structure, tensors_given
from tests.comparing import assert_same_state
from tests.models import MODELS, Gpt, Stack

NAMES = ["gpt_loss", "t5_labels", "unet", "encoder_decoder", "frozen_first"]


def recorded(name: str, **options):
    """Trains one step and returns the compiled module and what was recorded, forward and backward apart."""
    recording = Recording()
    model, args, kwargs = MODELS[name]()
    options = {"device": "cpu", "transfer": "copy", "activations": "offload", **options}
    compiled = megatrain.compile(model, recording=recording, **options)
    result = compiled(*args, **kwargs)
    tensors = [t for t in Structure.of(result).placeholders if t.requires_grad]
    torch.stack([t.float().mean() for t in tensors]).sum().backward()
    return compiled, recording


@pytest.mark.parametrize("name", NAMES)
def test_issue_order_and_waits_equal_the_schedule(name: str) -> None:
    compiled, recording = recorded(name)
    schedule = compiled.schedule
    waits = schedule.waits()
    last_forward = max(p.tick for p, op in schedule.positions() if op.what == "F")
    ops = dict(schedule.positions())
    for stream in (Stream.H2D, Stream.COMPUTE, Stream.D2H):
        expected = []
        for position, op in schedule.positions():
            if position.stream != stream:
                continue
            # The forward half has ended before the backward half begins, so waits across are over.
            mine = [w for w in waits.get(position, ()) if (w.tick > last_forward) == (position.tick > last_forward)]
            expected.append((str(op), tuple(str(ops[w]) for w in mine)))
        found = [(op.label, op.waits) for op in recording.on(stream)]
        assert found == expected


def slow_peak(depth: int, steps: int = 2, **options) -> tuple[int, megatrain.Schedule]:
    """Measures the peak with the slowest offloads that the waits allow; the table's figure is reached then."""
    model = Gpt(depth=depth)
    ids = torch.randint(0, 32, (2, 16))
    chaos = Chaos(max_delay_s=0.02, slow="d2h", poison=False)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", chaos=chaos, **options)
    for _ in range(steps):
        logits, loss = compiled(ids, targets=ids)
        # Every output gets a gradient with memory of its own, as the table assumes.
        (loss + (logits * torch.ones(logits.shape)).sum()).backward()
    return compiled.peak_bytes, compiled.schedule


@pytest.mark.parametrize("activations", ["recompute", "offload", "keep"])
def test_measured_peak_equals_the_schedules_figure(activations: str) -> None:
    # A returning activation may come early or late within what it waits for; the worst of some steps is the figure.
    peak, schedule = slow_peak(4, steps=4, activations=activations)
    assert peak == schedule.peak_bytes


@pytest.mark.usefixtures("no_smaller_blocks")
def test_too_small_a_budget_is_refused_before_anything_is_allocated() -> None:
    model = Gpt(depth=3)
    ids = torch.randint(0, 32, (2, 16))
    pointers = [p.data_ptr() for p in model.parameters()]
    compiled = megatrain.compile(model, device="cpu", memory="4KiB")
    with pytest.raises(megatrain.ScheduleError, match=r"memory") as caught:
        compiled(ids)
    assert "blocks." in str(caught.value)
    assert pointers == [p.data_ptr() for p in model.parameters()]


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


def test_a_schedule_of_a_training_step_has_no_forward_of_its_own():
    model = Stack()
    program = megatrain.lower(megatrain.trace(model, (torch.ones(2, 3),)))
    schedule = megatrain.schedule(program, transfer="copy", activations="recompute", micro_batches=2)
    executor = megatrain.Executor([program] * schedule.kind.micro_batches, schedule, model)
    with pytest.raises(megatrain.ScheduleError, match="whole training step"):
        executor.forward([torch.ones(2, 3)])
