"""Streams run in the order that the test chooses, within what waits allow."""

from __future__ import annotations

import itertools
import threading
import traceback

import pytest
import torch

from tests.simulated_device.simulator import Simulator

ORDERS = ["early", "late", "seeded"]


def new_stream() -> torch.Stream:
    return torch.Stream(device="sim")


def default_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


def locked(value: float, size: int = 10) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def copied_on(stream: torch.Stream, out: torch.Tensor, source: torch.Tensor) -> None:
    with torch.get_device_module("sim").stream(stream):
        out.copy_(source, non_blocking=True)


def sum_after_copy(*, waits: bool, synchronizes: bool = False) -> float:
    """Copies on a side stream and sums on the default one."""
    side, out = new_stream(), torch.zeros(10, device="sim")
    torch.accelerator.synchronize()
    copied_on(side, out, locked(1))
    if waits:
        default_stream().wait_event(side.record_event())
    if synchronizes:
        side.synchronize()
    return out.sum().item()


@pytest.mark.parametrize("order", ORDERS)
def test_a_wait_gives_the_right_numbers_in_any_order(sim: Simulator, order):
    sim.order(order, seed=3)
    assert sum_after_copy(waits=True) == 10
    assert sum_after_copy(waits=False, synchronizes=True) == 10


def test_a_missing_wait_gives_wrong_numbers_late_and_right_ones_early(sim: Simulator):
    assert sum_after_copy(waits=False) == 10
    sim.order("late")
    assert sum_after_copy(waits=False) == 0


def test_a_missing_wait_is_seen_with_just_its_stream_late(sim: Simulator):
    side, out = new_stream(), torch.zeros(10, device="sim")
    sim.order("late", side)
    copied_on(side, out, locked(1))
    assert (sim.pending(side), sim.pending(default_stream())) == (1, 0)
    assert out.sum().item() == 0
    assert sim.pending(side) == 1
    side.synchronize()
    assert out.sum().item() == 10


def test_all_streams_but_the_default_are_late(sim: Simulator):
    sim.late_but_default()
    side, out = new_stream(), torch.zeros(10, device="sim")
    out.add_(1)
    assert sim.pending(default_stream()) == 0
    copied_on(side, out, locked(5))
    assert sim.pending(side) == 1


def test_an_early_stream_that_waits_for_a_late_one_goes_on_when_that_has_run(sim: Simulator):
    side, out, early = new_stream(), torch.zeros(10, device="sim"), new_stream()
    sim.order("late", side)
    copied_on(side, out, locked(2))
    early.wait_event(side.record_event())
    host = torch.zeros(10).pin_memory()
    with torch.get_device_module("sim").stream(early):
        host.copy_(out, non_blocking=True)
    assert host[0] == 0
    side.synchronize()
    assert host[0] == 2
    assert sim.pending(early) == 0


def test_a_dropped_wait_is_a_missing_wait(sim: Simulator):
    sim.order("late")
    sim.drop("wait", 0)
    assert sum_after_copy(waits=True) == 0
    assert sum_after_copy(waits=True) == 10
    assert sim.count("wait") == 2
    sim.drop("stream", 0)
    assert sum_after_copy(waits=False, synchronizes=True) == 0


def test_a_wait_can_be_dropped_by_the_place_that_calls_it(sim: Simulator):
    sim.order("late")

    def is_here(stack: traceback.StackSummary) -> bool:
        return any(frame.name == "sum_after_copy" for frame in stack)

    sim.drop_where("wait", is_here)
    assert sum_after_copy(waits=True) == 0
    sim.reset()
    sim.order("late")
    assert sum_after_copy(waits=True) == 10


def progress(sim: Simulator, seed: int) -> list[int]:
    """How much of two streams' work is left after each issue."""
    sim.order("early")
    torch.accelerator.synchronize()
    streams = [new_stream(), new_stream()]
    sim.order("seeded", seed=seed)
    for stream in streams:
        # The pool hands out other streams each time, whose dice differ.
        sim.order("seeded", stream, seed=seed)
    out, source = torch.zeros(2, 10, device="sim"), locked(1)
    seen: list[int] = []
    for turn in range(30):
        copied_on(streams[turn % 2], out[turn % 2], source)
        seen.append(sim.pending(streams[turn % 2]))
    return seen


