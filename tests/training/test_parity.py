"""A TrainStep leaves the bits of the plain loop: forward, backward, clip_grad_norm_, step, scheduler."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.tiers import diagonal, one_in
from tests.training.parity import MODES, TASKS, SideBySide, adamw, emptied, fresh, loop_step, sgd, square, stack_batch

STEPS = 8


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in trained(model) if p.dim() == 2], lr=2e-2, weight_decay=0.1)


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "adamw_fused": lambda model: torch.optim.AdamW(trained(model), lr=1e-2, fused=True),
    "sgd": sgd,
    "adafactor": lambda model: torch.optim.Adafactor(trained(model), lr=1e-2),
    "muon": matrices,
}
MODELS = ("gpt", "llama", "t5", "cnn", "lora")
ACTIVATIONS = {"gpt": "offload", "llama": "recompute", "t5": "auto", "cnn": "keep", "lora": "offload"}
# Modes and transfers take turns among the cases of `make test`, and again among those of `make wide`.
MODE, TRANSFER = list(MODES), ("copy", "copy", "bind")
CASES = one_in(
    4,
    (
        (model, optimizer, MODE[index // 4 % len(MODE)], TRANSFER[index // 4 % len(TRANSFER)])
        for index, (model, optimizer) in enumerate(itertools.product(MODELS, OPTIMIZERS))
    ),
)


class Schedule:
    """What a user changes between steps: a warm-up, and hand edits of options in the middle."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, warm_up: bool):
        self.optimizer = optimizer
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)) if warm_up else None
        self.warm_up = warm

    def after(self, step: int) -> None:
        if self.warm_up is not None:
            self.warm_up.step()
        if step == STEPS // 2:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.25
                group["weight_decay"] = group["weight_decay"] * 0.5


@pytest.mark.parametrize(("name", "optimizer", "mode", "transfer"), CASES)
def test_many_steps_have_the_bits_of_the_loop(name: str, optimizer: str, mode: str, transfer: str) -> None:
    task, options = TASKS[name], MODES[mode]
    make = OPTIMIZERS[optimizer]
    eager = task.build()
    chaos = Chaos(seed=len(name), max_delay_s=0.0001)
    activations = ACTIVATIONS[name] if transfer == "copy" else "auto"
    compiled = fresh(name, chaos, transfer=transfer, activations=activations)
    if optimizer == "muon" and name in ("llama", "cnn"):  # frozen; in the other models they are no business of Muon's
        for parameter in (*eager.parameters(), *compiled.parameters()):
            parameter.requires_grad_(parameter.dim() == 2)
    expected, found = make(eager), make(compiled)
    schedules = Schedule(expected, warm_up=optimizer == "adamw"), Schedule(found, warm_up=optimizer == "adamw")
    step = megatrain.TrainStep(compiled, found, loss=task.loss, **options)
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    for number in range(STEPS):
        batch = task.batch(number % 4, 2)
        torch.set_rng_state(generator)
        loss, norm = loop_step(eager, expected, batch, loss=task.loss, max_norm=options.get("max_grad_norm"))
        drawn = torch.get_rng_state()
        torch.set_rng_state(generator)
        assert_same(loss, step(batch), f"loss of step {number}")
        assert_same(norm, step.progress.grad_norm, f"norm of step {number}")
        generator = torch.get_rng_state()
        assert_same(drawn, generator, f"generator after step {number}")
        for schedule in schedules:
            schedule.after(number)
    step.flush()
    assert_same(snapshot(eager, expected), snapshot(compiled.megatrain.model, found))
    assert step.progress.count == STEPS
    assert step.schedule.kind.updates == mode.removesuffix("_clipped")
    assert all(p.grad is None for p in compiled.megatrain.model.parameters())


def stock(name: str, **options: Any) -> Any:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)


EMPTY = {
    "muon": lambda model: [matrices(model), torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], lr=1e-2)],
    "sgd": stock("SGD", momentum=0.9),
    "adamw fused": stock("AdamW", fused=True),
    "adam": stock("Adam", amsgrad=True, foreach=True),
    **{name: stock(name) for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")},
}
EMPTY_MODES = {**MODES, "reported": {"report_norm": True}, "skip": {"on_nonfinite": "skip"}}


@pytest.mark.parametrize(("optimizer", "mode"), diagonal(EMPTY, EMPTY_MODES))
def test_weights_without_elements_train_as_in_the_loop(optimizer: str, mode: str) -> None:
    options = EMPTY_MODES[mode]
    chaos = {"chaos": Chaos(seed=3, max_delay_s=0.001), "block_bytes": 1}
    sides = SideBySide.of("emptied", EMPTY[optimizer], compile_options=chaos, **options)
    clip = options.get("max_grad_norm", math.inf)
    for number in range(3):
        given = [stack_batch(number + 10 * i, 2) for i in range(1 + number % 2)]
        expected = loop_step(sides.eager, sides.eager_optimizers, given, loss=square, max_norm=clip)
        found = sides.step(given), sides.step.progress.grad_norm
        assert_same(expected if found[1] is not None else (expected[0], None), found, "loss and norm")
    sides.assert_same()
    assert not any(parameter.numel() for parameter in (sides.streamed.rows, sides.streamed.shift))


@pytest.mark.parametrize("masters", ["exact", "rounded"])
def test_weights_without_elements_change_nothing_in_bf16(masters: str, tmp_path: Path) -> None:
    """The layers train as in a model without such weights, and from a checkpoint too."""
    ends: list[Any] = []
    for has_some in (True, False):
        model = emptied(has_some=has_some)
        compiled = megatrain.compile(model, device="cpu", transfer="copy", precision="bf16", masters=masters)
        step = megatrain.TrainStep(compiled, adamw(model), loss=square, max_grad_norm=0.5)
        for number in range(3):
            if has_some and number == 2:
                step.save(tmp_path / "run")
                model = emptied()
                compiled = megatrain.compile(model, device="cpu", transfer="copy", precision="bf16", masters=masters)
                step = megatrain.TrainStep.load(
                    tmp_path / "run", compiled, adamw(model), loss=square, max_grad_norm=0.5
                )
            step([stack_batch(number, 2), stack_batch(number + 10, 2)])
        step.flush()
        ends.append([parameter for parameter in model.parameters() if parameter.numel()])
    assert_same(*ends)
