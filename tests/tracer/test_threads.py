"""Captures watch their own thread: whatever other threads do with torch meanwhile, neither side changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from megatrain.tracer.trace import trace
from tests.models import MODELS
from tests.tracer.parity import assert_same_step, eager_step, graph_step

LIMIT_S = 60


class Meeting:
    """Lets a forward wait in its middle until another thread has done its work."""

    def __init__(self, work: Callable[[], Any]) -> None:
        # Queues: what a forward leaves in attributes and lists, or in what functions there name, is undone afterwards.
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._work.put(work)
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._errors: SimpleQueue[BaseException] = SimpleQueue()

    @property
    def results(self) -> list[Any]:
        return _held_by(self._results)

    def __deepcopy__(self, memo: Any) -> Meeting:
        return self

    def hold(self) -> None:
        thread = threading.Thread(target=self._run, name="worker")
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the other thread waits for the capture"
        if not self._errors.empty():
            raise self._errors.get()

    def _run(self) -> None:
        try:
            (work,) = _held_by(self._work)
            self._results.put(work())
        except BaseException as error:
            self._errors.put(error)


def _held_by(queue: SimpleQueue[Any]) -> list[Any]:
    found = [queue.get() for _ in range(queue.qsize())]
    for value in found:
        queue.put(value)
    return found


class Held(nn.Module):
    """A small model that meets another thread before and after its inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.meet: list[Meeting] = []

    def forward(self, x):
        h = self.first(x)
        for meeting in self.meet:
            meeting.hold()
        h = nn.functional.dropout(self.norm(h), 0.5)
        for meeting in self.meet:
            meeting.hold()
        return self.last(nn.functional.dropout(h, 0.5))


def _held(work: Callable[[nn.Module], Any]) -> tuple[Held, Meeting, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    model = Held()
    meeting = Meeting(lambda: work(model))
    model.meet.append(meeting)
    return model, meeting, (torch.randn(5, 3),)


def _loads(_: nn.Module) -> torch.Tensor:
    return torch.stack([torch.randint(0, 100, (16,)).float(), torch.randn(16)])


def test_a_capture_leaves_the_numbers_of_a_loader_alone():
    model, meeting, args = _held(_loads)
    torch.manual_seed(7)
    trace(model, args)
    after = torch.rand(3)
    assert len(meeting.results) >= 2
    torch.manual_seed(7)
    for result in meeting.results:
        assert torch.equal(result, _loads(model))
    assert torch.equal(after, torch.rand(3))


def test_two_models_captured_at_once_both_come_out_right():
    samples = [MODELS[name]() for name in ("custom_function", "random_path")]
    alone = [str(trace(*sample[:1], *sample[1:])) for sample in samples]
    barrier, found, errors = threading.Barrier(2), dict[int, Any](), list[BaseException]()

    def capture(index: int) -> None:
        model, args, kwargs = samples[index]
        try:
            barrier.wait(LIMIT_S)
            found[index] = trace(model, args, kwargs)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=capture, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors
    for index, (model, args, kwargs) in enumerate(samples):
        assert str(found[index]) == alone[index]
        assert_same_step(graph_step(found[index], model, args, kwargs), eager_step(model, args, kwargs))


@torch.library.custom_op("megatrain_tests::unsaid_noise", mutates_args=())
def unsaid_noise(x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers, which its schema doesn't say."""
    return x + torch.rand_like(x)


def test_an_operation_that_draws_without_saying_so_is_random():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(unsaid_noise(x))

    model, args = Noisy(), (torch.randn(4, 3),)
    before = torch.get_rng_state()
    traced = trace(model, args)
    assert torch.equal(torch.get_rng_state(), before)
    assert next(n.meta["is_random"] for n in traced.graph.nodes if n.op == "call_function")
    assert_same_step(graph_step(traced, model, args, {}), eager_step(model, args, {}))
