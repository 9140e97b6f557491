"""A step that fails in its middle ends where it began or, if the error says so, at its own end; then all goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.training.trainer import Running
from tests.comparing import assert_same, snapshot
from tests.training.hazards import TRAP, WIDTH, watched
from tests.training.parity import MODES, SideBySide, generator_of

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

    def __init__(self, mode: str, name: str = "hazardous", optimizer: Any = watched):
        options = {"activations": "offload"}
        self.sides = SideBySide.of(name, optimizer, compile_options=options, **MODES[mode])
        self.number = 0
        self.take(2)

    def take(self, count: int = 1) -> None:
        for _ in range(count):
            self.sides.take(batches(self.number), seed=self.number)
            self.number += 1

    def expected(self) -> dict[str, Any]:
        """What both sides should be now; reading it completes no update."""
        return snapshot(self.sides.eager, *self.sides.eager_optimizers)

    def found(self) -> dict[str, Any]:
        self.sides.step.flush()
        return snapshot(self.sides.streamed, *self.sides.optimizers)

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

    def go_on(self) -> None:
        self.take(2)
        self.sides.assert_same()


def tokens(schedule: megatrain.Schedule) -> list[str]:
    """Every operation as `stream:token`, each once."""
    return list(dict.fromkeys(f"{position.stream}:{op}" for position, op in schedule.positions()))


@pytest.mark.parametrize(("mode", "first"), [("overlap", 0), ("spread", 1), ("deferred", 2)])
def test_a_failure_of_any_operation_ends_the_step_at_a_boundary(mode: str, first: int) -> None:
    """Of every fourth operation."""
    run = Run(mode)
    chosen = tokens(run.sides.step.schedule)
    assert {token.split(":")[1][0] for token in chosen} == set("WFBAGU" if mode in UNCLIPPED else "WFBAGUSN")
    assert any(token.startswith("h2d:A") for token in chosen)
    engine, completed = run.sides.compiled.megatrain.engine, []
    for token in chosen[first::4]:
        run.take()  # so that a deferred step has updates to take
        assert token in tokens(run.sides.step.schedule) or mode == "deferred"
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        if run.fail((ExecuteError, RuntimeError), token, heal=lambda: engine.set_chaos(None)):
            completed.append(token)
    run.go_on()
    if mode == "deferred":
        assert not completed
    else:
        assert completed  # at least what comes after the first update
        assert {token.split(":")[1][0] for token in completed} <= set("WBAGU")


# -- errors of the user's own code ---------------------------------------------------------------------------


def failing() -> None:
    raise OwnError("my own error")


@contextmanager
def first_update() -> Generator[Callable[[], None]]:
    """Gives a function that waits until a block of this step is updated, so that no test depends on timing."""
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


@pytest.mark.parametrize(
    ("mode", "place", "micro_batch"),
    [
        ("deferred", "loss", 1),
        ("spread", "loss", 0),
        ("overlap", ("forward", 2), 0),
        ("serial_clipped", ("forward", 0), 1),
    ],
)
def test_an_error_once_in_the_users_code_leaves_no_trace(mode: str, place: object, micro_batch: int) -> None:
    run = Run(mode)
    TRAP.arm(place, failing, after=micro_batch)
    assert not run.fail(OwnError, place)
    run.go_on()


def test_an_error_always_after_an_update_is_the_end() -> None:
    run = Run("overlap")
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


# -- errors of the optimizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "more"), [("overlap", 0), ("serial", 1), ("spread", 0), ("spread", 1), ("deferred", -1)]
)
def test_an_error_once_in_the_optimizer(mode: str, more: int) -> None:
    """It comes when the parameters of a block and their state are written, `more` after those of the step before."""
    run = Run(mode)
    TRAP.arm("update", failing, after=len(run.sides.step.schedule.deferred) + more)
    assert run.fail(ExecuteError, more) == (more > 0)
    run.go_on()


@pytest.mark.parametrize(("mode", "heals_by"), [("overlap", "flush"), ("spread", "flush"), ("deferred", "step")])
def test_an_error_always_in_a_later_update_leaves_the_rest_due(mode: str, heals_by: str) -> None:
    """Nothing can be said of the step until the rest is taken; once it can be, all goes on."""
    run = Run(mode)
    TRAP.arm("update", failing, after=1, always=True)
    torch.manual_seed(run.number)
    with pytest.raises(ExecuteError, match="U") as caught:
        run.sides.step(batches(run.number))
    assert any("are still due" in note for note in caught.value.__notes__)
    with pytest.raises(OwnError):
        run.sides.step.flush()
    TRAP.clear()
    if mode == "overlap":  # in others it is the step before that isn't complete, and this one left no trace
        torch.manual_seed(run.number)
        run.sides.expect(batches(run.number))
        run.number += 1
    if heals_by == "flush":
        run.sides.assert_same()
    run.go_on()


@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_an_update_of_a_fused_optimizer_that_fails_in_its_middle_is_undone(mode: str) -> None:
    run = Run(mode, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    sides = run.sides
    state = vars(sides.optimizer)["state"][sides.streamed.layers[0].norm.bias]
    kept = state.pop("exp_avg_sq")

    def plain() -> list[torch.Tensor]:
        """The first block's parameters as they are in memory, without taking what is due."""
        with torch._C.DisableTorchFunctionSubclass():
            return [p.detach().clone() for p in sides.streamed.layers[0].parameters()]

    before = plain()
    torch.manual_seed(2)
    with pytest.raises(Exception, match="exp_avg_sq"):
        sides.step.flush() if mode == "deferred" else sides.step(batches(2))
    assert_same(before, plain(), "a block of which one update can't be taken")
    state["exp_avg_sq"] = kept
    if mode == "serial":  # other blocks were updated before it, so the step is completed
        assert sides.step.progress.count == 3
        torch.manual_seed(2)
        sides.expect(batches(2))
        run.number = 3
    run.go_on()


