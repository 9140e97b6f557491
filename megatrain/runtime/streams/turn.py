"""Turn: one thread at a time uses a model; code of a run that would wait for the end of this run is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from megatrain.errors import ExecuteError
from megatrain.interrupts import Interrupts
from megatrain.torch_private import current_graph_task


class _Here(threading.local):
    """What this thread does."""

    turns: tuple[Turn, ...] = ()


_HERE = _Here()
# A thread that waits for a turn checks for Ctrl-C at this interval, in seconds.
_POLL_S = 0.1


def turns_here() -> tuple[Turn, ...]:
    """Returns the turns that this thread has, or works for."""
    return _HERE.turns


def work_for(turns: tuple[Turn, ...]) -> None:
    """Notes for whose run this thread, a stream's, works from now on."""
    _HERE.turns = turns


class Turn:
    """The right to use a model, for one thread at a time. Others wait.

    Code that a run calls (a hook on a gradient, the loss) must not wait for the end of that run: hooks run on threads
    of the streams, and the run waits for them. Such code is refused. So is a forked process, which has none of these
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._is_running = False
        self._differentiates = False
        self._process = os.getpid()

    @contextmanager
    def hold(self, what: str, *, in_child: bool = False) -> Generator[None]:
        """Keeps other threads away; the same thread may hold it several times over, but not within `run`.

        Args:
            what: The name of the called function, for the error.
            in_child: It needs no other thread, so that a forked process may do it, too.

        Raises:
            ExecuteError: If it is called from within a run, or in a forked process.
        """
        with self._taken(what, in_child=in_child):
            yield

    @contextmanager
    def run(self, what: str = "the model", *, in_child: bool = False, differentiates: bool = False) -> Generator[None]:
        """As `hold`, for the operations of a call or a step: what they call may not use the model.

        Args:
            what: See `hold`.
            in_child: See `hold`.
            differentiates: They use autograd's engine, whose threads may run hooks as well.
        """
        with self._taken(what, in_child=in_child, is_running=True, differentiates=differentiates):
            yield

    @contextmanager
    def _taken(
        self, what: str, *, in_child: bool, is_running: bool = False, differentiates: bool = False
    ) -> Generator[None]:
        self._check(what, in_child=in_child)
        # Ctrl-C between the lock and what is noted of it would keep the turn for ever.
        with Interrupts() as interrupts:
            self._acquire(what, interrupts)
            before = self._owner, _HERE.turns
            try:
                self._owner, _HERE.turns = threading.get_ident(), (*_HERE.turns, self)
                self._is_running, self._differentiates = is_running, differentiates
                with interrupts.released():
                    yield
            finally:
                self._owner, _HERE.turns = before
                self._is_running = self._differentiates = False  # nothing is taken within a run
                self._lock.release()

    def _acquire(self, what: str, interrupts: Interrupts) -> None:
        is_child = os.getpid() != self._process
        while not self._lock.acquire(timeout=0 if is_child else _POLL_S):
            if is_child:
                raise ExecuteError(_FORKED.format(what=what))  # a thread that stayed behind has it, for ever
            interrupts.check()

    def _check(self, what: str, *, in_child: bool) -> None:
        if os.getpid() != self._process and not in_child:
            raise ExecuteError(_FORKED.format(what=what))
        is_owner = self._owner == threading.get_ident()
        works_for_it = self in _HERE.turns or (self._differentiates and _is_autograd())
        if self._is_running if is_owner else works_for_it:
            it = "it" if what == "the model" else "the model"
            raise ExecuteError(_RUNNING.format(what=what, it=it))


def _is_autograd() -> bool:
    """Whether this is a thread of autograd's engine, which no code of Python has started."""
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore
    return is_foreign and current_graph_task() != -1


_RUNNING = (
    "{what} was called while {it} runs.\n"
    "  A run waits for hooks on gradients and for the loss, so these can't wait for the end of the run.\n"
    "  Call it after the run has returned."
)
_FORKED = (
    "{what} was called in a forked process.\n"
    "  The threads that run the model stayed in the process that compiled it.\n"
    "  Read parameters and state, or call the model itself, uncompiled; or compile it in this process."
)
