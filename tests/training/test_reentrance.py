"""What a run calls (a hook on a gradient, the loss) and would wait for the end of that run is refused."""

from __future__ import annotations

import _thread
import re
import signal
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.events import Turn
from tests.comparing import assert_same, snapshot
from tests.interrupting import Lines
from tests.training.hazards import TRAP
from tests.training.parity import SideBySide, sgd

UNTIL = 20.0


@pytest.fixture(autouse=True)
def _clear_trap() -> Generator[None]:
    TRAP.clear()
    yield
    TRAP.clear()


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


USES: dict[str, Callable[[SideBySide, Path], object]] = {
    "save": lambda sides, folder: sides.step.save(folder / "run"),
    "step": lambda sides, folder: sides.step(batch(5)),
    "measure": lambda sides, folder: sides.step.measure(batch(5)),
    "prepare": lambda sides, folder: sides.step.prepare(torch.randn(7, 4)),
    "flush": lambda sides, folder: sides.step.flush(),
    "load": lambda sides, folder: megatrain.TrainStep.load(folder / "before", sides.compiled, sides.optimizer),
    "call": lambda sides, folder: sides.compiled(batch(5)),
    "compiled.prepare": lambda sides, folder: sides.compiled.prepare(torch.randn(6, 4)),
    "optimizer's state": lambda sides, folder: sides.optimizer.state_dict(),
    "model's state": lambda sides, folder: sides.compiled.state_dict(),
    "load_state_dict": lambda sides, folder: sides.compiled.load_state_dict(sides.streamed.state_dict()),
}


def within(what: Callable[[], Any]) -> Any:
    """Runs something on a thread of its own, so that a test fails where it would hang."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(what())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(UNTIL)
    assert not thread.is_alive(), "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@pytest.mark.parametrize("site", ["hook", "loss"])
def test_what_would_wait_for_its_own_step_is_refused(site: str, tmp_path: Path) -> None:
    """From a hook on a gradient, and from the loss."""
    sides = SideBySide.of("hazardous", sgd, max_grad_norm=0.5)
    sides.take(batch(0), seed=0)
    sides.step.save(tmp_path / "before")
    weight = sides.streamed.layers[1].fc.weight
    handle = weight.register_post_accumulate_grad_hook(lambda _: TRAP.at("hook"))
    sides.take(batch(1), seed=1)
    torch.manual_seed(2)
    before = snapshot(sides.eager, sides.eager_optimizer)
    for name, use in USES.items():
        if site == "loss" and "state" in name:
            continue
        TRAP.arm(site, lambda use=use: use(sides, tmp_path))
        torch.manual_seed(2)
        with pytest.raises(ExecuteError) as caught:
            within(lambda: sides.step(batch(2)))
        said = str(caught.value.__cause__ if site == "hook" else caught.value)
        assert re.match("(.* was called while (it|the model) runs|a hook .* looks at)", said), name
        assert (site == "loss") or re.match(r"d2h:G. failed: ExecuteError: ", str(caught.value))
        TRAP.clear()
        sides.step.flush()
        torch.manual_seed(2)
        assert_same(before, snapshot(sides.streamed, sides.optimizer), f"after the refusal of {name}")
    handle.remove()
    assert not (tmp_path / "run").exists()
    for number in (2, 3):
        sides.take(batch(number), seed=number)
    sides.assert_same()


def test_ctrl_c_at_any_line_of_taking_and_giving_back_a_turn_leaves_it_free() -> None:
    def use(turn: Turn) -> None:
        with turn.hold("save()"), turn.run():
            pass

    turn, counted = Turn(), Lines("runtime/streams/events.py")
    with counted.watched():
        use(turn)
    assert counted.count > 10
    for at in range(1, counted.count + 1):
        turn, lines = Turn(), Lines("runtime/streams/events.py", at=at, act=lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), lines.watched():
            use(turn)
        within(lambda turn=turn: use(turn))


def test_a_thread_of_autograds_engine_does_not_wait_for_a_run_that_waits_for_it() -> None:
    """Such a thread, of an accelerator, was not started by Python; and it is in the middle of a backward."""
    turn, found, is_over = Turn(), [], threading.Event()

    def hook(_: torch.Tensor) -> None:
        try:
            with turn.hold("save()"):
                found.append("held")
        except ExecuteError as error:
            found.append(str(error))

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(hook)
        x.sum().backward()
        is_over.set()

    with turn.run(differentiates=True):
        _thread.start_new_thread(backward, ())
        assert is_over.wait(UNTIL)
    assert found[0].startswith("save() was called while the model runs.")
    is_over.clear()
    _thread.start_new_thread(backward, ())
    assert is_over.wait(UNTIL)
    assert found[1:] == ["held"]
