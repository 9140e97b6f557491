"""Every wait of the host is noted, with its kind, thread and stack."""

from __future__ import annotations

import threading

import torch

from tests.simulated_device.simulator import Simulator, Synchronization


def kinds(found: list[Synchronization]) -> list[str]:
    return [one.kind for one in found]


def test_each_kind_is_noted(sim: Simulator):
    x = torch.ones(10, device="sim")
    stream = torch.Stream(device="sim")
    host = torch.zeros(10)
    with sim.synchronizations() as found:
        stream.record_event().synchronize()
        stream.synchronize()
        torch.accelerator.synchronize()
        x.sum().item()
        host.copy_(x)
        torch.nonzero(x)
        torch.accelerator.empty_cache()
    assert kinds(found) == ["event", "stream", "device", "item", "blocking copy", "op", "allocator", "allocator"]
    assert found[5].what == "aten::nonzero"


def test_what_does_not_wait_is_not_noted(sim: Simulator):
    x = torch.ones(10, 10, device="sim", requires_grad=True)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Dropout(), torch.nn.LayerNorm(10)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with sim.synchronizations() as found:
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.accelerator.current_stream().wait_event(torch.Stream(device="sim").record_event())
    assert [str(one) for one in found] == []


def named_wait() -> None:
    torch.accelerator.synchronize()


def test_thread_and_stack_are_noted(sim: Simulator):
    with sim.synchronizations() as found:
        thread = threading.Thread(target=named_wait, name="somebody")
        thread.start()
        thread.join()
        named_wait()
    torch.accelerator.synchronize()
    assert [one.thread for one in found] == ["somebody", threading.current_thread().name]
    assert all("named_wait" in [frame.name for frame in one.stack] for one in found)
    assert __file__ in {frame.filename for frame in found[1].stack}


def test_a_wait_on_autograds_thread_is_noted(sim: Simulator):
    x = torch.ones(3, device="sim", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * grad.sum().item())
    with sim.synchronizations() as found:
        y.sum().backward()
    assert kinds(found) == ["item"]
    assert found[0].thread != threading.current_thread().name


def test_calls_are_counted(sim: Simulator):
    stream, x = torch.Stream(device="sim"), torch.zeros(3, device="sim")
    for _ in range(3):
        stream.wait_event(torch.accelerator.current_stream().record_event())
    x.record_stream(stream)
    assert (sim.count("wait"), sim.count("record"), sim.count("record_stream")) == (3, 3, 1)
    stream.synchronize()
    assert sim.count("stream") == 1
