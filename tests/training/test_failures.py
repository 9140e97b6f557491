"""A step that fails in its middle ends where it began or, if the error says so, at its own end; then all goes on."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.training.trainer import Running
from tests.comparing import assert_same, snapshot
from tests.threads import living
from tests.tiers import checkered, diagonal, wide
from tests.training.hazards import TRAP, WIDTH, watched
from tests.training.parity import MODES, SideBySide, generator_of, loop_step

FAILING_MODES = ("overlap", "spread", "deferred", "serial_clipped")
UNCLIPPED = ("overlap", "spread")
UNTIL = 300.0  # on a loaded machine


class OwnError(KeyError):
    pass


@pytest.fixture(autouse=True)
def _clear_trap() -> Generator[None]:
    TRAP.clear()
    yield
    TRAP.clear()


def batches(step: int) -> list[torch.Tensor]:
    return [torch.randn(size, WIDTH, generator=generator_of(step * 2 + i)) for i, size in enumerate((2, 3))]


class Run:
    """Steps on both sides, numbered, so that a failed one can be taken again."""

    def __init__(self, mode: str, transfer: str = "copy", name: str = "hazardous"):
        options = {"transfer": transfer, "activations": "offload" if transfer == "copy" else "auto"}
        self.sides = SideBySide.of(name, watched, compile_options=options, **MODES[mode])
        self.number = 0

    def take(self, count: int = 1) -> None:
        for _ in range(count):
            self.sides.take(batches(self.number), seed=self.number)
            self.number += 1

    def expected(self) -> dict[str, Any]:
        """What both sides should be now; reading it completes no update."""
        return snapshot(self.sides.eager, self.sides.eager_optimizer)

    def found(self) -> dict[str, Any]:
        self.sides.step.flush()
        return snapshot(self.sides.streamed, self.sides.optimizer)

    def fail(self, error: Any, what: object, *, heal: Callable[[], None] = TRAP.clear) -> bool:
        """Takes a step that fails; asserts that it ended at a boundary, and returns whether at its own end."""
        torch.manual_seed(self.number)
        before = self.expected()
        count = self.sides.step.progress.count
        with pytest.raises(error) as caught:
            self.sides.step(batches(self.number))
        drawn = torch.get_rng_state()
        heal()
        notes = "\n".join(getattr(caught.value, "__notes__", ()))
        assert "can't be computed" not in notes, what
        is_completed = "was completed" in notes
        torch.manual_seed(self.number)
        if is_completed:
            self.sides.expect(batches(self.number))
            self.number += 1
            before = self.expected()
        torch.set_rng_state(drawn)
        assert_same(before, self.found(), f"{what}, completed: {is_completed}:")
        assert self.sides.step.progress.count == count + is_completed
        assert all(p.grad is None for p in self.sides.streamed.parameters()), what
        return is_completed


def tokens(schedule: megatrain.Schedule) -> list[str]:
    """Every operation as `stream:token`, each once."""
    return list(dict.fromkeys(f"{position.stream}:{op}" for position, op in schedule.positions()))


@pytest.mark.parametrize(("mode", "first"), diagonal(FAILING_MODES, [0, 1, 2]))
def test_a_failure_of_any_operation_ends_the_step_at_a_boundary(mode: str, first: int) -> None:
    """Of every third operation."""
    run = Run(mode)
    run.take(2)
    chosen = tokens(run.sides.step.schedule)
    assert {token.split(":")[1][0] for token in chosen} == set("WFBAGU" if mode in UNCLIPPED else "WFBAGUSN")
    assert any(token.startswith("h2d:A") for token in chosen)
    engine, completed = run.sides.compiled.megatrain.engine, []
    for token in chosen[first::3]:
        run.take()  # so that a deferred step has updates to take
        assert token in tokens(run.sides.step.schedule) or mode == "deferred"
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        if run.fail((ExecuteError, RuntimeError), token, heal=lambda: engine.set_chaos(None)):
            completed.append(token)
    run.take(2)
    run.sides.assert_same(mode)
    if mode == "deferred":
        assert not completed
    else:
        assert completed  # at least what comes after the first update
        assert {token.split(":")[1][0] for token in completed} <= set("WBAGU" if mode in UNCLIPPED else "U")


@pytest.mark.parametrize("mode", ["deferred", wide("overlap"), "spread"])
def test_a_failure_of_the_very_first_step(mode: str) -> None:
    run = Run(mode)
    engine = run.sides.compiled.megatrain.engine
    for token in tokens(run.sides.step.prepare(batches(0))):
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        run.fail((ExecuteError, RuntimeError), token, heal=lambda: engine.set_chaos(None))
        if run.number:
            break  # completed: the first step is over
    run.take(3)
    run.sides.assert_same()


@pytest.mark.parametrize("modes", [("spread", "deferred"), wide((("overlap", "serial_clipped"),))])
def test_nothing_leaks_over_eighteen_failures(modes: tuple[str, ...]) -> None:
    gc.collect()
    threads = set(threading.enumerate())
    for mode in modes:
        run = Run(mode)
        run.take(2)
        run.sides.step.flush()
        engine, names = run.sides.compiled.megatrain.engine, tokens(run.sides.step.schedule)
        gc.collect()
        held, tensors = engine.meter.current, num_tensors()
        for number in range(9):
            engine.set_chaos(None)
            run.sides.step(batches(number))  # so that a deferred step has updates to take
            engine.set_chaos(Chaos(fail=names[number * len(names) // 9], max_delay_s=0))
            with pytest.raises((ExecuteError, RuntimeError)):
                run.sides.step(batches(number))
            run.sides.step.flush()
        engine.set_chaos(None)
        gc.collect()
        assert engine.meter.current == held
        assert num_tensors() <= tensors + 2, mode
        del run, engine
        gc.collect()
        assert not living(threads)


def num_tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


# -- errors of the user's own code ---------------------------------------------------------------------------


def failing() -> None:
    raise OwnError("my own error")


@contextmanager
def first_update() -> Generator[Callable[[], None]]:
    """Gives a function that waits until a block of this step is updated, so that a test doesn't hang on timing."""
    done = threading.Event()
    original = Running.update

    def update(self: Any, block: int) -> None:
        original(self, block)
        if self.has_updated:
            done.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Running, "update", update)

        def fail() -> None:
            assert done.wait(UNTIL)
            failing()

        yield fail