def test_a_seeded_order_repeats_and_differs_from_others(sim: Simulator):
    while new_stream().stream_id != 32:
        pass
    first = progress(sim, 1)
    while new_stream().stream_id != 32:
        pass
    assert progress(sim, 1) == first
    while new_stream().stream_id != 32:
        pass
    assert progress(sim, 2) != first
    assert max(first) > 1


def pipeline() -> torch.Tensor:
    """Work on three streams with all waits that it needs."""
    h2d, d2h, compute = new_stream(), new_stream(), default_stream()
    slots, results = torch.zeros(2, 100, device="sim"), torch.zeros(6, 100).pin_memory()
    sources = [locked(float(i + 1), 100) for i in range(6)]
    free = [compute.record_event()] * 2
    for i, source in enumerate(sources):
        h2d.wait_event(free[i % 2])
        copied_on(h2d, slots[i % 2], source)
        compute.wait_event(h2d.record_event())
        value = slots[i % 2] * 2
        free[i % 2] = compute.record_event()
        d2h.wait_event(free[i % 2])
        value.record_stream(d2h)
        copied_on(d2h, results[i], value)
    d2h.synchronize()
    return results[:, 0].clone()


def test_every_subset_of_late_streams_gives_the_same_numbers(sim: Simulator):
    expected = torch.arange(1.0, 7) * 2
    while new_stream().stream_id != 32:
        pass
    for late in itertools.product([False, True], repeat=3):
        sim.order("early")
        while (stream := new_stream()).stream_id != 32:
            pass
        chosen = [s for s, is_late in zip(later_streams(stream), late, strict=True) if is_late]
        if chosen:
            sim.order("late", *chosen)
        assert torch.equal(pipeline(), expected)
    for seed in range(10):
        sim.order("seeded", seed=seed)
        assert torch.equal(pipeline(), expected)


def later_streams(last: torch.Stream) -> list[torch.Stream]:
    """The default stream and the next two of the pool."""
    device = last.device_index
    pooled = [torch.Stream(stream_id=i, device_index=device, device_type=last.device_type) for i in (1, 2)]  # type: ignore[call-overload]
    return [default_stream(), *pooled]


def test_a_loop_over_queries_ends(sim: Simulator):
    sim.order("late")
    side, out = new_stream(), torch.zeros(10, device="sim")
    copied_on(side, out, locked(1))
    event = side.record_event()
    asked = 0
    while not event.query():
        asked += 1
    assert 0 < asked < 10
    assert side.query()


def test_an_error_of_a_kernel_is_raised_when_the_host_waits(sim: Simulator):
    table = torch.zeros(4, 2, device="sim")
    index = torch.tensor([9], device="sim")
    torch.nn.functional.embedding(index, table)
    with pytest.raises(RuntimeError, match=r"asynchronous error in aten::.*index"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_kernels_run_below_the_modes_of_the_thread_that_waits(sim: Simulator):
    sim.order("late")
    x = torch.ones(4, 4, device="sim", requires_grad=True)
    y = (x @ x).sum()
    with torch.inference_mode(), torch.autocast("sim", dtype=torch.bfloat16):
        torch.accelerator.synchronize()
    y.backward()
    assert x.grad.sum().item() == 128


def test_autograd_has_a_thread_of_its_own(sim: Simulator):
    threads: list[str] = []
    x = torch.ones(3, device="sim", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.current_thread().name))
    y.sum().backward()
    assert threads != [threading.current_thread().name]


def test_backward_runs_on_the_stream_of_forward(sim: Simulator):
    sim.order("late")
    side, x = new_stream(), torch.ones(3, device="sim", requires_grad=True)
    torch.accelerator.synchronize()
    with torch.get_device_module("sim").stream(side):
        y = (x * 2).sum()
    before = sim.pending(side)
    y.backward()
    assert sim.pending(side) > before
    assert x.grad.sum().item() == 6


def test_many_threads_issue_and_wait_without_deadlock(sim: Simulator):
    sim.order("late")
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            side = new_stream()
            torch.accelerator.set_stream(side)
            for turn in range(50):
                x = torch.full((64,), float(index), device="sim")
                event = side.record_event()
                default = torch.accelerator.current_stream()
                default.wait_event(event)
                event.synchronize()
                assert (x + turn).sum().item() == 64 * (index + turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
