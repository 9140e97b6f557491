"""Optimizer state in a file between updates: the bits of state in memory, whoever looks, and whatever fails."""

from __future__ import annotations

import copy
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.device.host_pages import HostPages
from megatrain.errors import ExecuteError, OptimizerError, OptionError
from megatrain.files import scratch_file
from megatrain.files.scratch_file import PAGE, FileRange, ScratchFile
from megatrain.planning import from_files, host_plan
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.training.parity import MODES, SideBySide, generator_of
from tests.training.resuming import points
from tests.training.test_failures import batches, tokens

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
"""On a disk, as the project is; folders for temporary files may be in memory."""


def fused(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def coded(model: Any) -> torch.optim.Optimizer:
    return megatrain.AdamW8bit(model.parameters(), lr=1e-2)


def small(make: Callable[[Any], Any], precision: str = "bf16", depth: int = 4, width: int = 32) -> tuple[Any, Any]:
    torch.manual_seed(3)
    linear = (torch.nn.Linear(3 if n == 0 else width, width) for n in range(depth))
    layers = (torch.nn.Sequential(each, torch.nn.Tanh()) for each in linear)
    compiled = megatrain.compile(torch.nn.Sequential(*layers), device="cpu", transfer="copy", precision=precision)
    return compiled, make(compiled.megatrain.model)


def loss_of(result: Any, _: Any) -> Any:
    return result.float().square().mean()


class Both:
    """One training with its state in memory, and one with it in a file."""

    def __init__(
        self,
        make: Callable[[Any], Any] = fused,
        mode: str = "spread",
        precision: str = "bf16",
        host_memory: int | str | None = None,
        **sizes: int,
    ) -> None:
        self.make, self.precision, self.host_memory, self.sizes = make, precision, host_memory, sizes
        self.options: dict[str, Any] = {"loss": loss_of, **MODES[mode]}
        self.sides = [self.side(folder) for folder in (None, FOLDER)]
        self.number = 0

    def side(self, offload: Path | None) -> tuple[Any, Any, Any]:
        compiled, optimizer = small(self.make, self.precision, **self.sizes)
        more = {} if offload is None else {"offload": offload, "host_memory": self.host_memory}
        return compiled, optimizer, megatrain.TrainStep(compiled, optimizer, **more, **self.options)

    def take(self, count: int = 1) -> None:
        for _ in range(count):
            losses = [step([points(self.number), points(50 + self.number)]) for _, _, step in self.sides]
            assert_same(losses[0], losses[1], f"loss of step {self.number}")
            self.number += 1

    def found(self) -> list[dict[str, Any]]:
        return [snapshot(compiled.megatrain.model, optimizer) for compiled, optimizer, _ in self.sides]

    def assert_same(self) -> None:
        for _, _, step in self.sides:
            step.flush()
        memory, file = self.found()
        assert_same(memory, file)

    @property
    def step(self) -> Any:
        return self.sides[1][2]


def places(both: Both, parameters: Any) -> set[str]:
    """Where the moments of parameters are between steps."""
    moments, optimizer = both.step._setup.moments, both.sides[1][1]
    found = [value for p in parameters for name, value in optimizer.state[p].items() if name != "step"]
    return {"file" if id(value) in moments.mapped else "memory" for value in found}


@pytest.mark.parametrize(
    ("make", "mode", "precision"),
    [(fused, "deferred", "fp32"), (coded, "spread", "bf16"), (fused, "overlap", "bf16"), (coded, "serial", "fp32")],
)
def test_steps_have_the_bits_of_state_in_memory(make: Any, mode: str, precision: str) -> None:
    both = Both(make, mode, precision=precision)
    both.take(3)
    both.assert_same()
    moved = [op.block for op in both.step.schedule.ops if op.stream == "disk"]
    assert len(moved) == 2 * len(set(moved)) > 0
    for block, parameters in enumerate(both.step._setup._blocks):
        assert places(both, parameters) == ({"file"} if block in moved else {"memory"})
    assert list(FOLDER.glob("megatrain-*")) == []


def totals(make: Any, mode: str, precision: str, **sizes: int) -> list[int]:
    """The host memory of a step with its state in memory, and in a file."""
    both = Both(make, mode, precision, **sizes)
    for _, _, step in both.sides:
        step.prepare([points(0), points(50)])
    return [step.host_plan.total_bytes for _, _, step in both.sides]


@pytest.mark.parametrize(("make", "mode", "precision"), [(fused, "deferred", "bf16"), (coded, "spread", "fp32")])
def test_state_that_has_room_stays_in_memory(make: Any, mode: str, precision: str) -> None:
    sizes = {"depth": 7, "width": 128}
    memory, file = totals(make, mode, precision, **sizes)
    room = (memory + file) // 2
    both = Both(make, mode, precision, host_memory=room, **sizes)
    both.take(2)
    both.assert_same()
    assert file <= both.step.host_plan.total_bytes <= room
    moved = {op.block for op in both.step.schedule.ops if op.stream == "disk"}
    blocks = both.step._setup._blocks
    assert 0 < len(moved) < sum(map(bool, blocks))
    for block, parameters in enumerate(blocks):
        assert places(both, parameters) == ({"file"} if block in moved else {"memory"})
    # Other schedules have other state in memory; where nothing is in the file, the room isn't enough.
    tables = both.step._setup.tables
    for least, expected in ((1 << 60, {"file"}), (0, {"file", "memory"}), (0, {"memory"}), (1, {"file", "memory"})):
        both.step._setup._host_memory = None if expected == {"memory"} else both.step._setup._host_memory
        tables._limits = replace(tables._limits, least_filed_bytes=least)
        both.take(2)
        both.assert_same()
        assert places(both, [p for parameters in blocks for p in parameters]) == expected
    assert both.step.host_plan.held_bytes > 0


def test_a_step_takes_no_more_of_the_host_than_it_may() -> None:
    memory, file = totals(fused, "overlap", "bf16")
    for host_memory, offload in ((file - 1, FOLDER), (memory - 1, None)):
        both = Both(mode="overlap", host_memory=host_memory)
        both.options |= {"host_memory": host_memory} if offload is None else {}
        _, _, step = both.side(offload)
        with pytest.raises(ExecuteError, match=r"a step needs .* of host memory, .* are available"):
            step([points(0), points(50)])


def test_a_file_that_nothing_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_files, "_MUCH", 1)
    for host_memory, match in (
        (
            None,
            r"(?s)has room for all of the optimizer's state, .*\. *\n  Each step reads and writes .*host_memory isn't",
        ),
        ("1TiB", r"(?s)has room for all of the optimizer's state, .*\n  It stays in memory"),
    ):
        both = Both(host_memory=host_memory)
        if host_memory == "1TiB":
            monkeypatch.setattr(host_plan, "available_now", lambda: 1 << 50)
        step = both.side(FOLDER)[2]
        with pytest.warns(megatrain.NeedlessFileWarning, match=match):
            step([points(0), points(50)])
        step([points(1), points(51)])  # once