@pytest.mark.parametrize(("mode", "micro_batch"), checkered(FAILING_MODES, [0, 1]))
def test_an_error_in_the_users_loss_leaves_no_trace(mode: str, micro_batch: int) -> None:
    run = Run(mode)
    run.take(2)
    TRAP.arm("loss", failing, after=micro_batch)
    assert not run.fail(OwnError, "loss")
    run.take(2)
    run.sides.assert_same()


IN_MODEL = [(0, "backward", 1), (2, "forward", 0), (2, "backward", 0), (0, "forward", 1)]


@pytest.mark.parametrize(
    ("mode", "place", "number", "micro_batch"),
    [
        (mode, place, number, which) if IN_MODEL[row] == (number, place, which) else wide((mode, place, number, which))
        for row, mode in enumerate(FAILING_MODES)
        for place, number, which in itertools.product(["forward", "backward"], [0, 2], [0, 1])
    ],
)
def test_an_error_once_in_the_models_own_code(mode: str, place: str, number: int, micro_batch: int) -> None:
    run = Run(mode)
    run.take(2)
    # The backward repeats the forward of all layers but that of the last block, so those come by twice.
    TRAP.arm((place, number), failing, after=micro_batch)
    is_completed = run.fail(OwnError, (place, number))
    assert not is_completed or mode in UNCLIPPED
    run.take(2)
    run.sides.assert_same()


@pytest.mark.parametrize("mode", UNCLIPPED)
def test_an_error_once_behind_an_update_completes_the_step(mode: str) -> None:
    for micro_batch in (0, 1):
        run = Run(mode)
        run.take(2)
        with first_update() as fail:
            TRAP.arm(("backward", 0), fail, after=micro_batch)
            assert run.fail(OwnError, micro_batch)
        run.take(2)
        run.sides.assert_same()


