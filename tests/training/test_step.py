"""A training step's plan, its times, its line of progress, and what it warns of."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import megatrain
from megatrain import SavedPlan, TrainStep
from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.errors import ExecuteError, OptionError, ScheduleError
from megatrain.tracer.guards import Expectation, Guard
from tests.comparing import assert_same, snapshot
from tests.models import Stack
from tests.planning.steps import IDS, Words
from tests.test_progress import Terminal
from tests.training.parity import adamw, square

# -- plans -----------------------------------------------------------------------------------------------------------

BUDGET = "600KiB"
OPTIONS: dict[str, Any] = {"device": "cpu", "device_memory": BUDGET, "optimizer": "AdamW", "micro_batches": 2}


def plan_of(ids: torch.Tensor = IDS, **options: Any) -> megatrain.Plan:
    return megatrain.plan(Words(), ids, **{**OPTIONS, "loss": square, **options})


def step_of(plan: Any = None, memory: str = BUDGET, **options: Any) -> tuple[TrainStep, Words]:
    torch.manual_seed(0)
    model = Words()
    compiled = megatrain.compile(model, device="cpu", memory=memory)
    return TrainStep(compiled, torch.optim.AdamW(model.parameters()), loss=square, plan=plan, **options), model


def test_a_step_takes_the_choices_of_its_plan_with_the_same_bits():
    """In this memory a step of its own would choose otherwise. Its plan is saved, and given to another step."""
    plan = plan_of(device_memory="500KiB")
    given, model = step_of(plan)
    own, other = step_of()
    for _ in range(2):
        assert torch.equal(given([IDS, IDS]), own([IDS, IDS]))
    assert given.schedule == plan.schedule != own.schedule
    assert_same(snapshot(model), snapshot(other))
    assert own.plan.device_memory == 600 * 1024
    second, _ = step_of(SavedPlan.from_json(own.plan.to_json()))
    second([IDS, IDS])
    assert second.plan == own.plan
    with pytest.raises(ScheduleError, match=r"value 0 \(ids\): nbytes 256 -> 128"):
        second([IDS[:2], IDS[:2]])
    second([IDS, IDS])
    assert second.progress.count == 2


@pytest.mark.parametrize(
    ("plan", "step", "said"),
    [
        ({}, {"max_grad_norm": 1.0}, "updates: overlap -> deferred"),
        ({"micro_batches": 1}, {}, "micro_batches: 1 -> 2"),
        ({"ids": IDS[:2]}, {}, r"value 0 \(ids\): nbytes 128 -> 256"),
        ({"loss": None}, {}, "the loss: 0 -> "),
        ({"block_bytes": "1KiB"}, {}, "blocks: "),
        ({}, {"memory": "520KiB"}, "memory of the device: .* -> 520.00 KiB"),
    ],
    ids=["norm", "micro-batches", "shape", "loss", "blocks", "memory"],
)
def test_a_step_that_was_not_planned_is_refused_with_the_difference(plan: Any, step: Any, said: str):
    taken, model = step_of(plan_of(**plan), **step)
    before = snapshot(model)
    with pytest.raises(ScheduleError, match=f"isn't one of this step: (?s:.*){said}"):
        taken([IDS, IDS])
    assert_same(snapshot(model), before)


# -- times -----------------------------------------------------------------------------------------------------------


def test_a_timed_step_has_the_bits_of_a_step_and_the_order_of_its_table():
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))
    models = (plain, copy.deepcopy(plain))
    steps: list[TrainStep] = []
    for model in models:
        compiled = megatrain.compile(model, device="cpu", transfer="copy", activations="offload")
        optimizer = torch.optim.AdamW(model.parameters())
        steps.append(TrainStep(compiled, optimizer, loss=lambda y, x: (y - x).square().mean(), max_grad_norm=0.5))
    for number in range(3):
        batch = list(torch.randn(2, 4, 8))
        torch.manual_seed(number)
        steps[0](batch)
        torch.manual_seed(number)
        run = steps[1].time(batch)
        assert run.schedule == steps[1].schedule
        ends = {timing.position: timing.end_s for timing in run.timeline}
        begins = {timing.position: timing.start_s for timing in run.timeline}
        assert min(begins.values()) == 0
        for position, waits in steps[1].schedule.waits().items():
            assert all(ends[wait] <= begins[position] for wait in waits), position
        assert steps[1].schedule.simulate(run.measured()).step_s > 0
    for step in steps:
        step.flush()
    assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()))


# -- reads: on an accelerator each waits -----------------------------------------------------------------------------


class Reader(Stack):
    """Reads its input, and hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 100:
            return x
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.isnan().any():
                return x
        return self.head(x)


def test_values_that_the_forward_reads_are_read_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch):
    """Not again where a block is recomputed."""
    calls: list[type] = []
    model = Reader(3)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", activations="recompute", block_bytes=64)
    step = TrainStep(compiled, adamw(model), loss=square)
    step([torch.ones(2, 3)] * 2)
    for owner, method in ((Guard, "holds"), (Expectation, "__call__")):
        original: Callable[..., Any] = getattr(owner, method)

        def counting(self: Any, *args: Any, original: Any = original) -> Any:
            calls.append(type(self))
            return original(self, *args)

        monkeypatch.setattr(owner, method, counting)
    step([torch.ones(2, 3)] * 2)
    assert len(compiled.program.blocks) > 2
    assert (calls.count(Guard), calls.count(Expectation)) == (2, 2 * 3)


