"""The norm of all gradients, reported without waiting for it; and gradients that end a step, as they aren't finite."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import pytest
import torch

from megatrain.errors import ExecuteError, OptionError
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.step_kind import StepKind
from tests.comparing import assert_same, snapshot
from tests.training.hazards import TRAP
from tests.training.parity import TASKS, SideBySide, adamw, loop_gradients, loop_step, sgd
from tests.training.test_failures import batches

PLACES = {"layers.0.fc.weight": 0, "layers.1.norm.bias": 1, "head.weight": None}


@pytest.fixture(autouse=True)
def _clear_trap() -> Generator[None]:
    TRAP.clear()
    yield
    TRAP.clear()


# -- not finite ------------------------------------------------------------------------------------------------------


class Spoilt:
    """Steps on both sides; in some, a factor makes an element of one parameter's gradient infinite."""

    def __init__(self, optimizer: Any = sgd, **options: Any):
        compiled = {"activations": "offload", "chaos": Chaos(seed=1, max_delay_s=0.0001)}
        self.sides = SideBySide.of("hazardous", optimizer, compile_options=compiled, **options)
        self.bad: str | None = None
        self.factor, self.number = math.inf, 0
        self.handles = [
            model.get_parameter(name).register_hook(lambda gradient, name=name: self.spoil(name, gradient))
            for model in (self.sides.eager, self.sides.streamed)
            for name in PLACES
        ]

    def __enter__(self) -> Spoilt:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def spoil(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if name != self.bad:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = self.factor
        return spoilt

    def take(self, count: int = 1) -> None:
        self.bad = None
        for _ in range(count):
            self.sides.take(batches(self.number), seed=self.number)
            self.number += 1

    def text(self, name: str) -> str:
        found = PLACES[name]
        last = max(op.block for op in self.sides.step.schedule.ops if op.what == "G")
        return f"the gradient of `{name}`, of block {last if found is None else found},"

    def skip(self, name: str) -> None:
        """The loop makes gradients, and doesn't use them."""
        self.bad = name
        torch.manual_seed(self.number)
        expected = loop_gradients(self.sides.eager, batches(self.number), loss=self.sides.loss)
        self.sides.eager.zero_grad()
        drawn = torch.get_rng_state()
        torch.manual_seed(self.number)
        assert_same(expected, self.sides.step(batches(self.number)), f"loss of step {self.number}")
        assert_same(drawn, torch.get_rng_state(), f"generator after step {self.number}")
        self.number += 1

    def refuse(self, name: str) -> str:
        """The step raises, and all is as before."""
        self.bad = name
        torch.manual_seed(self.number)
        drawn, count = torch.get_rng_state(), self.sides.step.progress.count
        expected = snapshot(self.sides.eager, self.sides.eager_optimizer)
        with pytest.raises(ExecuteError, match="is not finite") as caught:
            self.sides.step(batches(self.number))
        assert_same(drawn, torch.get_rng_state(), "generator")
        self.sides.step.flush()
        assert_same(expected, snapshot(self.sides.streamed, self.sides.optimizer), name)
        assert self.sides.step.progress.count == count
        assert not [key for key, p in self.sides.streamed.named_parameters() if p.grad is not None]
        return str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "options"), [(adamw, {}), (sgd, {"max_grad_norm": 0.5, "overlap": False})], ids=["deferred", "serial"]
)
def test_skipped_steps_are_those_of_a_loop_that_skips_them(optimizer: Any, options: dict[str, Any]) -> None:
    with Spoilt(optimizer, on_nonfinite="skip", **options) as run:
        run.take(2)
        for number, name in enumerate(PLACES):
            run.skip(name)
            assert run.sides.step.progress.skipped == number + 1
            assert run.sides.step.progress.nonfinite == run.text(name)
            if number != 1:
                run.take(number + 1)  # and after the second, two skipped ones in a row
        run.sides.assert_same()
        assert (run.sides.step.progress.count, run.sides.step.progress.skipped) == (run.number, 3)


