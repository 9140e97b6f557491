"""Two devices in one process: the current one of each thread, streams, and copies between them."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.simulated_device.simulator import Simulator


def test_torch_knows_both():
    assert torch.accelerator.device_count() == 2
    assert str(torch.accelerator.current_accelerator()) == "sim"
    assert torch.device("sim", 1) == torch.zeros(1, device="sim:1").device


def test_each_thread_has_a_current_device():
    torch.accelerator.set_device_index(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    try:
        assert torch.zeros(1, device="sim").device.index == 1
        assert seen == [0]
    finally:
        torch.accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.accelerator.set_device_index(2)


def test_streams_belong_to_a_device(sim: Simulator):
    sim.order("late")
    torch.zeros(4, device="sim:1").add_(1)
    assert sim.pending(torch.accelerator.current_stream(torch.device("sim:0"))) == 0
    assert sim.pending(torch.accelerator.current_stream(torch.device("sim:1"))) > 0
    torch.accelerator.synchronize(0)
    assert sim.pending(torch.accelerator.current_stream(torch.device("sim:1"))) > 0
    torch.accelerator.synchronize(1)
    assert sim.pending(torch.accelerator.current_stream(torch.device("sim:1"))) == 0


def test_a_copy_between_devices_waits_on_both(sim: Simulator):
    sim.order("late")
    x = torch.ones(100, device="sim:0") * 3
    y = torch.zeros(100, device="sim:1")
    y.copy_(x, non_blocking=True)
    x.fill_(9)
    assert (y + 0).sum().item() == 300
    assert x.to("sim:1").sum().item() == 900


def test_an_op_on_both_is_refused():
    with pytest.raises(RuntimeError, match="at least two devices, sim:0 and sim:1"):
        torch.add(torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1"))
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.add(torch.ones(2, device="sim:0"), torch.ones(2))


def test_events_order_streams_of_two_devices(sim: Simulator):
    sim.order("late")
    x = torch.zeros(10, device="sim:0")
    x.add_(4)
    host = torch.zeros(10).pin_memory()
    event = torch.accelerator.current_stream(torch.device("sim:0")).record_event()
    other = torch.accelerator.current_stream(torch.device("sim:1"))
    other.wait_event(event)
    other.synchronize()
    assert sim.pending(torch.accelerator.current_stream(torch.device("sim:0"))) == 0
    host.copy_(x, non_blocking=True)
    torch.accelerator.synchronize(0)
    assert host[0] == 4