# -- hooks ---------------------------------------------------------------------------------------------------


def resize(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data[:1]


AFTER = "register_post_accumulate_grad_hook"
HOOKS: list[tuple[str, str, Callable[[torch.Tensor], Any], str, str]] = [
    ("overlap", "register_hook", lambda _: TRAP.at("parameter"), "layers.0.fc.weight", "my own error"),
    ("deferred", AFTER, lambda _: TRAP.at("parameter"), "head.weight", "my own error"),
    ("overlap", "register_hook", lambda g: g.reshape(-1), "layers.1.fc.weight", "a hook on a gradient made "),
    ("deferred", "register_hook", lambda g: g.double(), "layers.1.fc.weight", "a hook on a gradient made "),
    ("overlap", "register_hook", lambda g: g.to_sparse(), "head.weight", "a hook on a gradient made "),
    ("deferred", "register_hook", lambda g: 3.0, "head.weight", "a hook on a gradient made "),
    ("spread", AFTER, resize, "head.weight", "a hook on a gradient made "),
]


@pytest.mark.parametrize(("mode", "kind", "hook", "name", "text"), HOOKS, ids=range(len(HOOKS)))
def test_a_parameters_hook_that_fails_or_gives_a_wrong_gradient(
    mode: str, kind: str, hook: Callable[[Any], Any], name: str, text: str
) -> None:
    """It leaves no trace: where there is such a hook, no update comes before the last gradient."""
    run = Run(mode)
    handle = getattr(run.sides.streamed.get_parameter(name), kind)(hook)
    try:
        TRAP.arm("parameter", failing)
        assert not run.fail(ExecuteError, name)
        TRAP.arm("parameter", failing)
        with pytest.raises(ExecuteError, match=rf"^d2h:G\d failed: \w+: .?{text}"):
            run.sides.step(batches(run.number))
    finally:
        handle.remove()
    run.go_on()


def test_updates_wait_for_the_last_gradient_where_a_hook_may_end_the_backward() -> None:
    """Without the hook they go beside the backward. What a hook makes of a gradient counts, in any layout."""
    run = Run("overlap")
    assert run.sides.step.schedule.kind.updates == "overlap"
    handles = [
        m.get_parameter("layers.0.fc.weight").register_hook(lambda g: g.t().contiguous().t() * 2)
        for m in (run.sides.eager, run.sides.streamed)
    ]
    given = batches(run.number)[:1]  # a hook runs once a step here, and once for each micro-batch there
    run.sides.take(given, seed=run.number)
    assert run.sides.step.schedule.kind.updates == "serial"
    for handle in handles:
        handle.remove()
    run.go_on()
    assert run.sides.step.schedule.kind.updates == "overlap"


# -- Ctrl-C --------------------------------------------------------------------------------------------------


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("place", "mode", "after"),
    [
        ("loss", "spread", 1),
        (("backward", 2), "deferred", 0),
        (("backward", 0), "overlap", 1),
        ("update", "serial_clipped", 0),
    ],
)
def test_an_interrupt_ends_the_step_at_a_boundary(place: object, mode: str, after: int) -> None:
    run = Run(mode)
    TRAP.arm(place, interrupt, after=after)
    is_completed = run.fail(KeyboardInterrupt, (mode, place, after))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if place == "update":
        assert is_completed
    run.go_on()


def test_an_interrupt_of_a_flush_comes_when_it_is_over() -> None:
    run = Run("deferred")
    TRAP.arm("update", interrupt, after=1)
    with pytest.raises(KeyboardInterrupt):
        run.sides.step.flush()
    assert_same(run.expected(), snapshot(run.sides.streamed, run.sides.optimizer))
    run.go_on()
