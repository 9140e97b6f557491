"""The memory of a user's own loss is measured without any, and is a term of the schedule."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import ScheduleError
from megatrain.passes.measuring.live_bytes import LiveBytes
from megatrain.planning.loss_bytes import measure_loss
from megatrain.scheduler.lifetimes.peak import find_peak
from tests.comparing import assert_same
from tests.stand_in_triton import JITFunction, Scaled, stand_in_triton
from tests.training.parity import loop_step

WORDS, WIDTH, TOKENS = 512, 8, 16
LOGITS = TOKENS * WORDS  # elements


def build() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *body, nn.Linear(WIDTH, WORDS, bias=False)).bfloat16()


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS // 2), generator=torch.Generator().manual_seed(seed))


def wide_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())


def step_of(loss: Any, **options: Any) -> megatrain.TrainStep:
    model = build()
    compiled = megatrain.compile(model, device="cpu", **{"memory": "4MiB", **options})
    return megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


def test_the_term_is_what_the_loss_takes():
    """Logits in fp32, their log-softmax and its gradient: not one of them is in the model's program."""
    found: list[int] = []

    def watched(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        leaf = logits.detach().requires_grad_()
        with LiveBytes([leaf, batch], leaf.device) as live:
            (gradient,) = torch.autograd.grad(wide_loss(leaf, batch), leaf)
        found.append(live.peak - gradient.nbytes)
        return wide_loss(logits, batch)

    step = step_of(wide_loss)
    term = step.prepare(ids()).known_workload().loss_bytes
    step_of(watched)(ids())
    assert found[-1] == pytest.approx(term, rel=0.01)
    assert term >= 2 * 4 * LOGITS
    assert "loss" in dict(find_peak(step.schedule).parts)
    assert step.schedule.device_bytes - step.schedule.peak_bytes >= 4 * LOGITS


def test_a_loss_of_kernels_has_the_bound_of_one_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch):
    stand_in_triton(monkeypatch)
    kernel = JITFunction(lambda x, y, made: made.copy_(x))

    def loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return wide_loss(Scaled.apply(logits, logits, kernel[(1,)]), batch)  # pyright: ignore

    assert step_of(loss).prepare(ids()).known_workload().loss_bytes == 4 * 4 * LOGITS
    assert not kernel.launched


def test_a_model_that_has_its_own_loss_has_no_term():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = build()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return wide_loss(self.body(ids), ids)

    model = Own()
    compiled = megatrain.compile(model, device="cpu", memory="4MiB")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters()))
    assert step.prepare(ids()).known_workload().loss_bytes == 0


