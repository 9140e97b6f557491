"""A kind of op of a user's own, on a stream of its own: blocks' weights are read from files ahead of their prefetch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.extending import (  # fmt: skip
    Case,
    Effect,
    Effects,
    Instruction,
    Item,
    Op,
    Operations,
    OpKind,
    Run,
    Stream,
    Tick,
    register_op,
    unregister_op,
)
from tests.comparing import assert_same_state

DISK = Stream("file")


class FromFiles:
    """Reads blocks' weights from files into host memory, each just ahead of its prefetch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kind = OpKind(DISK, "R", self.effect)
        self.num_read = 0

    def write(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            torch.save(parameter.detach(), self.folder / name)

    @staticmethod
    def effect(effects: Effects, block: int, micro_batch: int) -> Effect:
        return Effect(makes=(Item("state", block),), moves=effects.workload.blocks[block].state_bytes)

    def read(self, operations: Operations, run: Run, instruction: Instruction) -> None:
        for name in run.calls[0].loaded.program.blocks[instruction.op.block].binding:
            # A new version of a parameter's values is the file's, not the user's: `.data` counts no write.
            operations.engine.tensors[name].data.copy_(torch.load(self.folder / name))
            self.num_read += 1

    @staticmethod
    def check(case: Case) -> None:
        rule = "Each W follows an R of its block, which no earlier W has followed."
        unread: dict[int, Any] = {}
        for position, op in case.ops:
            if op.what == "R":
                unread[op.block] = position
            elif op.what == "W":
                read = unread.pop(op.block, None)
                if read is None:
                    raise case.fault(f"{case.name(position)} copies what no R has read.", rule, position.tick, "Add R.")
                case.require_before(read, position, "copies what is read by", rule)

    @staticmethod
    def put_into(schedule: megatrain.Schedule) -> megatrain.Schedule:
        """The table one tick later, with an R a tick ahead of each W."""
        rows = [Tick(), *schedule.ticks]
        for tick, row in enumerate(schedule.ticks):
            if row.h2d is not None and row.h2d.what == "W":
                rows[tick] = rows[tick].replaced(DISK, Op(DISK, "R", row.h2d.block))
        return replace(schedule, ticks=tuple(rows), live_bytes=(schedule.live_bytes[0], *schedule.live_bytes))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FromFiles]:
    found = FromFiles(tmp_path)
    register_op(found.kind, handler=found.read, rule=found.check)
    yield found
    unregister_op(found.kind)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))


INPUT = torch.linspace(-1, 1, 16).reshape(2, 8)


def lowered(model: torch.nn.Module) -> tuple[megatrain.Program, megatrain.Schedule]:
    program = megatrain.lower(megatrain.trace(model, (INPUT,)))
    return program, megatrain.schedule(program, transfer="copy", activations="recompute")


def test_it_prints_and_reads_back(files: FromFiles) -> None:
    schedule = files.put_into(lowered(model())[1])
    assert "compute  d2h  file" in str(schedule)
    assert "R0" in str(schedule)
    assert megatrain.Schedule.parse(str(schedule)) == schedule
    assert "file     R0" in str(schedule.instructions)


def test_the_waits_follow_from_its_row(files: FromFiles) -> None:
    schedule = files.put_into(lowered(model())[1])
    ops = dict(schedule.positions())
    for position, before in schedule.waits().items():
        if ops[position].what == "W":
            assert f"R{ops[position].block}" in [str(ops[p]) for p in before]
    assert "needs the weights that R3" in schedule.why("W3@1")


def test_the_checker_has_its_rule(files: FromFiles) -> None:
    schedule = files.put_into(lowered(model())[1])
    schedule.check()
    bare = [row.replaced(DISK, None) if tick == 2 else row for tick, row in enumerate(schedule.ticks)]
    assert any(DISK in row for row in schedule.ticks[2:3])
    with pytest.raises(megatrain.ScheduleError, match="copies what no R has read"):
        replace(schedule, ticks=tuple(bare)).check()


def test_a_slow_disk_is_what_bounds_the_simulated_step(files: FromFiles) -> None:
    schedule = files.put_into(lowered(model())[1])
    fast = megatrain.Hardware(1e9, 1e9, 1e9, further_rates={"file": 1e12})
    slow = megatrain.Hardware(1e9, 1e9, 1e9, further_rates={"file": 1e3})
    assert schedule.simulate(slow).bound == DISK
    assert schedule.simulate(slow).step_s > 100 * schedule.simulate(fast).step_s
    assert "\nfile" in schedule.gantt(slow)


def test_it_runs_with_eagers_bits(files: FromFiles) -> None:
    eager = model()
    streamed = copy.deepcopy(eager)
    files.write(eager)
    program, schedule = lowered(streamed)
    engine = megatrain.Engine(streamed, torch.device("cpu"), chaos=megatrain.Chaos(seed=1, max_delay_s=0.01))
    executor = megatrain.Executor(program, files.put_into(schedule), engine)
    with torch.no_grad():
        for parameter in streamed.parameters():
            parameter.data.fill_(float("nan"))  # whatever isn't read from its file shows
    call = executor.forward([INPUT])
    executor.backward(call, [torch.ones(2, 8)])
    eager(INPUT).sum().backward()
    assert torch.equal(call.outputs[0], eager(INPUT))
    assert_same_state(streamed, eager)
    assert files.num_read == 2 * sum(op.what == "R" for op in executor.schedule.ops)


def test_a_backward_whose_slots_another_call_used_is_refused(files: FromFiles) -> None:
    streamed = model()
    files.write(streamed)
    program, schedule = lowered(streamed)
    executor = megatrain.Executor(program, files.put_into(schedule), streamed)
    first = executor.forward([INPUT])
    executor.forward([INPUT])
    with pytest.raises(megatrain.ExecuteError, match="another call used the slots"):
        executor.backward(first, [torch.ones(2, 8)])


def test_letters_and_names_are_checked(files: FromFiles) -> None:
    with pytest.raises(megatrain.OptionError, match="has an op `R` already"):
        register_op(files.kind, handler=files.read, rule=files.check)
    for stream, letter in (("file", "RR"), ("file", "r"), ("a b", "R"), ("", "R")):
        with pytest.raises(megatrain.OptionError, match="can't be printed"):
            register_op(OpKind(Stream(stream), letter, files.effect), handler=files.read, rule=files.check)
    with pytest.raises(megatrain.OptionError, match="was not added"):
        unregister_op(OpKind(DISK, "R", files.effect))


def test_a_schedule_whose_kind_of_op_was_removed_is_refused_by_name(tmp_path: Path) -> None:
    found = FromFiles(tmp_path)
    register_op(found.kind, handler=found.read, rule=found.check)
    streamed = model()
    found.write(streamed)
    program, schedule = lowered(streamed)
    schedule = found.put_into(schedule)
    executor, row = megatrain.Executor(program, schedule, streamed), schedule.ticks[1]
    unregister_op(found.kind)
    for refused in (
        lambda: str(schedule),
        lambda: schedule.check(),
        lambda: schedule.instructions,
        lambda: schedule.simulate(megatrain.Hardware(1e9, 1e9, 1e9)),
        lambda: row.replaced("host", None),  # it would lose the op
        lambda: executor.forward([INPUT]),
    ):
        with pytest.raises(megatrain.ScheduleError, match="no op `R` on the stream `file`"):
            refused()