def test_a_capture_comes_after_the_updates_that_are_due() -> None:
    """The guards are read before these updates run."""

    class Chooses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.weight.sum() < 0 else 2 * super().forward(x)

    model = Chooses(2, 2)
    with torch.no_grad():
        model.weight.fill_(0.1)
    compiled = megatrain.compile(model, device="cpu")
    step = TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=1.0), loss=square, max_grad_norm=1e9)
    step(torch.ones(2, 2))
    assert step._setup.is_due
    step.prepare(torch.ones(3, 2))
    assert not step._setup.is_due, "they ran before the capture"
    step(torch.ones(3, 2))
    assert compiled.megatrain.recompiled_because == ()


# -- the line of progress --------------------------------------------------------------------------------------------


class Counted:
    """In a loss's place: counts who reads it."""

    reads = 0

    def item(self) -> float:
        Counted.reads += 1
        return 0.25


def test_a_line_of_progress_is_for_terminals_and_reads_few_losses(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    step = TrainStep(
        megatrain.compile(model, device="cpu"), torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda r, _: r.mean()
    )

    def shown(stream: io.StringIO, num_steps: int) -> str:
        monkeypatch.setattr("sys.stderr", stream)
        loss: Any = Counted()
        Counted.reads = 0
        with step.progress_line(num_steps=num_steps, tokens_per_step=500) as line:
            for _ in range(step.progress.count, num_steps):
                step(torch.ones(4, 8))
                line.update(loss)
        return stream.getvalue()

    assert shown(io.StringIO(), 2) == ""
    assert Counted.reads == 0
    text = shown(Terminal(), 4)
    assert "50%" in text.split("\r")[1], "a resumed loop goes on where it was"
    last = text.rstrip().rpartition("\r")[2]
    assert re.search(r"100%.* 2\.00k/2\.00k \[.*tok/s, device=\d.*, loss=0\.250, step=4/4", last), last
    monkeypatch.setattr("megatrain.base.progress.time.monotonic", lambda: 1.0)
    shown(Terminal(), 24)
    assert Counted.reads == 2  # the first and the last
    with pytest.raises(OptionError, match="tokens_per_step"):
        step.progress_line(num_steps=3, tokens_per_step=0)


# -- what is left over of a loop -------------------------------------------------------------------------------------


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), Mean())


LEFT_OVER: list[tuple[Callable[[Any], object], bool]] = [
    (lambda optimizer: optimizer.zero_grad(), False),
    (lambda optimizer: (clip_grad_norm_(parameters_of(optimizer), 1), optimizer.step()), True),
]


@pytest.mark.parametrize(("left_over", "is_useless"), LEFT_OVER, ids=["zero_grad", "clip and step"])
def test_calls_of_a_loop_after_a_step_change_nothing_and_the_useless_ones_are_warned_of(
    left_over: Any, is_useless: bool
):
    ends: list[Any] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in (left_over, lambda optimizer: None):
            compiled = megatrain.compile(build_model(), device="cpu")
            optimizer = torch.optim.AdamW(compiled.parameters(), 0.1)
            step = TrainStep(compiled, optimizer, max_grad_norm=1.0)
            for number in range(3):
                step(torch.full((2, 4), 1.0 + number))
                call(optimizer)
            ends.append(dict(compiled.state_dict()))
    assert_same(*ends)
    texts = [str(each.message) for each in said if each.category is megatrain.TrainStepWarning]
    assert len(texts) == is_useless
    assert all(text.startswith("optimizer.step() finds no gradient: the training step before it") for text in texts)


def test_the_backward_of_a_steps_loss_is_refused_and_the_loss_is_like_any_else(tmp_path: Path):
    compiled = megatrain.compile(build_model(), device="cpu")
    loss = TrainStep(compiled, torch.optim.SGD(compiled.parameters(), 0.1))([torch.ones(2, 4), torch.zeros(1, 4)])
    with pytest.raises(ExecuteError, match="step that returned this loss has run its backward") as caught:
        loss.backward(retain_graph=True)
    assert "optimizer.step()" in str(caught.value)
    with pytest.raises(RuntimeError, match="does not require grad"):
        (loss / 2).backward()
    torch.save({"loss": loss}, tmp_path / "loss.pt")
    loaded = torch.load(tmp_path / "loss.pt", weights_only=True)["loss"]
    for each in (loaded, copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss + 0):
        assert type(each) is torch.Tensor
        assert float(each) == loss.item()
    assert not vars(loaded)


class Parts(nn.Module):
    """Batch norm and dropouts of several kinds, in parts of which one may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.rnn = nn.GRU(4, 4, num_layers=2, dropout=0.5)
        self.head = nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.encoder(x))[0]).square().mean()


EVAL_MODES: dict[str, tuple[Callable[[Parts], object], str | None]] = {
    "all": (lambda model: model.eval(), "`encoder.2` and 2 more"),
    "around a trained part": (lambda model: model.rnn.eval(), "`rnn` is"),
    "a frozen encoder": (lambda model: model.encoder.eval().requires_grad_(False), None),
    "batch norm": (lambda model: model.encoder[1].eval(), None),
}


@pytest.mark.parametrize("name", EVAL_MODES)
def test_dropout_in_eval_mode_is_warned_of_once_at_the_first_step(name: str):
    change, words = EVAL_MODES[name]
    compiled = megatrain.compile(Parts(), device="cpu")
    step = TrainStep(compiled, torch.optim.SGD(compiled.parameters(), 0.1))
    change(cast(Any, compiled.megatrain.model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            step(torch.randn(3, 4))
    texts = [str(each.message) for each in said if each.category is megatrain.TrainStepWarning]
    assert len(texts) == (words is not None)
    if words is not None:
        assert texts[0].startswith(f"the model trains without dropout: {words}")
        assert "Call model.train() before the steps" in texts[0]
