"""Updates that are spread over two steps: the bits of the loop, and when they are not spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.planning import host_plan
from megatrain.runtime.streams.stream_set import Chaos
from tests.training.parity import TASKS, SideBySide, adamw, fresh, generator_of, ids, labelled, sgd


def spread(name: str = "llama", **options: Any) -> SideBySide:
    options.setdefault("spread", True)
    return SideBySide.of(name, adamw, **options)


def kinds(sides: SideBySide, batches: list[Any]) -> list[str]:
    found: list[str] = []
    for number, batch in enumerate(batches):
        sides.take(batch, seed=number)
        found.append(sides.step.schedule.kind.updates)
    return found


@pytest.mark.parametrize("transfer", ["copy", "bind"])
def test_batches_of_many_shapes_take_turns(transfer: str):
    """Each shape has a schedule of its own: updates that one leaves, another one runs."""
    sides = spread(compile_options={"transfer": transfer, "chaos": Chaos(seed=3, max_delay_s=1e-4)})
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
        for optimizers in (sides.eager_optimizers, sides.optimizers)
    ]
    due: list[list[int]] = []
    for number in range(7):
        length, count = (7, 5)[number // 2 % 2], (1, 2)[number % 2]
        batch = [{key: ids(number + i, 2, length) for key in ("input_ids", "labels")} for i in range(count)]
        sides.take(batch, seed=number)
        assert sides.step.schedule.kind.updates == "spread"
        due.append(sides.step._setup.updates.due)  # type: ignore[union-attr]
        assert due[-1] == list(sides.step.schedule.deferred)
        for scheduler in schedulers:
            scheduler.step()  # what is due was begun with the rate of its own step
        if number == 4:
            sides.assert_same()  # looks, and so completes
    assert all(0 < len(blocks) < len(sides.step.schedule.known_workload().update_blocks()) for blocks in due)
    sides.assert_same()


def test_parameters_that_are_looked_at_after_each_step_are_updated_within():
    sides = spread()
    found: list[str] = []
    for number in range(8):
        sides.take(labelled(number, 2), seed=number)
        found.append(sides.step.schedule.kind.updates)
        if number >= 2:
            sides.streamed.get_parameter("lm_head.weight").sum()
            sides.streamed.get_parameter("model.embed_tokens.weight").sum()
    assert found == ["spread"] * 5 + ["overlap"] * 3
    sides.assert_same()


def test_looks_now_and_then_change_nothing():
    sides = spread()
    found: list[str] = []
    for number in range(8):
        sides.take(labelled(number, 2), seed=number)
        found.append(sides.step.schedule.kind.updates)
        if number % 3 != 2:
            sides.step.flush()
    assert found == ["spread"] * 8
    sides.assert_same()


def test_parameters_of_the_loss_are_not_left_to_the_next_step():
    """The next loss reads them before the next step would update them."""
    found: list[Any] = []
    for is_spread in (True, False):
        compiled = fresh("stack")
        scale = nn.Parameter(torch.tensor(1.5))
        optimizer = torch.optim.SGD([*compiled.parameters(), scale], lr=0.1)

        def loss(result: torch.Tensor, _: Any, scale: torch.Tensor = scale) -> torch.Tensor:
            return (result * scale).square().mean()

        step = megatrain.TrainStep(compiled, optimizer, loss=loss, spread=is_spread)
        losses = [step(torch.randn(2, 3, generator=generator_of(n))).item() for n in range(4)]
        assert step.schedule.kind.updates == "overlap"
        found.append([*losses, scale.item()])
    assert found[0] == found[1]
    assert len(set(found[0])) == 5


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"spread": None}, "overlap"),  # on the CPU
        ({"spread": False}, "overlap"),
        ({"overlap": False}, "serial"),
        ({"max_grad_norm": 1.0}, "deferred"),
        ({"on_nonfinite": "skip"}, "deferred"),
        ({"report_norm": True}, "overlap"),
    ],
)
def test_where_updates_are_not_spread(options: dict[str, Any], updates: str):
    sides = spread(**options)
    assert kinds(sides, [labelled(number, 2) for number in range(2)])[1] == updates
    sides.assert_same()


def test_hooks_on_parameters_get_their_gradients_in_serial_steps():
    sides = spread("stack")
    seen: list[torch.Tensor] = []
    assert kinds(sides, [TASKS["stack"].batch(number, 2) for number in range(2)]) == ["spread"] * 2
    parameter = next(sides.streamed.parameters())
    handle = parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    assert kinds(sides, [TASKS["stack"].batch(number, 2) for number in range(2)]) == ["serial"] * 2
    handle.remove()
    assert len(seen) == 2
    assert kinds(sides, [TASKS["stack"].batch(number, 2) for number in range(2)]) == ["spread"] * 2
    sides.assert_same()


def test_without_the_host_memory_for_gradients_that_wait_updates_are_not_spread(monkeypatch: pytest.MonkeyPatch):
    needed: dict[bool, int] = {}
    for is_spread in (True, False):
        step = megatrain.TrainStep(compiled := fresh("llama"), sgd(compiled), spread=is_spread)
        step.prepare(labelled(0, 2))
        needed[is_spread] = step.host_plan.total_bytes - step.host_plan.held_bytes
    assert needed[True] > needed[False]
    for available, updates in ((needed[True], "spread"), (needed[True] - 1, "overlap"), (needed[False], "overlap")):
        sides = SideBySide.of("llama", sgd, spread=True)
        monkeypatch.setattr(host_plan, "available_now", lambda available=available: available)
        assert kinds(sides, [labelled(number, 2) for number in range(3)]) == [updates] * 3
        sides.assert_same()
    step = megatrain.TrainStep(compiled := fresh("llama"), sgd(compiled), spread=True)
    monkeypatch.setattr(host_plan, "available_now", lambda: needed[False] - 1)
    with pytest.raises(megatrain.ExecuteError, match="1 B are missing"):
        step(labelled(0, 2))
