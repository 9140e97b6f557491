"""Bad values for every option of the public functions, and what came of each: told apart by `outcome`."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from megatrain.errors import MegatrainError

LIMIT_S = 20


class Thing:
    """A class that nothing knows."""


def values() -> dict[str, Any]:
    """What is given for each parameter, by name; made anew for each case."""
    return {
        "None": None,
        "zero": 0,
        "minus": -1,
        "true": True,
        "huge": 10**30,
        "half": 1.5,
        "nan": float("nan"),
        "evil": "evil",
        "nul": "\0",
        "digits": "9" * 5000,
        "list": [],
        "dict": {},
        "object": Thing(),
        "lambda": lambda a, b, c, d, e: None,
        "tensor": torch.ones(2, 2),
        "meta": torch.ones(2, device="meta"),
        "mixed": ["a", 0, None],
    }


class Hung(BaseException):
    """A case took longer than its limit."""


@contextmanager
def guarded(seconds: float = LIMIT_S) -> Generator[None]:
    """Interrupts its body after so long; a hang inside of a kernel is for the caller of the process."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[[], object]) -> str:
    """Runs a case: `clear`, `accepted`, `hung`, or else what was raised."""
    assert threading.current_thread() is threading.main_thread(), "only there do alarms come"
    try:
        with guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Hung:
        return "hung"
    except MegatrainError as error:
        # What is wrong, and then the rule or the way out.
        return "clear" if len(str(error).splitlines()) >= 2 else f"one line: {error}"
    except Exception as error:  # the very thing that is looked for
        return f"{type(error).__name__}: {error}"
    return "accepted"