def test_state_is_seen_and_written_between_steps() -> None:
    both = Both(mode="deferred", precision="fp32")
    both.take(2)
    seen = [copy.deepcopy(optimizer.state_dict()["state"]) for _, optimizer, _ in both.sides]
    assert_same(seen[0], seen[1])
    for compiled, optimizer, _ in both.sides:
        with torch.no_grad():
            optimizer.state[compiled.megatrain.model[0][0].weight]["exp_avg"].mul_(3)
    both.take(2)
    for (_, optimizer, _), state in zip(both.sides, seen, strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    both.take(2)
    for _, optimizer, _ in both.sides:
        optimizer.state.clear()
    both.take(2)
    both.assert_same()


def test_checkpoints_go_from_files_to_memory_and_back(tmp_path: Path) -> None:
    both = Both(coded)
    both.take(2)
    for (_, _, step), name in zip(both.sides, "mf", strict=True):
        step.save(tmp_path / name)
    both.take(2)
    both.assert_same()
    kept = both.found()
    for name, folder, room in (("f", None, None), ("m", FOLDER, None), ("f", FOLDER, "1TiB")):
        compiled, optimizer = small(coded)
        more: Any = {"offload": folder, "host_memory": room}
        step = megatrain.TrainStep.load(tmp_path / name, compiled, optimizer, **more, **both.options)
        for number in (2, 3):
            step([points(number), points(50 + number)])
        step.flush()
        assert_same(kept[0], snapshot(compiled.megatrain.model, optimizer), name)
        if folder is not None:
            assert not step._setup.moments.is_behind


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "first"), [pytest.param("overlap", 0, marks=pytest.mark.nightly), ("deferred", 1)])
def test_a_failure_of_an_operation_loses_no_state(mode: str, first: int) -> None:
    """Of every third operation, and of each of the disk."""
    sides = SideBySide.of("hazardous", fused, offload=FOLDER, **MODES[mode])
    engine, number = sides.compiled.megatrain.engine, 0
    sides.take(batches(0), seed=0)
    chosen = [token for n, token in enumerate(tokens(sides.step.schedule)) if n % 3 == first or "disk" in token]
    for token in chosen:
        number += 1
        count = sides.step.progress.count
        engine.set_chaos(Chaos(fail=token, max_delay_s=0))
        torch.manual_seed(number)
        with pytest.raises((ExecuteError, RuntimeError)):
            sides.step(batches(number))
        engine.set_chaos(None)
        torch.manual_seed(number)
        if sides.step.progress.count > count:
            sides.expect(batches(number))
        else:
            sides.take(batches(number), seed=number)
        sides.assert_same(token)
        assert not sides.step._setup.moments.is_behind
        sides.take(batches(100 + number), seed=number)  # so that a deferred step has updates to take


