"""Streams run what is submitted: in order, beside each other, and as recorded; chaos changes no result."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch

from megatrain.runtime.streams.stream_set import (
    Chaos,
    ComputeStream,
    Event,
    InjectedFailure,
    Recording,
    StreamSet,
    StreamThread,
)
from tests.runtime.stepping import ALL, CPU, TIMEOUT_S, issue, nothing, run_chain, wait_until

pytestmark = pytest.mark.usefixtures("no_hang")


# -- order ------------------------------------------------------------------------------------------------


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


def test_compute_runs_at_once_on_the_callers_thread():
    compute, done, seen = ComputeStream(CPU), Event("F0"), []
    compute.run("F0", lambda: seen.append((threading.current_thread(), torch.is_grad_enabled())), (), done)
    assert seen == [(threading.current_thread(), True)]
    assert done.host_done


def test_a_thread_starts_with_the_first_operation():
    before = threading.active_count()
    stream = StreamThread("d2h", CPU)
    assert threading.active_count() == before
    stream.close()
    stream.submit("A", nothing, (), done := Event("A"))
    wait_until(lambda: done.host_done)
    assert threading.active_count() == before + 1
    stream.close()
    stream.close()
    assert threading.active_count() == before


def test_closing_runs_what_is_queued_and_a_closed_stream_starts_again():
    stream, seen = StreamThread("d2h", CPU), []
    for turn in range(3):
        for i in range(5):
            stream.submit("A", lambda i=i, turn=turn: seen.append((turn, i)), (), Event())
        stream.close()
    assert seen == [(turn, i) for turn in range(3) for i in range(5)]


@pytest.mark.parametrize("seed", range(4))
def test_waits_hold_whatever_the_delays(seed: int):
    streams = StreamSet(CPU, chaos=Chaos(seed, max_delay_s=0.0005))
    for _ in range(3):
        log: list[str] = []
        with streams.step():
            run_chain(streams, log)
        assert sorted(log) == sorted(ALL)
        at = {label: log.index(label) for label in ALL}
        for block in range(4):
            assert at[f"W{block}"] < at[f"F{block}"] < at[f"G{block}"] < at[f"U{block}"]
            assert block < 2 or at[f"F{block - 2}"] < at[f"W{block}"]
    streams.close()


def test_streams_run_at_the_same_time(streams: StreamSet):
    # Each waits inside its work for the other: one thread could not do it.
    here, there = threading.Event(), threading.Event()
    streams.begin()
    issue(streams, "h2d", "W0", lambda: (here.set(), there.wait(TIMEOUT_S)))
    issue(streams, "d2h", "G0", lambda: (there.set(), here.wait(TIMEOUT_S)))
    streams.finish()


def test_steps_need_not_begin(streams: StreamSet):
    log: list[str] = []
    run_chain(streams, log)
    streams.finish()
    streams.finish()
    assert sorted(log) == sorted(ALL)


# -- chaos and recording ----------------------------------------------------------------------------------


def test_a_recording_tells_what_ran_and_what_it_waited_for():
    recording = Recording()
    streams = StreamSet(CPU, recording=recording, chaos=Chaos(3, max_delay_s=0.0005))
    texts = set()
    for _ in range(3):
        recording.clear()
        with streams.step():
            run_chain(streams, [], num_blocks=3)
        texts.add(str(recording))
        completed = [label for _, label in recording.completed]
        assert sorted(completed) == sorted(op.label for op in recording.issued)
        assert completed.index("W1") < completed.index("F1") < completed.index("G1")
    assert texts == {
        "h2d: W0; W1; W2 <- F0\n"
        "compute: F0 <- W0; F1 <- W1; F2 <- W2\n"
        "d2h: G0 <- F0; G1 <- F1; G2 <- F2\n"
        "host: U0 <- G0; U1 <- G1; U2 <- G2"
    }
    assert recording.labels("d2h") == ("G0", "G1", "G2")
    assert recording.on("h2d")[2].waits == ("F0",)
    streams.close()


def test_a_recording_has_no_dropped_operations():
    recording = Recording()
    streams = StreamSet(CPU, recording=recording, chaos=Chaos(max_delay_s=0, fail="F1"))
    with pytest.raises(InjectedFailure), streams.step():
        run_chain(streams, [])
    assert recording.labels("compute") == ("F0", "F1")
    assert ("compute", "F1") not in recording.completed
    assert "G1" not in recording.labels("d2h")
    streams.close()


def test_chaos_delays_repeat_with_the_seed_and_touch_no_global_generator(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    state, torch_state = random.getstate(), torch.get_rng_state()

    def draws(seed: int, stream: str) -> list[float]:
        slept.clear()
        delay = Chaos(seed).delay(stream)
        assert delay is not None
        for _ in range(5):
            delay()
        return list(slept)

    assert draws(1, "h2d") == draws(1, "h2d")
    assert draws(1, "h2d") != draws(1, "d2h")
    assert draws(1, "h2d") != draws(2, "h2d")
    assert all(0 <= s <= 0.002 for s in draws(1, "h2d"))
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_chaos_can_slow_one_stream():
    chaos = Chaos(slow="d2h", max_delay_s=0.02)
    assert chaos.delay("h2d") is None
    streams = StreamSet(CPU, chaos=chaos)
    start = time.perf_counter()
    with streams.step():
        issue(streams, "d2h", "G0", nothing)
    assert time.perf_counter() - start >= 0.04
    streams.close()


@pytest.mark.parametrize(("fail", "strikes"), [("G3", True), ("d2h:G3", True), ("h2d:G3", False), (None, False)])
def test_chaos_names_an_operation_with_or_without_its_stream(fail: str | None, strikes: bool):
    assert Chaos(fail=fail).strikes("d2h", "G3") is strikes


# -- cost -------------------------------------------------------------------------------------------------


def test_an_operation_costs_tens_of_microseconds(streams: StreamSet):
    num_ops = 500
    best = min(_seconds_per_op(streams, num_ops) for _ in range(5))
    # Some 10 us; the bound only catches an accident, such as polling, on a loaded machine.
    assert best < 500e-6


def _seconds_per_op(streams: StreamSet, num_ops: int) -> float:
    start = time.perf_counter()
    with streams.step():
        last: tuple[Event, ...] = ()
        for i, name in zip(range(num_ops), itertools.cycle(("h2d", "compute", "d2h")), strict=False):
            last = (issue(streams, name, str(i), nothing, last),)
    return (time.perf_counter() - start) / num_ops
