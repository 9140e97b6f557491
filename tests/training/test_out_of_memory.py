"""A device that runs out of memory in mid-step: the step is repeated or completed; if it can't be, the error says why.

Each op of a step fails once, and then always, in each of the ways in which updates run, and so do calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from megatrain.base.sizes import format_bytes
from megatrain.device import Cuda
from megatrain.device.device_budget import DeviceMemoryError, ran_out
from megatrain.errors import DeviceMemoryWarning, ExecuteError
from megatrain.runtime import accumulation as sums
from megatrain.runtime import operations
from megatrain.runtime.operations import HANDLERS
from tests.training.hazards import TRAP
from tests.training.test_failures import OwnError, Run, batches, first_update, tokens

NO_MEMORY = "the card has no 64 B left"


@pytest.fixture(autouse=True)
def _clear_trap() -> Generator[None]:
    TRAP.clear()
    yield
    TRAP.clear()


def lacks() -> None:
    raise torch.OutOfMemoryError(NO_MEMORY)


def behind(wait: Callable[[], None]) -> Callable[[], None]:
    """Fails once a block of the step is updated."""

    def fail() -> None:
        with contextlib.suppress(OwnError):
            wait()
        lacks()

    return fail


def repeated(run: Run, what: str = "the step") -> None:
    """Takes a step on both sides, of which something runs twice on one."""
    torch.manual_seed(run.number)
    with pytest.warns(DeviceMemoryWarning, match=f"{what} was repeated"):
        run.sides.step(batches(run.number))
    TRAP.clear()
    torch.manual_seed(run.number)
    run.sides.expect(batches(run.number))
    run.number += 1


class Lacking:
    """Raises where an op would work, as often as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.token, self.times, self.made = "", 0, list[weakref.ref[torch.Tensor]]()
        for key, handler in list(HANDLERS.items()):
            monkeypatch.setitem(HANDLERS, key, self._failing(handler))

    def arm(self, token: str, *, times: int = 1) -> None:
        self.token, self.times = token, times

    def _failing(self, handler: Any) -> Any:
        def run(operations: Any, taken: Any, instruction: Any) -> None:
            if f"{instruction.op.stream}:{instruction.op}" == self.token and self.times:
                self.times -= 1
                workspace = torch.empty(64)
                self.made.append(weakref.ref(workspace))
                raise torch.OutOfMemoryError(NO_MEMORY)
            handler(operations, taken, instruction)

        return run


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Lacking:
    return Lacking(monkeypatch)


@pytest.mark.parametrize(("mode", "first"), [("overlap", 0), ("deferred", 2), ("serial_clipped", 4)])
def test_memory_that_lacks_once_changes_no_bit(mode: str, first: int, lacking: Lacking):
    """In every sixth operation."""
    run = Run(mode)
    for token in tokens(run.sides.step.schedule)[first::6]:
        run.take()
        lacking.arm(token)
        with pytest.warns(DeviceMemoryWarning, match=r"cpu ran out of memory; (the rest of )?the step was repeated"):
            run.take()
        assert lacking.times == 0, token
        run.sides.assert_same(token)
    run.go_on()


def test_memory_that_always_lacks_ends_the_step_before_it_began(lacking: Lacking):
    """In `overlap`, too, as long as no parameter was updated."""
    run = Run("overlap")
    last = len(run.sides.compiled.program.blocks) - 1
    for token in ("h2d:W1@1", "compute:F1.0", f"compute:B{last}.0", f"d2h:G{last}"):
        run.take()
        if token in tokens(run.sides.step.schedule):
            lacking.arm(token, times=100)
            assert not run.fail(DeviceMemoryError, token, heal=lambda: lacking.arm(""))
    run.go_on()


def test_the_error_has_the_figures_and_the_way_out(lacking: Lacking):
    run = Run("deferred")
    lacking.arm("compute:B1.0", times=100)
    with pytest.raises(DeviceMemoryError) as caught:
        run.sides.step(batches(2))
    text = str(caught.value)
    assert text.startswith("cpu ran out of memory. It did again when the step was repeated with an empty cache: ")
    assert NO_MEMORY in text
    schedule, meter = run.sides.step.schedule, run.sides.compiled.megatrain.engine.meter
    assert f"of which the schedule counts {format_bytes(schedule.device_bytes)}." in text
    assert f"took {format_bytes(meter.peak)} at most" in text
    assert f"There is a budget of {format_bytes(run.sides.compiled.megatrain.budget.nbytes)}" in text
    assert "Give a smaller budget (memory=, or --memory" in text
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value, ExecuteError)
    assert " out of memory." in caught.value.args[0], "what accelerate's find_executable_batch_size looks for"
    assert len(caught.value.args) == 1


def test_memory_that_lacks_once_behind_an_update_completes_the_step():
    run = Run("overlap")
    with first_update() as fail:
        TRAP.arm(("backward", 0), behind(fail))
        repeated(run, "the rest of the step")
    run.go_on()


@pytest.mark.parametrize("back", [1, 3])  # of the first block, of the next
def test_memory_that_lacks_between_two_sums_of_gradients_adds_none_twice(back: int, monkeypatch: pytest.MonkeyPatch):
    """A sum takes memory where others hold the memory of the one before: here every second."""
    added, is_armed = sums._sum, False
    count = last = 0

    def failing(before: Any, now: Any) -> Any:
        nonlocal count, is_armed
        count += 1
        if is_armed and count == last - back:
            is_armed = False
            behind(fail)()
        return added(before, now)

    def marked(found: Any, meter: Any) -> Any:
        return [(g, n % 2 == 1) for n, g in enumerate(found)], meter.storages_of([g for g in found if g is not None])

    monkeypatch.setattr(operations, "marked", marked)
    monkeypatch.setattr(sums, "_sum", failing)
    run = Run("overlap", name="bridged")
    count = 0
    run.take()
    count, last, is_armed = 0, count, True
    with first_update() as fail:
        repeated(run, "the rest of the step")
    assert not is_armed
    run.go_on()


# -- the parts -----------------------------------------------------------------------------------------------


def test_what_counts_as_too_little_memory():
    device = Cuda(0)
    assert ran_out(torch.OutOfMemoryError("x"), device)
    assert ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), device)
    assert not ran_out(RuntimeError("CUDA error: an illegal memory access was encountered"), device)
    wrapped = ExecuteError("h2d:A3 failed")
    wrapped.__cause__ = torch.OutOfMemoryError("x")
    assert ran_out(wrapped, device)
