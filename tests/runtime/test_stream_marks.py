"""What streams ask of an accelerator, against a fake one that logs: no GPU needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from megatrain.device import Cuda
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import StreamSet
from tests.runtime.stepping import issue, nothing

LOG: list[tuple[str, ...]] = []


@dataclass
class FakeMark:
    name: str

    def wait(self) -> None:
        LOG.append(("sync mark", self.name))


@dataclass
class FakeStream:
    name: str
    num_marks: int = field(default=0)

    def record_event(self) -> FakeMark:
        self.num_marks += 1
        LOG.append(("record", f"{self.name}{self.num_marks}"))
        return FakeMark(f"{self.name}{self.num_marks}")

    def wait_event(self, mark: FakeMark) -> None:
        LOG.append((f"{self.name} waits", mark.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, no_hang: None) -> Iterator[StreamSet]:
    names = iter(["h", "d"])
    compute = FakeStream("c")

    def enter(stream: FakeStream) -> None:
        LOG.append(("enter", stream.name, threading.current_thread().name))

    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(next(names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_stream", enter)
    monkeypatch.setattr(Cuda, "wait_for", lambda device, mark: mark.wait())
    monkeypatch.setattr(Cuda, "settle", lambda device: LOG.append(("sync", "device")))
    LOG.clear()
    found = StreamSet(Cuda())
    assert str(found.device) == "cuda:0"
    yield found
    found.close()


def after_begin() -> list[tuple[str, ...]]:
    assert LOG[:3] == [("record", "c1"), ("h waits", "c1"), ("d waits", "c1")]
    return LOG[3:]


def test_marks_follow_the_waits_and_transfers_are_complete_at_the_end(streams: StreamSet):
    with streams.step():
        w = issue(streams, "h2d", "W0", nothing)
        f = issue(streams, "compute", "F0", nothing, (w,))
        g = issue(streams, "d2h", "G0", nothing, (f,))
        issue(streams, "host", "U0", nothing, (g,))
    assert after_begin() == [
        ("enter", "h", "megatrain-h2d"),
        ("record", "h1"),
        ("c waits", "h1"),
        ("record", "c2"),
        # A thread enters its stream with the first work: waits name their stream anyway.
        ("d waits", "c2"),
        ("enter", "d", "megatrain-d2h"),
        ("record", "d1"),
        ("sync mark", "d1"),
        ("record", "h2"),
        ("c waits", "h2"),
        ("record", "d2"),
        ("c waits", "d2"),
        ("record", "c3"),
        ("sync mark", "h2"),
        ("sync mark", "d2"),
    ]


def test_a_step_comes_after_the_step_before_on_whatever_stream(streams: StreamSet):
    with streams.step(waits_for=["h2d"]):
        issue(streams, "compute", "F0", nothing)
    LOG.clear()
    with streams.step(waits_for=["h2d"]):
        issue(streams, "compute", "F0", nothing)
    assert LOG[:4] == [("c waits", "c3"), ("record", "c4"), ("h waits", "c4"), ("d waits", "c4")]


def test_after_a_failure_the_device_comes_to_rest(streams: StreamSet):
    issue(streams, "h2d", "W0", lambda: 1 / 0)
    with pytest.raises(ExecuteError, match="h2d:W0 failed"):
        streams.finish()
    assert LOG[-1] == ("sync", "device")