@pytest.mark.usefixtures("no_smaller_blocks")
def test_a_budget_without_room_for_the_loss_is_refused():
    needed = step_of(wide_loss, activations="offload").prepare(ids()).device_bytes
    with_room = step_of(wide_loss, activations="offload", memory=needed)
    with_room(ids())
    with pytest.raises(ScheduleError, match=rf"a memory of {needed // 2} B is too small.*\n.*loss \d+ B"):
        step_of(wide_loss, activations="offload", memory=needed // 2, chunking="never").prepare(ids())


def test_measuring_leaves_no_trace():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            self.count += 1
            seen.append(logits.detach())
            dropped = F.dropout(logits.float(), 0.1) * self.scale.detach()
            random.random()
            return F.cross_entropy(dropped.flatten(0, 1), batch.flatten())

    seen: list[torch.Tensor] = []
    loss = Loss()
    step = step_of(loss)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate()
    assert step.prepare(ids()).known_workload().loss_bytes > 2 * 4 * LOGITS
    assert (loss.count, seen, loss.scale.grad) == (0, [], None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    step([ids(), ids(1)])
    step(ids())
    assert (loss.count, len(seen)) == (3, 3)
    assert all(type(t) is torch.Tensor for t in seen)


class Centre(nn.Module):
    """A loss with state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: deque[Any] = deque(maxlen=3)
        self.register_buffer("centre", torch.zeros(WORDS))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(logits.detach().sum())
        self.centre = self.centre * 0.9 + logits.detach().float().mean((0, 1)) * 0.1
        return (logits.float() - self.centre).square().mean() * self.calls


class Holder:
    """A loss behind attributes, and a class with a counter."""

    total = 0
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def made(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        Holder.total += 1
        return self.inner["losses"][0](logits) * Holder.total

    def __call__(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.made(logits, batch)


num_calls = 0


def counting(logits: torch.Tensor, batch: Any, table: dict[str, int]) -> torch.Tensor:
    global num_calls
    num_calls += 1
    table["calls"] = table.get("calls", 0) + 1
    return logits.float().square().mean() * (num_calls + table["calls"])


def stepping(centre: Any) -> Any:
    """A loss that trains something of its own."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([weight], lr=0.1)

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        (weight * logits.detach().float().mean()).square().backward()
        optimizer.step()
        return centre(logits) * weight.detach()

    return loss


def numbered(centre: Any) -> Any:
    number = itertools.count(1)
    return lambda logits, batch: centre(logits) * next(number)


def generated(centre: Any) -> Any:
    weights = (float(number) for number in range(1, 100))
    return lambda logits, batch: centre(logits) * next(weights)


def drawing(centre: Any) -> Any:
    own, torchs, numpys = random.Random(0), torch.Generator().manual_seed(0), np.random.default_rng(0)
    return lambda logits, batch: (
        centre(logits) * own.random() * torch.rand((), generator=torchs).item() * numpys.random()
    )


def weighing(centre: Any) -> Any:
    weights = np.ones(2)

    def loss(logits: torch.Tensor, batch: Any, at: tuple[int, ...] = (0,)) -> torch.Tensor:
        weights[at[0]] *= 2
        return centre(logits) * float(weights[0])

    return loss


STATEFUL: dict[str, Callable[[Any], Any]] = {
    "closure": lambda centre: lambda logits, batch: centre(logits),
    "printing": lambda centre: lambda logits, batch: (centre(logits), print(centre.calls))[0],
    "partial": lambda centre: functools.partial(lambda inner, logits, batch: inner(logits), centre),
    "default": lambda centre: lambda logits, batch, inner=[centre]: inner[0](logits),
    "object": lambda centre: Holder({"losses": [centre]}),
    "bound method": lambda centre: Holder({"losses": (centre.forward,)}).made,
    "function in a dictionary": lambda centre: Holder({"losses": [lambda logits: centre(logits)]}),
    "namespace": lambda centre: functools.partial(
        lambda at, logits, batch: at.inner(logits), SimpleNamespace(inner=centre)
    ),
    "module in a module": lambda centre: functools.partial(
        lambda at, logits, batch: at[0](logits), nn.ModuleList([centre])
    ),
    "global": lambda centre: functools.partial(counting, table={}),
    "optimizer": stepping,
    "count": numbered,
    "generator": generated,
    "random numbers": drawing,
    "array": weighing,
}


@pytest.mark.parametrize("form", STATEFUL)
def test_a_loss_with_state_is_called_once_for_each_micro_batch(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    global num_calls
    ends: list[Any] = []
    for is_eager in (True, False):
        num_calls = Holder.total = 0
        centre = Centre()
        loss, model = STATEFUL[form](centre), build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_eager:
            found = [loop_step(model, optimizer, ids(step), loss=loss)[0] for step in range(2)]
        else:
            compiled = megatrain.compile(model, device="cpu", memory="4MiB")
            step = megatrain.TrainStep(compiled, optimizer, loss=loss)
            found = [step(ids(number)) for number in range(2)]
            step.flush()
        ends.append(
            [
                capsys.readouterr().out,
                found,
                centre.calls,
                list(centre.seen),
                centre.centre,
                num_calls,
                Holder.total,
                model.state_dict(),
            ]
        )
    assert_same(*ends)


def test_a_loss_that_reads_values_counts_four_copies_of_the_results():
    def reads(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return wide_loss(logits, batch) * (2.0 if logits.float().sum().item() > 0 else 1.0)

    step = step_of(reads)
    assert step.prepare(ids()).known_workload().loss_bytes == 4 * 4 * LOGITS
    step(ids())


def test_the_loss_is_measured_once_per_shape(monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []

    def counted(*given: Any) -> int:
        calls.append(given)
        return measure_loss(*given)

    monkeypatch.setattr("megatrain.training.setup.measure_loss", counted)
    model = build()
    compiled = megatrain.compile(model, device="cpu", memory="4MiB")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters()), loss=wide_loss, max_grad_norm=1.0)
    for seed in range(3):
        step(ids(seed))  # the first and the others have schedules of two kinds
    assert len(calls) == 1
    step([ids(3), ids(4)])
    assert len(calls) == 1, "two micro-batches of one program"
    step([ids(5), ids(6)[:1]])
    assert len(calls) == 3, "two micro-batches of two programs"
    step([ids(7)[:1], ids(8)])
    assert len(calls) == 3, "the same two"


def test_a_plan_counts_the_loss_too():
    model = build()
    plans = [megatrain.plan(model, ids(), loss=loss, activations="recompute") for loss in (None, wide_loss)]
    assert plans[0].schedule.known_workload().loss_bytes == 0
    assert plans[1].schedule.device_bytes > plans[0].schedule.device_bytes
    assert "  loss " in str(plans[1])
    step = step_of(wide_loss)
    term = step.prepare(ids()).known_workload().loss_bytes
    assert plans[1].schedule.known_workload().loss_bytes == term
