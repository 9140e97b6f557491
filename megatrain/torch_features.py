"""Tries the private parts of torch on which numbers depend, once a process, before anything is captured."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch.torch_version import TorchVersion

from megatrain import torch_private
from megatrain.errors import TorchError, UntestedTorchWarning
from megatrain.torch_private import FakeTensorMode
from megatrain.torch_probes import PROBES

_lock = threading.Lock()
_tried: list[bool] = []


def check_torch() -> None:
    """Tries torch at the first call in a process, and warns of one that is newer than the tested ones.

    Raises:
        TorchError: If a part is missing or does something else, at each call.
    """
    with _lock:
        if not _tried:
            check_features()
            _tried.append(True)
            if TorchVersion(torch.__version__) >= torch_private.UNTESTED:
                text = f"torch {torch.__version__} is newer than those that megatrain is tested with"
                warnings.warn(f"{text}: {torch_private.TESTED}.", UntestedTorchWarning, stacklevel=2)


def check_features() -> None:
    """Tries all parts now, on a new thread, where no mode of the caller is active.

    Raises:
        TorchError: If one is missing or does something else.
    """
    missing = [found for found in vars(torch_private).values() if torch_private.is_missing(found)]
    if missing:
        raise torch_private.unsupported(missing[0].name, "it doesn't exist")
    failed: list[TorchError] = []

    def run() -> None:
        for name, does, works in PROBES:
            problem = _problem(does, works)
            if problem is not None:
                failed.append(torch_private.unsupported(name, problem))
                return

    _make_first_fakes()
    thread = threading.Thread(target=run, name="torch features")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _problem(does: str, works: Callable[[], bool]) -> str | None:
    try:
        return None if works() else f"which must {does}, doesn't"
    except Exception as error:  # any error of an unknown torch is a reason to refuse this torch
        return f"which must {does}, fails ({type(error).__name__}: {error})"


@cache
def _make_first_fakes() -> None:
    """Enters a fake mode on a thread that never ends, for torch 2.11 with CUDA and no device.

    This torch keeps a part of the first thread that enters one, and crashes once that thread has ended; see pull
    request 178950 of pytorch.
    """
    if TorchVersion(torch.__version__) >= "2.12" or not torch.backends.cuda.is_built():
        return
    made, never = threading.Event(), threading.Event()

    def run() -> None:
        with FakeTensorMode():
            made.set()
        never.wait()

    threading.Thread(target=run, name="megatrain: first fake tensors", daemon=True).start()
    made.wait()
