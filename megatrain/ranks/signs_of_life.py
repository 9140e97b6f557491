"""SignsOfLife: finds out that another rank has failed, has ended or stands still, and which one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from megatrain.errors import RanksError

BEAT_S = 1.0
LOOK_S = 0.5
"""How often a rank gives a sign of life, and how often one that waits looks for those of others."""
SILENT_S = 60.0
"""How long a rank may give no sign of life; it does so also while it computes."""
BROKEN_S = 5.0
"""How long to look for the reason of a broken connection, and how long the rank that broke it has been silent then."""
_LAST_S = 5.0
"""How long the last sign may take, to a store that doesn't answer."""


class SignsOfLife:
    """Signs of life and announced failures of all ranks, in the store of their process group.

    Args:
        store: Where they are, under names of its own.
        rank: This rank.
        size: How many there are.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        stop = threading.Event()
        # A thread of its own and a connection of its own: this rank may wait for others on all of its threads.
        beat = threading.Thread(target=_beat, args=(store.clone(), rank, stop), name="megatrain-alive", daemon=True)
        beat.start()
        self._end = weakref.finalize(self, _end, beat, stop)

    def announce(self, text: str, rank: int | None = None) -> None:
        """Tells the others that this rank has failed, or that another one was found to have.

        Args:
            text: Why.
            rank: Which one; None is this rank.
        """
        try:
            self._store.set(f"failed/{self._rank if rank is None else rank}", text)
        except RuntimeError:
            return  # the store is gone, which the others see as well

    def look(self) -> None:
        """Looks for a rank that can't go on.

        Raises:
            RanksError: Naming the rank.
        """
        with self._lock:
            try:
                silent = self._silent()
                failed = [r for r in self._others if self._store.check([f"failed/{r}"])]
                texts = [self._store.get(f"failed/{r}").decode() for r in failed[:1]]
            except RuntimeError as error:
                raise RanksError(
                    "the store of the process group can't be reached, so its process has ended: rank 0, or torchrun.\n"
                    f"  {_GONE}"
                ) from error
        if failed:
            raise RanksError(f"rank {failed[0]} failed: {texts[0]}")
        gone = [rank for rank in self._others if silent.get(rank, 0.0) > SILENT_S]
        if gone:
            raise self._ended(gone, silent[gone[0]])

    def reason(self, error: BaseException) -> RanksError:
        """Finds the rank because of which a transfer failed: as a rule it ended, and its connections with it."""
        until = time.monotonic() + BROKEN_S
        silent: dict[int, float] = {}
        try:
            while time.monotonic() < until:
                self.look()
                time.sleep(LOOK_S)
            with self._lock:
                silent = self._silent()
        except RanksError as found:
            return found
        except RuntimeError:
            pass
        gone = [rank for rank, seconds in silent.items() if seconds > BROKEN_S - 2 * BEAT_S]
        if gone:
            return self._ended(gone, silent[gone[0]])
        return RanksError(f"a transfer between ranks failed: {type(error).__name__}: {error}\n  {_GONE}")

    def missing(self) -> Sequence[int]:
        """Ranks that have given no sign of life yet."""
        return [rank for rank in self._others if not self._store.check([f"alive/{rank}"])]

    def _silent(self) -> dict[int, float]:
        """For how many seconds each rank that was seen has given no sign of life."""
        now = time.monotonic()
        found: dict[int, float] = {}
        for rank in self._others:
            if self._store.check([f"alive/{rank}"]):
                sign = self._store.get(f"alive/{rank}")
                before = self._seen.get(rank)
                if before is None or before[0] != sign:
                    self._seen[rank] = sign, now
                found[rank] = now - self._seen[rank][1]
        return found

    def ended(self, ranks: Sequence[int]) -> RanksError:
        """Tells the others that the processes of some ranks are gone; returns the error, or what they said before."""
        try:
            self.look()
        except RanksError as found:
            return found
        for rank in ranks:
            self.announce(f"it ended.\n  {_GONE}", rank)
        names = ", ".join(map(str, ranks))
        return RanksError(f"{'rank' if len(ranks) == 1 else 'ranks'} {names} ended.\n  {_GONE}")

    def _ended(self, ranks: Sequence[int], seconds: float) -> RanksError:
        names = ", ".join(map(str, ranks))
        text = (
            f"{'rank' if len(ranks) == 1 else 'ranks'} {names} ended: no sign of life for {seconds:.0f} s.\n  {_GONE}"
        )
        for rank in ranks:
            self.announce(f"it ended, without a sign of life for {seconds:.0f} s.\n  {_GONE}", rank)
        return RanksError(text)


_GONE = "Look at the output of that process. Start all ranks again, and load the latest checkpoint."


def _end(beat: threading.Thread, stop: threading.Event) -> None:
    """Ends the thread of the signs, also when Python ends: a thread that is within the store then ends the process."""
    stop.set()
    if beat is not threading.current_thread():  # which may collect garbage, too
        beat.join(_LAST_S)


def _beat(store: Any, rank: int, stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        try:
            store.set(f"alive/{rank}", str(count))
        except RuntimeError:
            return  # the store is gone; a rank that waits finds out
        count += 1
        stop.wait(BEAT_S)


def wait_until(
    is_over: Callable[[], bool], go_on: Callable[[], object], look: Callable[[], object], poll_s: float
) -> None:
    """Returns once something of other ranks is over.

    Args:
        is_over: Asked every `poll_s` seconds; raises an error where it never will be.
        go_on: Called as often; raises an error if this rank has given up.
        look: Called every half second; raises an error if another rank can't go on.
        poll_s: How often to ask.
    """
    looked = time.monotonic()
    while not is_over():
        go_on()
        if time.monotonic() - looked > LOOK_S:
            look()
            looked = time.monotonic()
        time.sleep(poll_s)
