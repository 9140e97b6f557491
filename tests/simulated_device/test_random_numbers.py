"""Generators: a seed and an offset per device, moved when work is issued."""

from __future__ import annotations

import pytest
import torch

from tests.simulated_device.simulator import Simulator


def module():
    return torch.get_device_module("sim")


def test_a_seed_repeats_and_each_call_moves_on(sim: Simulator):
    torch.manual_seed(5)
    first, second = torch.rand(8, device="sim"), torch.rand(8, device="sim")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(8, device="sim"), first)
    assert torch.equal(torch.rand(8, device="sim"), second)
    assert not torch.equal(first, second)


def test_the_offset_moves_at_issue_and_not_when_the_kernel_runs(sim: Simulator):
    sim.order("late")
    torch.manual_seed(5)
    x = torch.rand(8, device="sim")
    state = module().get_rng_state()
    y = torch.rand(8, device="sim")
    assert sim.pending(torch.accelerator.current_stream()) > 0
    module().set_rng_state(state)
    assert torch.equal(torch.rand(8, device="sim"), y)
    assert not torch.equal(x, y)


def test_devices_and_the_host_have_generators_of_their_own(sim: Simulator):
    torch.manual_seed(5)
    states, host = module().get_rng_state_all(), torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(100, device="sim:1"))
    after = module().get_rng_state_all()
    assert torch.equal(after[0], states[0])
    assert not torch.equal(after[1], states[1])
    assert torch.equal(torch.get_rng_state(), host)
    module().set_rng_state_all(states)
    assert all(torch.equal(a, b) for a, b in zip(module().get_rng_state_all(), states, strict=True))


def test_a_generator_of_ones_own(sim: Simulator):
    generator = torch.Generator(device="sim").manual_seed(7)
    before = module().get_rng_state()
    x = torch.randn(8, device="sim", generator=generator)
    assert torch.equal(module().get_rng_state(), before)
    generator.manual_seed(7)
    assert torch.equal(torch.randn(8, device="sim", generator=generator), x)
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(8, device="sim").normal_(generator=torch.Generator())


def test_checkpoints_of_torch_keep_the_generator(sim: Simulator):
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(1000, device="sim", requires_grad=True)
    y = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    assert (x.grad == y.detach()).all()
