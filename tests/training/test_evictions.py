"""Activations in a file within a step: the bits of activations in memory, and whatever fails."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError, OptionError
from megatrain.files import scratch_file
from megatrain.files.scratch_file import PAGE
from megatrain.runtime.operations import Operations
from megatrain.runtime.streams.stream_set import Chaos
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.table import Position
from tests.comparing import assert_same, snapshot
from tests.training.parity import MODES, SideBySide, generator_of
from tests.training.test_failures import tokens
from tests.training.test_offload import FOLDER, fused, killed, loss_of

WIDTH, DEPTH, ROWS = 16, 7, 64


def net() -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.2)) for _ in range(DEPTH)
    ]
    return torch.nn.Sequential(*layers)


def batches(number: int, count: int = 2, rows: int = ROWS) -> list[torch.Tensor]:
    """Micro-batches of more and fewer rows; the inputs of a block take a page."""
    sizes = (rows, rows - 9, rows)[:count]
    return [torch.randn(n, WIDTH, generator=generator_of(3 * number + i)) for i, n in enumerate(sizes)]


def training(mode: str, *, evicts: bool = True, **compiling: Any) -> SideBySide:
    """A model trained eagerly, and streamed with activations in a file, as many as can be; or in memory."""
    options: dict[str, Any] = {"device": "cpu", "transfer": "copy", "activations": "offload", **compiling}
    eager, compiled = net(), megatrain.compile(net(), **options)
    streamed = compiled.megatrain.model
    own, others = fused(streamed), [fused(eager)]
    step = megatrain.TrainStep(compiled, own, loss=loss_of, offload=FOLDER, **MODES[mode])
    if evicts:
        evict(step)
    clip = MODES[mode].get("max_grad_norm")
    return SideBySide(eager, streamed, compiled, others, [own], step, loss_of, clip)


def evict(step: Any) -> Any:
    """Has a step move on to its file as much as can be of what it parks."""
    tables = step._setup.tables
    tables._limits = replace(tables._limits, most_park_bytes=0)
    return step


def moved(step: Any) -> list[str]:
    return [str(op) for op in step.schedule.ops if op.what in ("E", "L")]


@pytest.mark.parametrize(("mode", "count"), [("overlap", 1), ("spread", 2), ("deferred", 3), ("serial_clipped", 2)])
def test_steps_with_activations_in_a_file_have_eagers_bits(mode: str, count: int) -> None:
    sides = training(mode)
    for number in range(3):
        sides.take(batches(number, count), seed=number)
    sides.assert_same(mode)
    table, file = sides.step.schedule, sides.step._setup.activations
    assert len(moved(sides.step)) == 2 * count * len(table.evicted) > 0
    assert file.nbytes == table.evicted_bytes
    assert sides.step.host_plan.bytes_of("parks") == table.park_bytes == 2 * PAGE
    pool = sides.compiled.megatrain.engine.offload
    pool._collect()
    assert [arena.nbytes for arena in pool._idle] == [table.park_bytes], "what it takes is what is planned"
    assert list(FOLDER.glob("megatrain-*")) == []


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_in_bf16_the_bits_are_those_of_activations_in_memory(mode: str) -> None:
    found = []
    for evicts in (False, True):
        sides = training(mode, evicts=evicts, precision="bf16", memory="88KiB")
        losses = [(torch.manual_seed(n), sides.step(batches(n, 3, 2 * ROWS)))[1] for n in range(4)]
        sides.step.flush()
        found.append((losses, snapshot(sides.streamed, *sides.optimizers)))
        assert bool(moved(sides.step)) == evicts
    assert_same(*found)


def test_a_file_has_activations_only_where_the_host_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = training("overlap", evicts=False)
    sides.step.prepare(batches(0, 3))
    assert moved(sides.step) == []
    whole = sides.step.host_plan
    available = whole.total_bytes - whole.held_bytes - 3 * PAGE
    monkeypatch.setattr("megatrain.planning.host_plan.available_now", lambda: available)
    sides.take(batches(0, 3), seed=0)
    assert moved(sides.step)
    assert 3 * PAGE <= whole.total_bytes - sides.step.host_plan.total_bytes < 5 * PAGE, "no more than need be"
    sides.take(batches(1, 1), seed=1)
    assert moved(sides.step) == [], "a smaller step has room"
    sides.take(batches(2, 3), seed=2)
    sides.assert_same()


WAITS = [("d2h:A", "E", "disk"), ("disk:E", "A", "d2h"), ("disk:L", "A", "h2d"), ("h2d:A", "L", "disk")]


@pytest.mark.parametrize(("waiting", "waited", "slow"), WAITS)
def test_a_slow_stream_changes_no_bit_but_a_dropped_wait_does(waiting: str, waited: str, slow: str) -> None:
    original = Operations.waits

    def fewer(operations: Operations, instruction: Instruction) -> Sequence[Position]:
        found = original(operations, instruction)
        if f"{instruction.op.stream}:{instruction.op.what}" != waiting:
            return found
        return [wait for wait in found if operations.schedule.ticks[wait.tick][wait.stream].what != waited]

    def take() -> None:
        sides = training("overlap")
        sides.compiled.megatrain.engine.set_chaos(Chaos(slow=slow, max_delay_s=0.004))
        for number in range(2):
            sides.take(batches(number), seed=number)
        sides.assert_same()

    take()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operations, "waits", fewer)
        with pytest.raises(AssertionError):
            take()


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overlap", pytest.param("deferred", marks=pytest.mark.nightly)])
def test_a_failure_of_an_operation_loses_nothing(mode: str) -> None:
    """Of each of the disk, and of copies of what it moves."""
    sides, number = training(mode), 0
    engine = sides.compiled.megatrain.engine
    sides.take(batches(0), seed=0)
    chosen = [
        token for token in tokens(sides.step.schedule) if "disk:E" in token or "disk:L" in token or ":A2" in token
    ]
    assert len(chosen) > 10
    for token in chosen:
        number += 1
        count = sides.step.progress.count
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        torch.manual_seed(number)
        with pytest.raises(ExecuteError):
            sides.step(batches(number))
        engine.set_chaos(None)
        torch.manual_seed(number)
        if sides.step.progress.count > count:
            sides.expect(batches(number))
        else:
            sides.take(batches(number), seed=number)
        sides.assert_same(token)
        sides.take(batches(100 + number), seed=number)


@contextmanager
def failing_file(file: Any, name: str, *, after: int, times: int) -> Generator[None]:
    """Reads or writes of one file fail, so many of them after some."""
    original, calls = getattr(os, name), iter(range(1 << 60))

    def move(descriptor: int, *given: Any) -> int:
        if descriptor in file._files and after <= next(calls) < after + times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, move)
        yield


@pytest.mark.parametrize(
    ("name", "mode", "times"),
    [("pwritev", "overlap", 1 << 60), ("preadv", "overlap", 1), ("preadv", "deferred", 1 << 60)],
)
def test_a_disk_that_fails_is_named_and_the_step_ends_at_a_boundary(name: str, mode: str, times: int) -> None:
    """One that goes on failing leaves no trace of a step that has updated nothing."""
    sides = training(mode)
    for number in range(2):
        sides.take(batches(number), seed=number)
    fails, what = "write" if name == "pwritev" else "read", "Activations are there in the middle of a step"
    torch.manual_seed(2)
    with (
        failing_file(sides.step._setup.activations, name, after=3, times=times),
        pytest.raises(
            ExecuteError, match=rf"the disk of `.*` fails to {fails} 4.00 KiB: Input/output error.\n  {what}"
        ),
    ):
        sides.step(batches(2))
    torch.manual_seed(2)
    if sides.step.progress.count == 3:
        sides.expect(batches(2))
    else:
        sides.take(batches(2), seed=2)
    sides.assert_same()
    sides.take(batches(3), seed=3)
    sides.assert_same()


def test_a_disk_without_room_is_refused_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sides, reserve = training("overlap"), scratch_file._reserve
    room = 40 << 10

    def reserving(file: int, nbytes: int) -> None:
        if nbytes > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, nbytes)

    monkeypatch.setattr(scratch_file, "_reserve", reserving)
    says = r"no room for it: {} are needed, .*\n  Activations are in a file there in the middle of a step"
    sides.take(batches(0), seed=0)
    with pytest.raises(OptionError, match=says.format("60.00 KiB")):
        sides.step(batches(1, 3))
    sides.take(batches(1), seed=1)
    with pytest.raises(OptionError, match=says.format("60.00 KiB")):
        sides.step(batches(2, 3))
    room = 0
    with pytest.raises(OptionError, match=says.format("40.00 KiB")):
        sides.step(batches(2))
    room = 1 << 40
    sides.take(batches(2, 3), seed=2)
    sides.assert_same()


KILLED = """
import os, signal, sys, torch
from tests.training.test_evictions import batches, training

sides = training("deferred")
torch.manual_seed(0)
step, write = sides.step, os.pwritev
def pwritev(descriptor, *given):
    if step.progress.count == 3 and descriptor in step._setup.activations._files:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, *given)
os.pwritev = pwritev
for number in range(5):
    step(batches(number))
    if number == 1:
        step.save(sys.argv[1])
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_run_that_is_killed_in_an_eviction_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    killed(KILLED, tmp_path / "run")
    whole, resumed, results = training("deferred"), training("deferred"), []
    options: Any = {"loss": loss_of, "offload": FOLDER, **MODES["deferred"]}
    step = megatrain.TrainStep.load(tmp_path / "run", resumed.compiled, resumed.optimizers[0], **options)
    for sides, one in ((whole, whole.step), (resumed, evict(step))):
        torch.manual_seed(0)
        for number in range(5):
            if number == 2:
                torch.manual_seed(1)
            if number >= one.progress.count:
                one(batches(number))
        assert moved(one)
        one.flush()
        results.append(snapshot(sides.streamed, *sides.optimizers))
    assert_same(*results)