@pytest.mark.parametrize("mode", UNCLIPPED)
def test_an_error_always_behind_an_update_is_the_end(mode: str) -> None:
    run = Run(mode)
    run.take(2)
    with first_update() as fail:
        TRAP.arm(("backward", 0), fail, always=True)
        with pytest.raises(OwnError, match="my own error") as caught:
            run.sides.step(batches(2))
    notes = "\n".join(caught.value.__notes__)
    assert "the model is in the middle of a step: blocks [0" in notes
    TRAP.clear()
    for _ in range(2):
        with pytest.raises(ExecuteError, match=r"the model is in the middle of a step: blocks \[0.*are not updated"):
            run.sides.step(batches(2))
    assert all(p.grad is None for p in run.sides.streamed.parameters())
    run.sides.compiled.state_dict()  # to look at it is not refused
    run.sides.step.flush()


@pytest.mark.parametrize("mode", ["deferred", "serial", "serial_clipped"])
def test_an_error_always_ahead_of_all_updates_leaves_no_trace(mode: str) -> None:
    run = Run(mode)
    run.take(2)
    for _ in range(2):
        TRAP.arm(("backward", 0), failing, always=True)
        assert not run.fail(OwnError, mode)
    run.take(2)
    run.sides.assert_same()


# -- errors of the optimizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "after"), diagonal(MODES, [0, 1, 2]))
def test_an_error_once_in_the_optimizer(mode: str, after: int) -> None:
    """It comes when the parameters of a block and their state are written already."""
    run = Run(mode)
    run.take(2)
    TRAP.arm("update", failing, after=after)
    is_completed = run.fail(ExecuteError, after)
    ahead = len(run.sides.step.schedule.deferred)  # updates of the step before
    assert is_completed == (after > ahead)
    run.take(2)
    run.sides.assert_same()


def test_an_error_once_in_the_first_updates_of_a_spread_steps_own_gradients() -> None:
    """Before the first of them all is as before the step; the step's other gradients must not update anything."""
    for more in (0, 1):
        run = Run("spread")
        run.take(2)
        TRAP.arm("update", failing, after=len(run.sides.step.schedule.deferred) + more)
        assert run.fail(ExecuteError, more) == (more > 0)
        run.take(2)
        run.sides.assert_same()


@pytest.mark.parametrize("mode", ["overlap", "serial", "serial_clipped"])
def test_an_error_always_in_the_optimizers_first_update_leaves_no_trace(mode: str) -> None:
    run = Run(mode)
    run.take(2)
    for _ in range(2):
        TRAP.arm("update", failing, always=True)
        assert not run.fail(ExecuteError, mode)
    run.take(2)
    run.sides.assert_same()


@pytest.mark.parametrize(
    ("mode", "heals_by"), checkered(["overlap", "serial", "deferred", "spread"], ["flush", "step"])
)
def test_an_error_always_in_a_later_update_leaves_the_rest_due(mode: str, heals_by: str) -> None:
    """Nothing can be said of the step until the rest is taken; once it can be, all goes on."""
    run = Run(mode)
    run.take(2)
    TRAP.arm("update", failing, after=1, always=True)
    torch.manual_seed(run.number)
    with pytest.raises(ExecuteError, match="U") as caught:
        run.sides.step(batches(run.number))
    assert any("are still due" in note for note in caught.value.__notes__)
    with pytest.raises(OwnError):
        run.sides.step.flush()
    TRAP.clear()
    if mode not in (
        "deferred",
        "spread",
    ):  # there it is the step before that isn't complete, and this one left no trace
        torch.manual_seed(run.number)
        run.sides.expect(batches(run.number))
        run.number += 1
    if heals_by == "flush":
        run.sides.assert_same()
    run.take(2)
    run.sides.assert_same()


@pytest.mark.parametrize(("mode", "heals_by"), checkered(["overlap", "serial"], ["flush", "step"]))
def test_the_gradient_of_a_losses_own_parameter_waits_with_the_rest(mode: str, heals_by: str) -> None:
    found: list[Any] = []
    for is_streamed in (False, True):
        sides = SideBySide.of("hazardous", watched, **MODES[mode])
        model, optimizer = (sides.streamed, sides.optimizer) if is_streamed else (sides.eager, sides.eager_optimizer)
        scale = nn.Parameter(torch.tensor(1.5))
        optimizer.add_param_group({"params": [scale]})

        def loss(result: torch.Tensor, batch: Any, scale: torch.Tensor = scale) -> torch.Tensor:
            return (result * scale).square().mean()

        step = megatrain.TrainStep(sides.compiled, optimizer, loss=loss, **MODES[mode]) if is_streamed else None
        for number in range(4):
            given = batches(number)
            torch.manual_seed(number)
            if step is None:
                loop_step(model, optimizer, given, loss=loss)
            elif number != 2:
                step(given)
            else:
                TRAP.arm("update", failing, after=1, always=True)
                with pytest.raises(ExecuteError):
                    step(given)
                with pytest.raises(OwnError):
                    step.flush()
                TRAP.clear()
                step.flush() if heals_by == "flush" else None
        if step is not None:
            step.flush()
        found.append((scale, snapshot(model, optimizer)))
    assert_same(found[0], found[1])


