"""A loss: what it may do with results and with state, and the memory that it takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, ScheduleError
from megatrain.passes.kernels import LiveBytes
from megatrain.scheduler.lifetimes import find_peak
from tests.comparing import assert_same, snapshot
from tests.training.parity import SideBySide, adamw, loop_step, stack_batch


def divided(result: Any, batch: Any) -> torch.Tensor:
    result /= 3.0
    return result.square().mean()


def masked(result: Any, batch: Any) -> torch.Tensor:
    result[:, 0] = 0.0
    return result.exp().mean()


def scaled(result: Any, batch: Any) -> torch.Tensor:
    loss = result.square().mean()
    loss *= 0.5
    return loss


def summed(result: Any, batch: Any) -> torch.Tensor:
    return result.sum() + (result * result.detach()).mean() + result.t().matmul(result).mean()


def hooked(result: Any, batch: Any) -> torch.Tensor:
    result.register_hook(lambda g: g * 2)
    result.retain_grad()
    assert not result.is_leaf
    GRADIENTS.append(result)
    return result.square().mean()


GRADIENTS: list[torch.Tensor] = []


def test_a_loss_may_write_into_results_hook_them_and_keep_their_gradients() -> None:
    sides = SideBySide.of("stack", adamw, max_grad_norm=0.5)
    for loss in (divided, masked, scaled, summed, hooked):
        GRADIENTS.clear()
        step = megatrain.TrainStep(sides.compiled, sides.optimizer, loss=loss, max_grad_norm=0.5)
        for number in range(2):
            batches = [stack_batch(number, 2), stack_batch(number + 10, 2)]
            expected, _ = loop_step(sides.eager, sides.eager_optimizer, batches, loss=loss, max_norm=0.5)
            assert_same(expected, step(batches), loss.__name__)
        step.flush()
        assert_same(snapshot(sides.eager, sides.eager_optimizer), snapshot(sides.streamed, sides.optimizer))
        kept = [result.grad for result in GRADIENTS if type(result) is torch.Tensor]
        assert_same(kept[:2] + kept[4:6], kept[2:4] + kept[6:8])


class Counts(nn.Linear):
    """A buffer that the forward writes, and one that it reads; its backward looks at the first."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.count: Any
        self.shift: Any
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return super().forward(x) + self.shift


WRITES: dict[str, tuple[Callable[[Any], torch.Tensor], int]] = {
    "parameter `1.bias`": (lambda model: model[1].bias, 1),
    "buffer `1.shift`": (lambda model: model[1].shift, 1),
    "buffer `1.count`": (lambda model: model[1].count, 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_of_a_loss_that_come_too_late_are_refused_and_a_step_that_ends_leaves_buffers(name: str) -> None:
    of, count = WRITES[name]
    model = nn.Sequential(nn.Linear(3, 3), Counts())

    def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
        if type(result) is torch.Tensor:  # not in the trial on tensors without values
            with torch.no_grad():
                of(model).mul_(2)
        return result.square().mean()

    compiled = megatrain.compile(model, device="cpu", memory="16KiB", transfer="copy", block_bytes=1)
    step = megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss)
    with pytest.raises(ExecuteError, match=rf"writes {name}, which the rest"):
        step([torch.ones(2, 3)] * count)
    assert int(model.get_buffer("1.count")) == 0


# -- memory ----------------------------------------------------------------------------------------------------------

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


def test_a_loss_that_reads_values_counts_four_copies_of_the_results():
    def reads(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return wide_loss(logits, batch) * (2.0 if logits.float().sum().item() > 0 else 1.0)

    step = step_of(reads)
    assert step.prepare(ids()).known_workload().loss_bytes == 4 * 4 * LOGITS
    step(ids())


def test_a_plan_counts_the_loss_too():
    model = build()
    plans = [megatrain.plan(model, ids(), loss=loss, activations="recompute") for loss in (None, wide_loss)]
    assert plans[0].schedule.known_workload().loss_bytes == 0
    assert plans[1].schedule.device_bytes > plans[0].schedule.device_bytes
    assert "  loss " in str(plans[1])
    step = step_of(wide_loss)
    term = step.prepare(ids()).known_workload().loss_bytes
    assert plans[1].schedule.known_workload().loss_bytes == term
