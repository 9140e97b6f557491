"""The norm of a step that doesn't clip: the loop's bits, while updates run as if nobody asked for it."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError, OptionError
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.step_kind import StepKind
from tests.comparing import assert_same
from tests.tiers import diagonal, wide
from tests.training.hazards import TRAP
from tests.training.parity import MODES, TASKS, SideBySide, adamw, fresh, loop_step, sgd
from tests.training.test_failures import Run, batches, tokens
from tests.training.test_several_optimizers import muon_adamw, over

REPORTED: dict[str, dict[str, Any]] = {
    "overlap": {"report_norm": True},
    "serial": {"report_norm": True, "overlap": False},
}

INFINITE = {"max_grad_norm": math.inf}


@pytest.fixture(autouse=True)
def _clear_trap() -> Generator[None]:
    TRAP.clear()
    yield
    TRAP.clear()


def take(sides: SideBySide, number: int, batches: Any) -> None:
    """Takes a step on both sides; compares losses and norms."""
    torch.manual_seed(number)
    # The loop's way to a norm without clipping.
    loss, norm = loop_step(sides.eager, sides.eager_optimizers, batches, loss=sides.loss, max_norm=math.inf)
    torch.manual_seed(number)
    assert_same(loss, sides.step(batches))
    assert norm is not None
    assert_same(norm, sides.step.progress.grad_norm)


CASES = [("gpt", adamw), ("llama", sgd), ("lora", adamw), ("cnn", adamw), ("gpt", over(muon_adamw))]


@pytest.mark.parametrize(("case", "mode"), diagonal(CASES, REPORTED))
def test_the_norm_has_the_bits_of_the_loop(case: Any, mode: str) -> None:
    """With a shared embedding (GPT), frozen parameters (LoRA), and several micro-batches where nothing is shared."""
    name, optimizer = case
    sides = SideBySide.of(name, optimizer, **REPORTED[mode])
    for number in range(3):
        count = 1 if name == "gpt" else 1 + number % 2
        take(sides, number, [TASKS[name].batch(number + 20 * i, 2) for i in range(count)])
        assert not sides.step._setup.is_due
    sides.assert_same()
    schedule = sides.step.schedule
    assert schedule.kind.updates == mode
    assert (schedule.kind.clip, schedule.kind.reports_norm) == (False, True)
    assert [op.what for op in schedule.ops if op.what in "SN"] == ["N"]
    assert f"\nupdates: {mode}, norm\n" in str(schedule)


def test_gradients_wait_no_longer_than_without_a_norm() -> None:
    compiled, batch = fresh("llama"), TASKS["llama"].batch(0, 2)
    schedules: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "reported": {"report_norm": True}, "clipped": INFINITE}
    for name, options in ways.items():
        step = megatrain.TrainStep(compiled, adamw(compiled.megatrain.model), **options)
        schedules[name] = step.prepare(batch)
    plain, reported, clipped = (schedules[name] for name in ("plain", "reported", "clipped"))
    assert reported.landing_bytes == plain.landing_bytes < clipped.landing_bytes
    without = [[op for op in tick.values() if op.what != "N"] for tick in _rows(reported)]
    assert [row for row in without if row] == [list(tick.values()) for tick in _rows(plain)]


def _rows(schedule: Any) -> list[dict[Any, Any]]:
    rows: dict[int, dict[Any, Any]] = {}
    for position, op in schedule.positions():
        rows.setdefault(position.tick, {})[position.stream] = op
    return [rows[tick] for tick in sorted(rows)]


@pytest.mark.parametrize("precision", [wide("fp32"), "bf16"])  # all other tests are in fp32
def test_it_is_the_norm_of_a_step_that_waits_for_it(precision: str) -> None:
    found: list[Any] = []
    ways: list[dict[str, Any]] = [{"report_norm": True}, INFINITE, {"report_norm": True, "max_grad_norm": 1e9}]
    for options in ways:
        torch.manual_seed(0)
        model = TASKS["llama"].build()
        step = megatrain.TrainStep(megatrain.compile(model, device="cpu", precision=precision), adamw(model), **options)
        norms = []
        for number in range(2):
            step(TASKS["llama"].batch(number, 2))
            norms.append(step.progress.grad_norm)
        step.flush()
        assert step.schedule.kind.clip == ("max_grad_norm" in options)
        found.append((norms, {name: p.detach().clone() for name, p in model.named_parameters()}))
    for other in found[1:]:
        assert_same(found[0], other)


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


def test_a_failure_of_any_operation_leaves_a_whole_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "reported", {"report_norm": True})
    run = Run("reported")
    run.sides.max_norm = math.inf
    run.take(2)
    engine, completed = run.sides.compiled.megatrain.engine, []
    for token in [*tokens(run.sides.step.schedule)[::2], "host:N"]:
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        if run.fail((ExecuteError, RuntimeError), token, heal=lambda: engine.set_chaos(None)):
            completed.append(token)
            assert run.sides.step.progress.grad_norm is not None
        take(run.sides, run.number, batches(run.number))
        run.number += 1
    run.sides.assert_same()
    assert "host:N" in completed
    assert any(token.startswith("host:U") for token in completed)


def test_an_update_that_fails_and_runs_again_sums_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "reported", {"report_norm": True})
    run = Run("reported")
    run.sides.max_norm = math.inf
    run.take(1)
    for after in range(3):
        torch.manual_seed(run.number)
        given = batches(run.number)
        eager = run.sides.eager
        _, norm = loop_step(eager, run.sides.eager_optimizers, given, loss=run.sides.loss, max_norm=math.inf)
        torch.manual_seed(run.number)
        TRAP.arm("update", fails, after=after)
        with pytest.raises(ExecuteError, match="OSError: once"):
            run.sides.step(given)
        TRAP.clear()
        run.number += 1
        if not after:  # no update came before it, so the step left no trace
            torch.manual_seed(run.number - 1)
            run.sides.step(given)
        assert_same(norm, run.sides.step.progress.grad_norm)
        run.sides.assert_same(after)


def fails() -> None:
    raise OSError("once")


@pytest.mark.parametrize("other", [{"clip": True, "updates": "overlap"}, {"updates": "deferred"}, {"updates": "none"}])
def test_a_norm_that_nothing_waits_for_belongs_to_updates_of_its_own_step(other: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="reports_norm=True with clip="):
        StepKind(reports_norm=True, **other)