def test_an_error_in_a_flush_leaves_the_rest_due() -> None:
    for after in (0, 1):
        run = Run("deferred")
        run.take(2)
        TRAP.arm("update", failing, after=after)
        with pytest.raises(OwnError):
            run.sides.step.flush()
        run.sides.assert_same() if after else run.take(2)
        run.sides.assert_same()


@pytest.mark.parametrize(
    ("hook", "max_grad_norm"), checkered(["register_step_pre_hook", "register_step_post_hook"], [None, 0.5])
)
def test_an_error_once_in_a_hook_of_the_step(hook: str, max_grad_norm: float | None) -> None:
    run = Run("overlap" if max_grad_norm is None else "deferred")
    run.take(1)
    getattr(run.sides.optimizer, hook)(lambda *_: TRAP.at("hook"))
    run.take(1)
    TRAP.arm("hook", failing)
    run.fail((OwnError, ExecuteError), hook)
    run.take(2)
    run.sides.assert_same()


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
HOOKED = ("layers.0.fc.weight", "layers.1.norm.weight", "head.weight")


@pytest.mark.parametrize(("hook", "mode"), diagonal(itertools.product(HOOKED, HOOKS), FAILING_MODES))
def test_an_error_once_in_a_parameters_hook(hook: tuple[str, str], mode: str) -> None:
    """It leaves no trace: where there is such a hook, no update comes before the last gradient."""
    name, kind = hook
    run = Run(mode)
    handle = getattr(run.sides.streamed.get_parameter(name), kind)(lambda _: TRAP.at("parameter"))
    try:
        run.take(2)
        TRAP.arm("parameter", failing)
        assert not run.fail(ExecuteError, (kind, name))
        run.take(2)
        run.sides.assert_same()
    finally:
        handle.remove()


# -- Ctrl-C --------------------------------------------------------------------------------------------------


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


PLACES = ("loss", ("forward", 0), ("forward", 2), ("backward", 2), ("backward", 0), "update", "parameter")


@pytest.mark.parametrize(("place", "mode"), diagonal(PLACES, ["spread", "serial_clipped", "deferred", "overlap"]))
def test_an_interrupt_ends_the_step_at_a_boundary(place: object, mode: str) -> None:
    run = Run(mode)
    bias = run.sides.streamed.layers[0].fc.bias
    # Only where it is the place: updates don't overlap where there is one.
    handle = bias.register_hook(lambda _: TRAP.at("parameter")) if place == "parameter" else None
    try:
        run.take(2)
        for after in (0, 1):
            TRAP.arm(place, interrupt, after=0 if place == "parameter" else after)
            is_completed = run.fail(KeyboardInterrupt, (mode, place, after))
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if mode == "serial_clipped" and place == "update":
                assert is_completed
            run.take(2)
        run.sides.assert_same()
    finally:
        if handle is not None:
            handle.remove()


def test_an_interrupt_of_a_flush_comes_when_it_is_over() -> None:
    for after in range(3):
        run = Run("deferred")
        run.take(2)
        TRAP.arm("update", interrupt, after=after)
        with pytest.raises(KeyboardInterrupt):
            run.sides.step.flush()
        assert_same(run.expected(), snapshot(run.sides.streamed, run.sides.optimizer))
        run.take(2)
        run.sides.assert_same()


def test_a_handler_that_raises_nothing_lets_the_step_go_on() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        run = Run("overlap")
        run.take(2)
        TRAP.arm(("backward", 2), interrupt, after=1)
        run.take(1)
        assert seen == [signal.SIGINT]
        run.sides.assert_same()
    finally:
        signal.signal(signal.SIGINT, before)
