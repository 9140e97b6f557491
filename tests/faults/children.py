"""Trials in forked children: one that dies, hangs or leaves something behind costs the others nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.faults.tally import Tally

ONE_ITEM_S = 120.0


class Trial(NamedTuple):
    """What became of one trial: its class, what is wrong if something is, and what repeats it."""

    name: str
    complaint: str | None
    repeat: str


Worker = Callable[[Any], Sequence[Trial]]


def in_children(
    items: Sequence[Any], make: Callable[[], Worker], tally: Tally, *, named: Callable[[Any], Trial], folder: Path
) -> None:
    """Works on all items, one after another, in one child as long as everything holds, else in another.

    Args:
        items: Each is one trial, or some.
        make: Called in each child; returns what works on an item.
        tally: Gets all trials.
        named: What to call an item during which its child ends.
        folder: For what children write to stderr.
    """
    done = 0
    while done < len(items):
        reader, writer = os.pipe()
        log = folder / "stderr"
        folder.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            os.close(reader)
            _work(items[done:], make, writer, log)
        os.close(writer)
        done += _follow(child, reader, items[done:], tally, named, log)


def _work(items: Sequence[Any], make: Callable[[], Worker], writer: int, log: Path) -> NoReturn:
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 2)
        worker = make()
        for item in items:
            trials = worker(item)
            os.write(writer, json.dumps(trials).encode() + b"\n")
            if any(trial.complaint for trial in trials):
                break
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads of streams may still run


def _follow(
    child: int, reader: int, items: Sequence[Any], tally: Tally, named: Callable[[Any], Trial], log: Path
) -> int:
    """Reads what a child reports until it ends; returns how many items are done with."""
    done, buffer, is_hung, last = 0, b"", False, time.monotonic()
    while True:
        if not select.select([reader], [], [], max(0.0, last + ONE_ITEM_S - time.monotonic()))[0]:
            is_hung = True
            os.kill(child, signal.SIGKILL)
            break
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            done, last = done + 1, time.monotonic()
            for trial in json.loads(line):
                tally.add(*trial)
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    if status == 0 and not is_hung:
        return done
    end = "hung" if is_hung else f"ended by {_described(status)}"
    trial = named(items[done])
    text = log.read_text(errors="replace").strip()[-600:].replace("\n", " | ") if log.exists() else ""
    tally.add(trial.name, f"the process {end}: {text}", trial.repeat)
    return done + 1


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"an error, status {code}"


def asked(work: Callable[[], Any]) -> Any:
    """Has a child work something out, so that this process gets no threads; the result is JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(writer, "w") as out:
                json.dump(work(), out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    assert os.waitpid(child, 0)[1] == 0, "a child that nothing disturbs failed"
    return json.loads(text)