@pytest.mark.parametrize(
    ("optimizer", "options"), [(sgd, {"overlap": False}), (adamw, {"max_grad_norm": 0.5})], ids=["serial", "deferred"]
)
def test_refused_steps_leave_no_trace(optimizer: Any, options: dict[str, Any]) -> None:
    with Spoilt(optimizer, on_nonfinite="raise", **options) as run:
        for name in PLACES:  # the first before any good step
            assert f"{run.text(name)} is not finite" in run.refuse(name) if run.number else run.refuse(name)
            run.take(2)
        run.sides.assert_same()
        assert run.sides.step.progress.skipped == 0


@pytest.mark.parametrize(("factor", "options"), [(1e30, {"on_nonfinite": "skip"}), (math.inf, {})])
def test_a_norm_that_overflows_goes_where_eager_lets_it_go(factor: float, options: dict[str, Any]) -> None:
    """Of finite gradients in any case, and of others without the option."""
    with Spoilt(max_grad_norm=0.5, **options) as run:
        run.factor = factor
        run.take(1)
        run.bad = "layers.1.norm.bias"
        run.sides.take(batches(1)[:1], seed=1)  # a hook on a parameter runs once a step, in the loop with each backward
        run.sides.step.flush()
        left, right = (dict(m.named_parameters()) for m in (run.sides.eager, run.sides.streamed))
        for name in left:
            assert torch.equal(left[name].isnan(), right[name].isnan()), name
            assert torch.equal(left[name].nan_to_num(), right[name].nan_to_num()), name
        assert left["layers.1.norm.bias"].isfinite().all() == math.isfinite(factor)
        assert run.sides.step.progress.skipped == 0


# -- reported --------------------------------------------------------------------------------------------------------


def take(sides: SideBySide, number: int, given: Any) -> None:
    """Takes a step on both sides; compares losses and norms."""
    torch.manual_seed(number)
    # The loop's way to a norm without clipping.
    expected = loop_step(sides.eager, sides.eager_optimizers, given, loss=sides.loss, max_norm=math.inf)
    torch.manual_seed(number)
    assert_same(expected, (sides.step(given), sides.step.progress.grad_norm))


@pytest.mark.parametrize(("name", "mode"), [("gpt", "overlap"), ("lora", "serial")])
def test_the_norm_has_the_bits_of_the_loop(name: str, mode: str) -> None:
    """With a shared embedding (GPT), and with frozen parameters and several micro-batches (LoRA)."""
    sides = SideBySide.of(name, adamw, report_norm=True, overlap=mode == "overlap")
    for number in range(3):
        count = 1 if name == "gpt" else 1 + number % 2
        take(sides, number, [TASKS[name].batch(number + 20 * i, 2) for i in range(count)])
        assert not sides.step._setup.is_due
    sides.assert_same()
    schedule = sides.step.schedule
    assert (schedule.kind.updates, schedule.kind.clip, schedule.kind.reports_norm) == (mode, False, True)
    assert [op.what for op in schedule.ops if op.what in "SN"] == ["N"]
    assert f"\nupdates: {mode}, norm\n" in str(schedule)


@pytest.mark.parametrize("other", [{"clip": True, "updates": "overlap"}, {"updates": "deferred"}, {"updates": "none"}])
def test_a_norm_that_nothing_waits_for_belongs_to_updates_of_its_own_step(other: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="reports_norm=True with clip="):
        StepKind(reports_norm=True, **other)


def test_hooks_on_a_step_make_the_updates_wait_for_the_norm() -> None:
    """They may change gradients, after the loop has taken its norm."""
    sides = SideBySide.of("stack", adamw, report_norm=True)

    def change(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    for optimizer in (sides.eager_optimizer, sides.optimizer):
        optimizer.register_step_pre_hook(change)
    for number in range(2):
        take(sides, number, TASKS["stack"].batch(number, 2))
    sides.assert_same()
    assert (sides.step.schedule.kind.updates, sides.step.schedule.kind.clip) == ("serial", True)
