"""An operation that fails ends the step with its own error, once, and the streams work again."""

from __future__ import annotations

import threading

import pytest

from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Aborted, Chaos, Event, InjectedFailure, StreamSet
from tests.runtime.stepping import ALL, CPU, STREAMS, TIMEOUT_S, issue, nothing, run_chain, run_step, wait_until

pytestmark = pytest.mark.usefixtures("no_hang")


@pytest.mark.parametrize("label", ALL)
def test_a_failure_anywhere_surfaces_once_and_leaves_the_set_usable(streams: StreamSet, label: str):
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


@pytest.mark.parametrize("label", ["W0", "W3", "G0", "G3", "F0", "F2", "U1"])
def test_begin_and_finish_by_hand_do_the_same(label: str):
    streams = StreamSet(CPU, chaos=Chaos(max_delay_s=0.0, fail=label))
    for _ in range(3):
        log: list[str] = []
        streams.begin()
        try:
            run_chain(streams, log)
        except (Aborted, InjectedFailure):
            pass
        with pytest.raises((ExecuteError, InjectedFailure), match=f"{label} fail"):
            streams.finish()
        assert label not in log
    streams.close()


def test_the_first_failure_is_kept(streams: StreamSet):
    first = threading.Event()

    def fail(error: Exception, after: threading.Event | None = None) -> None:
        if after is None:
            first.set()
        else:
            after.wait(TIMEOUT_S)
            wait_until(lambda: streams.failure is not None)
        raise error

    streams.begin()
    issue(streams, "d2h", "G1", lambda: fail(KeyError("second"), first))
    issue(streams, "h2d", "W1", lambda: fail(ValueError("first")))
    with pytest.raises(ExecuteError, match=r"^h2d:W1 failed: ValueError: first$"):
        streams.finish()


def test_what_is_queued_behind_a_failure_is_dropped(streams: StreamSet):
    log: list[str] = []
    go = threading.Event()

    def fail() -> None:
        go.wait(TIMEOUT_S)
        raise ValueError

    streams.begin()
    bad = issue(streams, "h2d", "W0", fail)
    dropped = [issue(streams, "h2d", "W1", lambda: log.append("W1"))]
    dropped += [issue(streams, "d2h", "G0", lambda: log.append("G0"), (bad,))]
    dropped += [issue(streams, "d2h", "G1", lambda: log.append("G1"))]
    go.set()
    with pytest.raises(ExecuteError, match=r"^h2d:W0 failed: ValueError$"):
        streams.finish()
    assert log == []
    assert all(event.host_done and event.has_failed for event in (bad, *dropped))


def test_an_aborted_step_takes_no_more_compute(streams: StreamSet):
    streams.begin()
    issue(streams, "h2d", "W0", lambda: 1 / 0)
    wait_until(lambda: streams.failure is not None)
    with pytest.raises(Aborted):
        issue(streams, "compute", "F0", lambda: pytest.fail("ran"))
    issue(streams, "d2h", "G0", lambda: pytest.fail("ran"))
    with pytest.raises(ExecuteError, match="h2d:W0 failed: ZeroDivisionError: division by zero"):
        streams.finish()


def test_what_compute_raises_passes_unharmed_and_frees_the_others(streams: StreamSet):
    error = RuntimeError("the user's own")

    def fail() -> None:
        raise error

    never = Event("F1")

    def body() -> None:
        issue(streams, "d2h", "G1", nothing, (never,))
        issue(streams, "compute", "F0", fail)

    with pytest.raises(RuntimeError) as caught:
        run_step(streams, body)
    assert caught.value is error
    assert error.__cause__ is None


def test_finish_raises_what_compute_raised_even_if_swallowed(streams: StreamSet):
    error = RuntimeError("swallowed")

    def fail() -> None:
        raise error

    streams.begin()
    with pytest.raises(RuntimeError):
        issue(streams, "compute", "F0", fail)
    with pytest.raises(RuntimeError) as caught:
        streams.finish()
    assert caught.value is error


def test_the_body_of_a_step_may_raise(streams: StreamSet):
    never = Event("F9")

    def body() -> None:
        issue(streams, "d2h", "G1", nothing, (never,))
        raise LookupError("in between")

    with pytest.raises(LookupError, match="in between"):
        run_step(streams, body)
    with streams.step():
        run_chain(streams, [])


def test_a_transfers_failure_is_told_before_what_the_caller_raises_after_it(streams: StreamSet):
    def body() -> None:
        issue(streams, "h2d", "W0", lambda: 1 / 0)
        wait_until(lambda: streams.failure is not None)
        raise LookupError("a consequence")

    with pytest.raises(ExecuteError, match="h2d:W0 failed"):
        run_step(streams, body)


def test_abort_ends_all_waits(streams: StreamSet):
    streams.begin()
    asleep = [issue(streams, name, "X", nothing, (Event("never"),)) for name in ("h2d", "d2h", "host")]
    streams.abort(LookupError("given up"))
    with pytest.raises(LookupError, match="given up"):
        streams.finish()
    assert all(event.has_failed for event in asleep)


def test_begin_drops_an_abandoned_step(streams: StreamSet):
    streams.begin()
    issue(streams, "h2d", "W0", nothing, (Event("never"),))
    issue(streams, "d2h", "G0", lambda: 1 / 0)
    log: list[str] = []
    with streams.step():
        run_chain(streams, log)
    assert sorted(log) == sorted(ALL)


def test_even_system_exit_leaves_the_thread_alive(streams: StreamSet):
    for error in (SystemExit("no"), KeyboardInterrupt(), GeneratorExit()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(ExecuteError, match=f"h2d:W0 failed: {type(error).__name__}"), streams.step():
            issue(streams, "h2d", "W0", fail)
    with streams.step():
        run_chain(streams, [])


def test_a_device_that_cant_be_entered_fails_the_first_operation(streams: StreamSet, monkeypatch: pytest.MonkeyPatch):
    def refuse(stream: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(streams.device, "enter", refuse)
    monkeypatch.setattr(streams.h2d._lane, "device_stream", object())
    issue(streams, "h2d", "W0", nothing)
    with pytest.raises(ExecuteError, match="h2d:W0 failed: RuntimeError: no such device"):
        streams.finish()
    monkeypatch.setattr(streams.h2d._lane, "device_stream", None)
