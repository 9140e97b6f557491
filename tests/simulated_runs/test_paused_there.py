"""A trainer's own code around its calls of the model, on the device: on threads of its own, in the order of streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.integrations.hf.one_step import OneStep
from tests.comparing import assert_same
from tests.simulated_device.simulator import Simulator
from tests.simulated_runs.on_device import DEVICE, ORDERS, choose, host_copy, on_device
from tests.training.parity import generator_of

WIDTH, COUNT, STEPS = 16, 3, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def batches(step: int) -> list[Any]:
    draw = generator_of(step)
    return on_device([torch.randn(size, WIDTH, generator=draw) for size in (2, 5, 3)])


def code(called: Callable[[Any], torch.Tensor], x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    """What a trainer does with one micro-batch: it reads the result, writes into a loss, keeps a metric."""
    result = called(x)
    loss = result.logsumexp(-1).sum() + x.mean()
    loss *= 0.5
    kept.append(result.detach().max())
    (loss / COUNT).backward()
    return loss.detach() / COUNT


@pytest.mark.parametrize("calls_again", [False, True])
@pytest.mark.parametrize("order", ["early", *ORDERS])
def test_a_trainers_code_has_eagers_bits_in_every_order_of_the_streams(sim: Simulator, order: str, calls_again: bool):
    if calls_again and order not in ("early", "late"):
        pytest.skip("these streamed calls are those of other tests")
    eager = copy.deepcopy(model()).to(DEVICE)
    expected = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    compiled = megatrain.compile(model(), device=DEVICE, activations="offload")
    found = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)

    def make(loss: Any) -> megatrain.TrainStep:
        return megatrain.TrainStep(compiled, found, loss=loss, reduce="sum", max_grad_norm=0.1)

    one_step = OneStep(compiled, make, lambda: (found,), lambda: False, {}, compiled)
    if calls_again:
        with pytest.warns(megatrain.StreamedCallsWarning):
            one_step.fall_back("this test says so")

    for step in range(STEPS):
        choose(sim, "early")
        torch.manual_seed(step)
        wanted: list[torch.Tensor] = []
        losses = [code(eager, x, wanted) for x in batches(step)]
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        expected.step()
        expected.zero_grad()
        after = torch.get_device_module(DEVICE).get_rng_state(DEVICE)
        choose(sim, order, compiled)
        torch.manual_seed(step)
        kept: list[torch.Tensor] = []
        one_step.begin(COUNT)
        taken = [loss for x in batches(step) for loss in one_step.take(partial(code, compiled, x, kept))]
        if not one_step.has_updated:
            nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)
            found.step()
            found.zero_grad()
        else:
            assert one_step.step is not None
            assert_same(host_copy([one_step.step.progress.grad_norm]), host_copy([norm]))  # pyright: ignore
        assert_same(host_copy(taken), host_copy(losses))
        assert_same(host_copy(kept), host_copy(wanted))
        assert torch.equal(torch.get_device_module(DEVICE).get_rng_state(DEVICE), after)
        assert_same(host_copy(list(compiled.parameters())), host_copy(list(eager.parameters())))


def test_no_micro_batch_waits_for_the_device(sim: Simulator):
    """Losses are added up on the device, and nothing that a trainer logs is read before it logs."""
    compiled = megatrain.compile(model(), device=DEVICE, activations="offload")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)

    def make(loss: Any) -> megatrain.TrainStep:
        return megatrain.TrainStep(compiled, optimizer, loss=loss, reduce="sum", max_grad_norm=0.1)

    one_step = OneStep(compiled, make, lambda: (optimizer,), lambda: False, {}, compiled)
    total = torch.zeros((), device=DEVICE)

    def update(xs: list[Any]) -> None:
        one_step.begin(COUNT)
        for x in xs:
            for loss in one_step.take(partial(code, compiled, x, [])):
                total.add_(loss)

    for step in range(2):
        update(batches(step))
    given = batches(2)
    with sim.synchronizations() as found:
        update(given)
    assert one_step.has_updated
    assert [str(one) for one in found if not one.thread.startswith("megatrain-")] == []
    assert float(total) > 0
