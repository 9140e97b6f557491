"""SIGKILL at random moments of a process that trains: the newest whole checkpoint goes on as if nothing had happened.

A process resumes from the folder, trains, and saves every second step. It tells on a pipe what it begins and what it
has finished, and is killed while it does what was drawn. The next process finds what is there, compares each state
with that of an undisturbed run, and is killed in its turn.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from megatrain.errors import CheckpointError
from megatrain.files import disk, load
from tests.faults.children import asked
from tests.faults.lines import ctrl_c
from tests.faults.tally import Tally
from tests.faults.world import CASES, layers, points
from tests.training.resuming import BF16, CLIP, Case, Run, differences, warm_up

KINDS = ("step", "step", "first step", "first save", "save", "save", "save", "between the renames", "load")
PER_RUN = 10
STEPS = 4 * PER_RUN
WAIT_S = 120.0
WIDE = 128


def _wide() -> Any:
    return layers(4, WIDE)


def _point(number: int) -> Any:
    return points(number, WIDE)


def _several(number: int) -> list[Any]:
    return [points(3 * number + i, WIDE) for i in range(3)]


# Wide enough for a save to take a while.
RUNS: dict[str, Case] = {
    **CASES,
    "wide fp32": Case(_wide, _point, "adamw", warm_up, ({}, {}), (CLIP, CLIP)),
    "wide bf16": Case(_wide, _several, "fused", warm_up, (BF16, BF16), ({}, {})),
}


def kills(tally: Tally, folder: Path, *, seed: int, first: int, count: int) -> None:
    """Kills `count` processes, in runs of `PER_RUN`."""
    with ctrl_c():
        for number in range(-(-count // PER_RUN)):
            size = min(PER_RUN, count - number * PER_RUN)
            Killed(tally, folder / str(number), seed, first + number, size).run()
            shutil.rmtree(folder / str(number), ignore_errors=True)


class Killed:
    """One run, whose processes are killed one after another."""

    def __init__(self, tally: Tally, folder: Path, seed: int, number: int, size: int) -> None:
        self._dice = random.Random(f"kills {seed} {number}")
        self._name = sorted(RUNS)[number % len(RUNS)]
        self._tally, self._size = tally, size
        self._place = folder / "run"
        self._repeat = f"--only kills --seed {seed} --first {number} --count {size}, `{self._name}`"
        self._saved = -1
        self._usual: dict[str, float] = {}
        folder.mkdir(parents=True)

    def run(self) -> None:
        case = RUNS[self._name]
        states = asked(lambda: _undisturbed(case))
        for trial in range(self._size):
            kind = "first save" if trial == 0 else self._dice.choice(KINDS)
            if kind == "load" and not any(self._place.parent.iterdir()):
                kind = "first step"  # the first save was killed before its first file: nothing to load
            if kind == "first save":
                shutil.rmtree(self._place.parent)
                self._place.parent.mkdir()
                self._saved = -1
            name, complaint = self._kill(case, states, kind)
            self._tally.add(name, complaint, f"{self._repeat}, trial {trial}")
            if complaint is not None:
                return
        self._tally.add("end of a killed run", self._end(case, states), self._repeat)

    def _kill(self, case: Case, states: list[Any], kind: str) -> tuple[str, str | None]:
        """Starts a process and kills it; returns in the midst of what, and what is wrong."""
        nth = 1 if kind.startswith("first") or kind in ("load", "between the renames") else self._dice.randint(1, 2)
        child, reader = _started(lambda tell: _train(case, self._place, states, tell, kind == "between the renames"))
        follow = Follow(reader)
        is_there = follow.until(f"begin {kind}", nth)
        began = time.monotonic()
        if is_there and kind != "between the renames":
            follow.until(f"end {kind}", 1, self._dice.uniform(0, 1.2 * self._usual.get(kind, 0.1)))
            if f"end {kind}" in follow.lines[-1:]:
                self._usual[kind] = time.monotonic() - began
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        follow.rest()
        complaints = [line for line in follow.lines if line.startswith("wrong ")]
        if complaints or not is_there:
            return f"kill in a {kind}", (complaints or [f"`{kind}` was never begun: {follow.lines[-3:]}"])[0]
        return f"kill in a {follow.doing()}", self._found(follow)

    def _found(self, follow: Follow) -> str | None:
        """Reads what is there now."""
        self._saved = max([self._saved, *(int(line.split()[1]) for line in follow.lines if line.startswith("saved "))])
        begun = max([self._saved, *(int(line.split()[1]) for line in follow.lines if line.startswith("saving "))])
        if self._saved < 0 and not self._place.exists():
            return None
        try:
            checkpoint = load(self._place)
            checkpoint.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace("\n", " | ")
        count = checkpoint.extra["progress"]["count"]
        if not self._saved <= count <= begun:
            return f"the checkpoint is of step {count}; {self._saved} was finished, {begun} begun"
        self._saved = count
        return None

    def _end(self, case: Case, states: list[Any]) -> str | None:
        child, reader = _started(lambda tell: _train(case, self._place, states, tell, False, until=STEPS))
        follow = Follow(reader)
        follow.until("done", 1)
        os.waitpid(child, 0)
        complaints = [line for line in follow.lines if line.startswith("wrong ")]
        if complaints or "done" not in follow.lines:
            return str(complaints or follow.lines[-3:])
        names = sorted(path.name for path in self._place.parent.iterdir())
        return None if names == ["run"] else f"left over: {names}"


def _undisturbed(case: Case) -> list[Any]:
    run = Run(case)
    states = [run.state()]
    for _ in range(STEPS):
        run.train(1)
        states.append(run.state())
    return states


def _started(work: Any) -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    _tell_all(work, writer)


def _tell_all(work: Any, writer: int) -> NoReturn:
    def tell(line: str) -> None:
        os.write(writer, line.replace("\n", " | ").encode() + b"\n")

    try:
        work(tell)
    except BaseException:
        tell("wrong " + traceback.format_exc()[-1000:])
    finally:
        os._exit(0)


def _train(case: Case, place: Path, states: list[Any], tell: Any, stops: bool, until: int | None = None) -> None:
    """What a process does until it is killed, or has taken all steps."""
    if stops:
        _stop_between_renames(tell)
    if place.exists() or any(place.parent.iterdir()):
        tell("begin load")
        try:
            run = Run(case, place, part=0)
        except CheckpointError as error:
            if "has no checkpoint.json" not in str(error) or place.exists():
                raise
            run = Run(case)  # the first save was cut short
        tell("end load")
    else:
        run = Run(case)
    _compare(run, states)
    kind = "first step"
    while run.step.progress.count < (STEPS if until is None else until):
        tell(f"begin {kind}")
        run.train(1)
        tell(f"end {kind}")
        _compare(run, states)
        kind = "step"
        count = run.step.progress.count
        if count % 2 == 0 or until == count:
            saving = "save" if place.exists() else "first save"
            tell(f"saving {count}")
            tell(f"begin {saving}")
            run.save(place, shard_bytes=50_000)
            tell(f"saved {count}")
            tell(f"end {saving}")
    tell("done")
    while until is None:
        tell("begin step")  # all steps are taken: whoever waits gets something to kill
        time.sleep(WAIT_S)


def _compare(run: Run, states: list[Any]) -> None:
    differs = differences(states[run.step.progress.count], run.state())
    if differs:
        raise AssertionError(f"step {run.step.progress.count} isn't the undisturbed one: {differs[:3]}")


def _stop_between_renames(tell: Any) -> None:
    rename = disk.rename

    def first(source: Path, target: Path) -> None:
        rename(source, target)
        if ".old-" in target.name:
            tell("begin between the renames")
            time.sleep(WAIT_S)

    disk.rename = first


class Follow:
    """Reads the lines that a process writes."""

    def __init__(self, reader: int) -> None:
        self.lines: list[str] = []
        self._reader, self._buffer, self._is_over = reader, b"", False

    def until(self, line: str, times: int, seconds: float = WAIT_S) -> bool:
        """Waits until there is a line, that many times from now on; returns whether it came."""
        deadline, begun = time.monotonic() + seconds, len(self.lines)
        while self.lines[begun:].count(line) < times:
            left = deadline - time.monotonic()
            if self._is_over or left <= 0 or not select.select([self._reader], [], [], left)[0]:
                return False
            self._read()
        return True

    def rest(self) -> None:
        while not self._is_over:
            self._read()
        os.close(self._reader)

    def _read(self) -> None:
        chunk = os.read(self._reader, 1 << 16)
        self._is_over = not chunk
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self.lines += [line.decode() for line in lines]

    def doing(self) -> str:
        """What was begun and not ended."""
        marks = [line for line in self.lines if line.startswith(("begin ", "end "))]
        return marks[-1].removeprefix("begin ").removeprefix("end ") if marks else "start"
