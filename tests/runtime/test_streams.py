"""Streams: failures surface once, waits that can't end are errors, no thread outlives its owner; and
what streams ask of an accelerator, against a fake one that logs."""

from __future__ import annotations

import gc
import signal
import threading

import pytest
import torch

from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import (
    Chaos,
    Event,
    InjectedFailure,
    StreamSet,
    StreamThread,
)
from tests.runtime.stepping import ALL, CPU, STREAMS, TIMEOUT_S, issue, nothing, run_chain, run_step, wait_until

pytestmark = pytest.mark.usefixtures("no_hang")


def test_a_stream_runs_in_order_on_one_thread_of_its_own_without_gradients():
    stream = StreamThread("h2d", CPU)
    seen: list[tuple[int, str, bool]] = []
    events = [Event(str(i)) for i in range(50)]
    for i, event in enumerate(events):
        work = lambda i=i: seen.append((i, threading.current_thread().name, torch.is_grad_enabled()))  # noqa: E731
        stream.submit(str(i), work, (), event)
    wait_until(lambda: all(event.host_done for event in events))
    assert seen == [(i, "megatrain-h2d", False) for i in range(50)]
    assert torch.is_grad_enabled()
    stream.close()


@pytest.mark.parametrize("label", ["W0", "W3", "F1", "G3", "U0", "U2"])
def test_a_failure_anywhere_surfaces_once_and_leaves_the_set_usable(label: str):
    stream = dict(zip("WFGU", STREAMS, strict=True))[label[0]]
    broken = StreamSet(CPU, chaos=Chaos(max_delay_s=0.0002, fail=f"{stream}:{label}"))
    log: list[str] = []
    with pytest.raises((ExecuteError, InjectedFailure)) as caught, broken.step():
        run_chain(broken, log)
    assert label not in log
    if stream == "compute":
        assert type(caught.value) is InjectedFailure
    else:
        assert str(caught.value) == (f"{stream}:{label} failed: InjectedFailure: chaos made {stream}:{label} fail")
        assert type(caught.value.__cause__) is InjectedFailure
    assert broken.failure is None
    broken.finish()
    log.clear()
    with broken.step():
        issue(broken, "h2d", "other", lambda: log.append("other"))
    assert log == ["other"]
    broken.close()


def interrupt_asleep(streams: StreamSet, go: threading.Event) -> threading.Thread:
    """Interrupts the main thread once it sleeps; opens `go` when the step has been aborted for it."""

    def work() -> None:
        step = streams._steps.current
        wait_until(lambda: "compute" in step._asleep)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        wait_until(lambda: step.failure is not None)
        go.set()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("place", ["compute", "finish"])
def test_an_interrupt_in_a_wait_leaves_the_set_usable(streams: StreamSet, place: str):
    for _ in range(3):
        go, begun = threading.Event(), threading.Event()
        dropped: list[Event] = []

        def body(go: threading.Event = go, begun: threading.Event = begun, dropped: list[Event] = dropped) -> None:
            slow = issue(streams, "h2d", "W0", lambda: (begun.set(), go.wait(TIMEOUT_S)))
            assert begun.wait(TIMEOUT_S)  # an operation that the interrupt finds in the queue would be dropped
            dropped.append(issue(streams, "h2d", "W1", nothing))
            thread = interrupt_asleep(streams, go)
            if place == "compute":
                issue(streams, "compute", "F0", nothing, (slow,))
            assert place == "finish", thread

        with pytest.raises(KeyboardInterrupt):
            run_step(streams, body)
        assert go.is_set()
        assert dropped[0].has_failed
        log: list[str] = []
        with streams.step():
            run_chain(streams, log)
        assert sorted(log) == sorted(ALL)


@pytest.mark.parametrize("ending", ["close", "cycle", "fail"])
def test_no_thread_outlives_its_owner(ending: str):
    gc.collect()
    before = set(threading.enumerate())  # some may be of an earlier test, and about to end

    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    for _ in range(20):
        streams = StreamSet(CPU)
        if ending == "cycle":
            streams.itself = streams  # type: ignore[attr-defined]
        if ending == "fail":
            issue(streams, "d2h", "G0", lambda: 1 / 0)
            with pytest.raises(ExecuteError):
                streams.finish()
        with streams.step():
            for name in STREAMS:
                issue(streams, name, "X", nothing)
        if ending == "close":
            streams.close()
    del streams
    gc.collect()
    if ending == "close":
        assert not started()
    wait_until(lambda: not started())