@contextmanager
def failing_disk(name: str, *, after: int = 0, times: int = 1 << 60) -> Generator[None]:
    """Reads or writes fail, so many of them after some."""
    original, calls = getattr(os, name), iter(range(1 << 60))

    def move(*given: Any) -> int:
        if after <= next(calls) < after + times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, move)
        yield


@pytest.mark.parametrize(("name", "mode"), [("preadv", "overlap"), ("pwritev", "overlap"), ("pwritev", "deferred")])
def test_a_disk_that_fails_is_named_and_the_state_is_whole_when_it_recovers(name: str, mode: str) -> None:
    both = Both(mode=mode)
    both.take(2)
    memory, file = both.sides[0][2], both.step
    number = both.number
    with failing_disk(name, after=2):
        with pytest.raises(ExecuteError, match=r"the disk of `.*` fails to (read|write) .*: Input/output error"):
            file([points(number), points(50 + number)])
        if file._setup.is_behind:
            with pytest.raises(ExecuteError, match="Load the latest checkpoint, with another folder"):
                file.flush()
            with pytest.raises(ExecuteError, match="Input/output error"):
                len(both.sides[1][1].state)
    if file.progress.count > number:
        memory([points(number), points(50 + number)])
        both.number += 1
    both.assert_same()
    both.take(2)
    both.assert_same()


def test_updates_that_are_due_in_a_forked_process_are_refused_and_leave_the_file_alone() -> None:
    both = Both(mode="deferred")
    both.take(2)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # it has no threads that would move anything
        try:
            both.step.flush()
        except ExecuteError as error:
            os._exit(7 if "a forked process can't change optimizer state" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    both.take(1)
    both.assert_same()


def test_a_step_that_is_dropped_while_another_reads_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may drop it at any line, also in the middle of handing work to threads."""
    one, other = Both(mode="deferred"), Both(mode="deferred")
    one.take(2)
    other.take(2)
    pieces, dropped = scratch_file._pieces, [one.sides[1][2]]
    one.sides[1] = (*one.sides[1][:2], None)

    def dropping(ranges: Any) -> Any:
        dropped.clear()
        return pieces(ranges)

    monkeypatch.setattr(scratch_file, "_pieces", dropping)
    other.take(1)
    other.assert_same()
    one.sides[0][2].flush()
    memory, file = one.found()
    assert_same(memory, file)


ENDS = """
import sys
from tests.training.resuming import points
from tests.training.test_offload import FOLDER, coded, loss_of, small
import megatrain

compiled, optimizer = small(coded)
step = megatrain.TrainStep(compiled, optimizer, loss=loss_of, offload=FOLDER)
step(points(0))
"""


@pytest.mark.nightly
def test_a_program_that_ends_with_a_file_says_nothing() -> None:
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", ENDS], cwd=ROOT, check=True, capture_output=True)
    assert found.stderr == b""


KILLED = """
import os, signal, sys
from tests.training.resuming import points
from tests.training.test_offload import FOLDER, coded, loss_of, small
import megatrain

compiled, optimizer = small(coded)
step = megatrain.TrainStep(compiled, optimizer, loss=loss_of, offload=FOLDER)
write, count = os.pwritev, [0]
def pwritev(*given):
    count[0] += 1
    if step.progress.count == 3 and count[0] % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*given)
