"""Activations in a file within a step: the bits of activations in memory, and whatever fails."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ExecuteError, OptionError
from megatrain.files.scratch_file import PAGE
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.training.parity import MODES, SideBySide, generator_of
from tests.training.test_failures import tokens
from tests.training.test_offload import FOLDER, ROOT, failing_disk, fused, loss_of

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
    optimizers = [[fused(model)] for model in (eager, streamed)]
    step = megatrain.TrainStep(compiled, optimizers[1], loss=loss_of, offload=FOLDER, **MODES[mode])
    if evicts:
        tables = step._setup.tables
        tables._limits = replace(tables._limits, most_park_bytes=0)
    clip = MODES[mode].get("max_grad_norm")
    return SideBySide(eager, streamed, compiled, *optimizers, step, loss_of, clip)


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
    sides.take(batches(0, 3), seed=0)
    assert moved(sides.step) == []
    host = sides.step.host_plan
    available = host.total_bytes - host.held_bytes - 3 * PAGE
    monkeypatch.setattr("megatrain.planning.host_plan.available_now", lambda: available)
    other = training("overlap", evicts=False)
    other.take(batches(0, 3), seed=0)
    assert moved(other.step)
    host = other.step.host_plan
    assert 0 <= available + host.held_bytes - host.total_bytes < 2 * PAGE, "no more than need be"
    other.take(batches(1, 1), seed=1)
    assert moved(other.step) == [], "a smaller step has room"
    other.take(batches(2, 3), seed=2)
    other.assert_same()


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overlap", "deferred"])
def test_a_failure_of_an_operation_loses_nothing(mode: str) -> None:
    """Of each of the disk, and of copies of what it moves."""
    sides, number = training(mode), 0
    engine = sides.compiled.megatrain.engine
    sides.take(batches(0), seed=0)
    chosen = [token for token in tokens(sides.step.schedule) if "disk:E" in token or "disk:L" in token or ":A2" in token]
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
