"""Streams run in the order that a test chooses, within what waits allow; kernels have the CPU's numbers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatrain.device import LaunchGraphs, find
from tests.comparing import assert_same
from tests.simulated_device.simulator import Simulator


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


def test_waits_give_the_right_numbers_in_any_order_and_a_missing_one_wrong_ones_late(sim: Simulator):
    assert sum_after_copy(waits=False) == 10
    for order in ("early", "late", "seeded"):
        sim.order(order, seed=3)
        assert sum_after_copy(waits=True) == sum_after_copy(waits=False, synchronizes=True) == 10
    sim.order("late")
    assert sum_after_copy(waits=False) == 0


def test_a_dropped_wait_is_a_missing_wait(sim: Simulator):
    sim.order("late")
    sim.drop("wait", 0)
    assert sum_after_copy(waits=True) == 0
    assert sum_after_copy(waits=True) == 10
    assert sim.count("wait") == 2
    sim.drop("stream", 0)
    assert sum_after_copy(waits=False, synchronizes=True) == 0
    sim.reset()
    sim.order("late")
    sim.drop_where("wait", lambda stack: any(frame.name == "sum_after_copy" for frame in stack))
    assert sum_after_copy(waits=True) == 0


def test_a_missing_wait_is_seen_with_just_its_stream_late(sim: Simulator):
    side, out = new_stream(), torch.zeros(10, device="sim")
    sim.order("late", side)
    copied_on(side, out, locked(1))
    assert (sim.pending(side), sim.pending(default_stream())) == (1, 0)
    assert out.sum().item() == 0
    assert sim.pending(side) == 1
    side.synchronize()
    assert out.sum().item() == 10


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


# -- waits of the host -------------------------------------------------------------------------------------------


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
    assert [one.kind for one in found] == [
        "event",
        "stream",
        "device",
        "item",
        "blocking copy",
        "op",
        "allocator",
        "allocator",
    ]
    assert found[5].what == "aten::nonzero"


def test_a_wait_on_autograds_thread_is_noted(sim: Simulator):
    x = torch.ones(3, device="sim", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * grad.sum().item())
    with sim.synchronizations() as found:
        y.sum().backward()
    assert [one.kind for one in found] == ["item"]
    assert found[0].thread != threading.current_thread().name


# -- generators, devices, kernels --------------------------------------------------------------------------------


def module():
    return torch.get_device_module("sim")


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


def test_a_copy_between_devices_waits_on_both(sim: Simulator):
    sim.order("late")
    x = torch.ones(100, device="sim:0") * 3
    y = torch.zeros(100, device="sim:1")
    y.copy_(x, non_blocking=True)
    x.fill_(9)
    assert (y + 0).sum().item() == 300
    assert x.to("sim:1").sum().item() == 900


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.cat([x.t()[1:], x.t()[:1] * 2]).softmax(-1),
        lambda x: x[x > 0],
        lambda x: F.layer_norm(x, (4,)).to(torch.bfloat16).float(),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 2, 2)) * 2j),
        lambda x: torch.linalg.solve(x + 4 * torch.eye(4, device=x.device), x),
        lambda x: F.conv2d(x.view(1, 1, 4, 4), x.new_ones(2, 1, 3, 3), padding=1),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, -100], device=x.device), reduction="none"),
    ],
)
def test_ops_have_the_cpus_numbers(sim: Simulator, work: Callable[[torch.Tensor], torch.Tensor]):
    sim.order("late")
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    assert_same(work(x.to("sim")).cpu(), work(x))


def test_autocast_has_cudas_lists(sim: Simulator):
    x = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        low = [F.linear(x, x), x @ x, torch.bmm(x[None], x[None]), F.conv1d(x[None], x[..., None])]
        half = x.to(torch.bfloat16)
        full = [
            F.softmax(half, -1),
            F.layer_norm(half, (4,)),
            half.exp(),
            half.sum(),
            F.mse_loss(half, half),
            half.norm(),
        ]
        mixed = torch.addcmul(x, half, half)
    assert {t.dtype for t in low} == {torch.bfloat16}
    assert {t.dtype for t in full} == {torch.float32}
    assert mixed.dtype == torch.float32


def test_attention_keeps_no_matrix_of_scores(sim: Simulator):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 64, 8, requires_grad=True) for n in (4, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    there = [t.detach().to("sim").requires_grad_() for t in (q, k, v)]
    before = torch.accelerator.memory_allocated()
    found = F.scaled_dot_product_attention(there[0], there[1], there[2], is_causal=True, enable_gqa=True)
    assert torch.accelerator.memory_allocated() - before < 2 * 4 * 64 * 64 * 4
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    for grad, want in zip(torch.autograd.grad(found.square().sum(), there), wanted, strict=True):
        torch.testing.assert_close(grad.cpu(), want, rtol=1e-4, atol=1e-5)


# -- recordings, as CUDA graphs ----------------------------------------------------------------------------------


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
