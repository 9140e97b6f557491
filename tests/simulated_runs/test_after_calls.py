"""What may happen once a call has returned: writes of the host, other streams, other shapes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import megatrain
from tests.simulated_device import Simulator
from tests.simulated_runs.on_device import DEVICE, choose, compiled_copy, eager_copy

ORDERS = ["early", "late", "seeded"]


class Chain(nn.Module):
    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x


def chain(**options: object) -> tuple[megatrain.CompiledModule, nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Chain()
    return *compiled_copy(model, block_bytes=1, **options), eager_copy(model)


@pytest.mark.parametrize("order", ORDERS)
def test_a_write_into_weights_after_a_forward_comes_after_the_forward(sim: Simulator, order):
    compiled, model, eager = chain()
    sim.order(order)
    for number in range(3):
        x = torch.randn(4, 32).to(DEVICE)
        with torch.no_grad():
            found, expected = compiled(x), eager(x)
            for parameter in (*model.parameters(), *eager.parameters()):
                parameter.mul_(-2)
        assert torch.equal(found.cpu(), expected.cpu()), number


@pytest.mark.parametrize("order", ORDERS)
def test_calls_on_streams_that_the_caller_has_not_ordered(sim: Simulator, order):
    """The weights change between the calls: slots that a later call fills too early hold other ones."""
    compiled, model, eager = chain()
    module = torch.get_device_module(DEVICE)
    inputs = [torch.randn(4, 32).to(DEVICE) for _ in range(4)]
    expected, found = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for x in inputs:
            expected.append(eager(x).cpu())
            for parameter in eager.parameters():
                parameter.mul_(-2)
        torch.accelerator.synchronize()
        sim.order(order)
        for number, x in enumerate(inputs):
            # Allocated on streams of their own, as eager's are.
            with module.stream(torch.Stream(device=DEVICE) if number % 2 else None):
                found.append(compiled(x))
            for parameter in model.parameters():
                parameter.mul_(-2)
    torch.accelerator.synchronize()
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right.cpu())


@pytest.mark.parametrize("order", [*ORDERS, "late but compute"])
def test_an_arena_that_grows_while_another_stream_reads_it_takes_nothing_from_that_stream(sim: Simulator, order: str):
    """Its memory goes back to the stream that allocated it, and is used there at once."""
    compiled, _, eager = chain()
    module, engine, x = torch.get_device_module(DEVICE), compiled.megatrain.engine, torch.randn(4, 32).to(DEVICE)
    with torch.no_grad():
        expected = eager(x).cpu()
        compiled(x)
        torch.accelerator.synchronize()
        choose(sim, order)
        with module.stream(torch.Stream(device=DEVICE)):
            found = compiled(x)
        nbytes = engine.arena.nbytes
        engine.reserve_slots(2 * nbytes, 2 * nbytes)
        filler = [torch.full((nbytes // 4,), float("nan"), device=DEVICE) for _ in range(4)]
    assert engine.arena.nbytes == 2 * nbytes
    torch.accelerator.synchronize()
    assert torch.equal(expected, found.cpu())
    assert all(t.isnan().all() for t in filler)


def test_a_call_blocks_on_the_host_only_for_what_reads_its_memory(sim: Simulator):
    compiled, _, _ = chain()
    x = torch.randn(4, 32).to(DEVICE)
    with torch.no_grad():
        compiled(x)
        sim.order("late")
        with sim.synchronizations() as found:
            compiled(x)
    assert [(one.kind, one.thread) for one in found] == [("event", "MainThread")]


def test_old_arenas_go(sim: Simulator):
    compiled, _, _ = chain()
    x = torch.randn(4, 32).to(DEVICE)
    with torch.no_grad():
        compiled(x)
    arena = compiled.megatrain.engine.arena
    more = 2 * arena.nbytes
    gc.collect()
    expected = torch.accelerator.memory_allocated() + more - arena.nbytes
    arena.resize(more)
    assert abs(torch.accelerator.memory_allocated() - expected) <= 512  # of rounding


@pytest.mark.parametrize("order", ORDERS)
def test_memory_of_weights_that_somebody_holds_is_left_or_used_in_place(sim: Simulator, order):
    """A vector from before, and tensors that are held afterwards: copies pass through a ring."""
    compiled, model, eager = chain()
    held: list[list[torch.Tensor]] = []
    for each in (model, eager):
        vector = nn.utils.parameters_to_vector(each.parameters()).detach().cpu()
        if each is model:
            nn.utils.vector_to_parameters(vector, each.parameters())
        held.append([vector])
    with pytest.warns(megatrain.HeldMemoryWarning, match="copies it once more"):
        compiled(torch.randn(4, 32).to(DEVICE))
    sim.order(order)
    for number in range(4):
        x = torch.randn(4, 32).to(DEVICE)
        with torch.no_grad():
            assert torch.equal(compiled(x).cpu(), eager(x).cpu()), number
        compiled(x).sum().backward()
        eager(x).sum().backward()
        for own, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.equal(own.grad, other.grad.cpu()), number
            own.grad = other.grad = None
            values = torch.randn(own.shape)
            if number == 1:
                held[0].append(own.data)
            own.data, other.data = values, values.to(other.device)
        if number == 0:
            assert torch.equal(held[0][0], held[1][0]), "the vector from before is left alone"
    before = torch.cat([tensor.flatten() for tensor in held[0][1:]])
    with torch.no_grad():
        compiled(torch.randn(4, 32).to(DEVICE))
    assert torch.equal(before, torch.cat([tensor.flatten() for tensor in held[0][1:]]))


@pytest.mark.parametrize("which", ["weight", "input", "output"])
def test_writes_that_torch_does_not_count_are_refused(sim: Simulator, which: str):
    compiled, model, _ = chain()
    x = torch.randn(4, 32).to(DEVICE)
    for changes in (False, True):
        y = compiled(x)
        written = {"weight": next(model.parameters()), "input": x, "output": y}[which]
        loss = y.sum()
        if not changes:
            loss.backward()
            continue
        written.data.mul_(2)
        with pytest.raises(megatrain.ExecuteError, match=r"was modified (in place )?between forward and backward"):
            loss.backward()
