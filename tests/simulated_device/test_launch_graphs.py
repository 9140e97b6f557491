"""Recordings of the simulated device behave as CUDA graphs."""

from __future__ import annotations

import gc

import pytest
import torch

from megatrain.device import LaunchGraphs, find
from tests.simulated_device.simulator import Simulator

DEVICE = "sim"


@pytest.fixture
def graphs(sim: Simulator) -> LaunchGraphs:
    del sim
    return find(DEVICE).launch_graphs()


def test_recorded_work_runs_at_each_launch_and_not_before(graphs: LaunchGraphs):
    x, y = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    launch = graphs.record(lambda: y.add_(x))
    assert y.cpu().tolist() == [0.0] * 4
    for number in range(1, 4):
        launch()
        assert y.cpu().tolist() == [float(number)] * 4
    x.fill_(10.0)
    launch()
    assert y.cpu().tolist() == [13.0] * 4


def test_its_memory_is_nobody_elses_and_its_results_stay_readable(graphs: LaunchGraphs):
    x = torch.ones(1000, device=DEVICE)
    made: list[torch.Tensor] = []
    launch = graphs.record(lambda: made.append(x * 2 + 1))
    address, nbytes = made[0].data_ptr(), made[0].untyped_storage().nbytes()
    made.clear()
    others = [torch.zeros(1000, device=DEVICE) for _ in range(50)]
    torch.accelerator.empty_cache()
    assert all(not address <= t.data_ptr() < address + nbytes for t in others)
    launch()
    found = graphs.memory(address, nbytes).view(torch.float32)
    assert torch.equal(found.cpu(), torch.full((1000,), 3.0))
    assert all(not t.cpu().any() for t in others)


def test_freed_memory_is_poisoned_in_each_run(graphs: LaunchGraphs):
    x = torch.ones(1000, device=DEVICE)
    addresses: list[int] = []

    def work() -> None:
        addresses.append((x * 2).data_ptr())  # freed at once

    graphs.record(work)()
    assert graphs.memory(addresses[0], 4000).view(torch.float32).isnan().all()


def test_random_numbers_are_those_of_the_moment_of_the_launch(graphs: LaunchGraphs):
    x = torch.zeros(100, device=DEVICE)
    before = torch.get_device_module(DEVICE).get_rng_state(DEVICE)
    launch = graphs.record(lambda: x.uniform_())
    assert torch.equal(before, torch.get_device_module(DEVICE).get_rng_state(DEVICE))
    torch.manual_seed(5)
    wanted = [torch.rand(100, device=DEVICE).cpu() for _ in range(3)]
    torch.manual_seed(5)
    for numbers in wanted:
        launch()
        assert torch.equal(x.cpu(), numbers)


@pytest.mark.parametrize("what", ["item", "copy", "size", "synchronize"])
def test_work_that_waits_is_refused_and_the_stream_goes_on(graphs: LaunchGraphs, what: str):
    x, y = torch.ones(40_000, device=DEVICE), torch.zeros(4, device=DEVICE)
    works = {
        "item": lambda: x.sum().item(),
        "copy": lambda: x.copy_(torch.zeros(40_000)),
        "size": lambda: x[x > 0],
        "synchronize": lambda: torch.accelerator.current_stream().synchronize(),
    }
    with pytest.raises(RuntimeError, match="recorded"):
        graphs.record(works[what])
    graphs.record(lambda: y.add_(1))()
    assert y.cpu().tolist() == [1.0] * 4
    assert x.cpu().sum() == 40_000


def test_its_memory_is_given_back_with_it(sim: Simulator):
    sim.configure(segments=False)
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    graphs = find(DEVICE).launch_graphs()
    x = torch.ones(1000, device=DEVICE)
    launch = graphs.record(lambda: x * 2)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() > before + 4096
    del graphs, launch
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= before + 4096  # x