os.pwritev = pwritev
for number in range(6):
    step(points(number))
    if number == 1:
        step.save(sys.argv[1])
"""


def killed(program: str, place: Path) -> None:
    """Runs a program that ends itself by SIGKILL; its file is gone with it."""
    found = subprocess.run([sys.executable, "-c", program, str(place)], cwd=ROOT, check=False)
    assert found.returncode == -signal.SIGKILL
    assert list(FOLDER.glob("megatrain-*")) == []


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_run_that_is_killed_in_a_write_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    killed(KILLED, tmp_path / "run")
    results = []
    for place, offload in ((None, None), (tmp_path / "run", FOLDER)):
        compiled, optimizer = small(coded)
        options: Any = {"loss": loss_of, "offload": offload}
        parts = compiled, optimizer
        step = megatrain.TrainStep.load(place, *parts, **options) if place else megatrain.TrainStep(*parts, **options)
        for number in range(step.progress.count, 6):
            step(points(number))
        step.flush()
        results.append(snapshot(compiled.megatrain.model, optimizer))
    assert_same(results[0], results[1])


# -- what is refused ---------------------------------------------------------------------------------------------


def refused(error: Any, match: str, make: Any = fused, folder: Any = FOLDER, **compiling: Any) -> None:
    compiled = megatrain.compile(torch.nn.Linear(64, 64), device="cpu", **compiling)
    with pytest.raises(error, match=match):
        megatrain.TrainStep(compiled, make(compiled.megatrain.model), offload=folder)


def test_optimizers_whose_state_cannot_be_in_a_file_are_refused_by_name() -> None:
    refused(OptimizerError, r"`weight`, f32\[64, 64\], can't be in a file: SGD updates it",
            lambda m: torch.optim.SGD(m.parameters()))  # fmt: skip
    refused(OptimizerError, "torch's AdamW with fused=True", lambda m: torch.optim.AdamW(m.parameters()))
    refused(
        OptimizerError,
        "AdamW updates it",
        lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
        precision="bf16",
    )


def test_folders_without_a_disk_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(OptionError, "isn't there: No such file or directory", folder=tmp_path / "none")
    refused(OptionError, "is a file", folder=tmp_path / "file")
    if sys.platform == "linux":
        refused(OptionError, r"is in memory \(tmpfs\), not on a disk", folder="/dev/shm")
        refused(OptionError, "can't be written to: .*\n.*\n  Give an existing folder in which", folder="/sys/kernel")


def test_a_disk_without_room_is_refused_before_the_first_step() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, before[1]))
    try:
        refused(OptionError, r"has no room for it: 36.00 KiB are needed, .* are free \(File too large\)")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(FOLDER.glob("megatrain-*")) == []


# -- the file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_direct", [True, False])
def test_what_is_written_is_read_and_seen(is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_direct:
        opened = os.open

        def without(path: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return opened(path, flags, *rest)

        monkeypatch.setattr(os, "open", without)
    monkeypatch.setattr(scratch_file, "_PIECE", 2 * PAGE)
    file = ScratchFile(FOLDER, 8 * PAGE)
    assert file.is_direct <= is_direct
    assert ("cache" in file.how) != file.is_direct
    buffer, seen = HostPages.of(8 * PAGE).tensor(), file.tensor(PAGE, 6 * PAGE)
    ranges = [FileRange(PAGE, 3 * PAGE, 0), FileRange(4 * PAGE, PAGE, 3 * PAGE), FileRange(6 * PAGE, PAGE, 4 * PAGE)]
    for number in range(3):
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator_of(number)))
        kept = buffer[: 5 * PAGE].clone()
        file.write(ranges, buffer)
        assert torch.equal(seen[: 4 * PAGE], kept[: 4 * PAGE])
        assert torch.equal(seen[5 * PAGE :], kept[4 * PAGE :])
        seen[17] += 1  # a user writes
        kept[17] += 1
        buffer.zero_()
        file.read(ranges, buffer)
        assert torch.equal(buffer[: 5 * PAGE], kept)
    assert not seen[4 * PAGE : 5 * PAGE].any()
    file.close()
    assert torch.equal(seen[: 4 * PAGE], kept[: 4 * PAGE])
