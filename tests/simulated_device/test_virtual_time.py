"""Virtual time, against durations computed by hand."""

from __future__ import annotations

import pytest
import torch

from tests.simulated_device.simulator import HardwareProfile, Simulator

# Round figures, so that durations are: a product of 1000 x 1000 matrices takes 2 s, an addition moves 12 MB in 12 ms.
PLAIN = HardwareProfile(fp32=1e9, tf32=4e9, half=1e10, memory=1e9, h2d=1e6, d2h=1e6, pageable=1e5)


MB = 1_000_000


def on(stream: torch.Stream):
    return torch.get_device_module("sim").stream(stream)


def locked(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def there(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="sim")


@pytest.fixture(autouse=True)
def _no_values(sim: Simulator) -> None:
    sim.configure(compute=False)


def close(value: float):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def test_a_product_takes_its_flops_and_an_addition_its_bytes(sim: Simulator):
    x, y = torch.empty(2, 1000, 1000, device="sim")
    h = x.to(torch.bfloat16)
    sim.set_profile(PLAIN)
    stream = torch.accelerator.current_stream()
    x @ x  # pyright: ignore[reportUnusedExpression]
    assert sim.stream_clock(stream) == close(2.0)
    h @ h  # pyright: ignore[reportUnusedExpression]
    assert sim.stream_clock(stream) == close(2.2)
    x + y  # pyright: ignore[reportUnusedExpression]
    assert sim.stream_clock(stream) == close(2.212)
    x.add_(y)
    assert sim.stream_clock(stream) == close(2.224)


def flops_of(sim: Simulator, work) -> float:
    sim.set_profile(PLAIN)
    with sim.spans() as found:
        work()
    return sum(span.flops for span in found)


def test_flops(sim: Simulator):
    e = lambda *size: torch.empty(*size, device="sim", requires_grad=True)  # noqa: E731
    linear = torch.nn.Linear(20, 30, device="sim")
    assert flops_of(sim, lambda: linear(e(5, 20))) == 2 * 5 * 20 * 30
    assert flops_of(sim, lambda: linear(e(5, 20)).sum().backward()) == 3 * 2 * 5 * 20 * 30
    assert flops_of(sim, lambda: torch.bmm(e(4, 5, 6), e(4, 6, 7))) == 2 * 4 * 5 * 6 * 7
    assert flops_of(sim, lambda: torch.baddbmm(e(4, 5, 7), e(4, 5, 6), e(4, 6, 7))) == 2 * 4 * 5 * 6 * 7
    conv = torch.nn.Conv2d(3, 8, 5, padding=2, bias=False, device="sim")
    one = 2 * 2 * 8 * 16 * 16 * 3 * 5 * 5
    assert flops_of(sim, lambda: conv(e(2, 3, 16, 16))) == one
    assert flops_of(sim, lambda: conv(e(2, 3, 16, 16)).sum().backward()) == 3 * one
    q, attend = e(2, 3, 64, 16), torch.nn.functional.scaled_dot_product_attention
    whole = 4 * 2 * 3 * 64 * 64 * 16
    assert flops_of(sim, lambda: attend(q, q, q)) == whole
    assert flops_of(sim, lambda: attend(q, q, q, is_causal=True)) == whole / 2
    assert flops_of(sim, lambda: attend(q, q, q).sum().backward()) == 3.5 * whole


def test_streams_run_side_by_side_and_waits_take_the_later_clock(sim: Simulator):
    x, side = torch.empty(1000, 1000, device="sim"), torch.Stream(device="sim")
    host, slot = locked(3 * MB), there(3 * MB)
    sim.set_profile(PLAIN)
    main = torch.accelerator.current_stream()
    with on(side):
        slot.copy_(host, non_blocking=True)
    x @ x  # pyright: ignore[reportUnusedExpression]
    assert (sim.stream_clock(side), sim.stream_clock(main)) == (close(3), close(2))
    main.wait_event(side.record_event())
    x @ x  # pyright: ignore[reportUnusedExpression]
    assert sim.stream_clock(main) == close(5)


@pytest.mark.parametrize(("share", "second"), [(1.0, 2.0), (0.75, 3.0), (0.5, 4.0)])
def test_copies_in_both_directions_share_the_link(sim: Simulator, share: float, second: float):
    """2 MB each way: the first keeps its rate, the second gets the rest while both are under way."""
    up, down = torch.Stream(device="sim"), torch.Stream(device="sim")
    host, slot = locked(2 * MB), there(2 * MB)
    sim.set_profile(HardwareProfile(h2d=1e6, d2h=1e6, both_ways=share))
    with on(up):
        slot.copy_(host, non_blocking=True)
    with on(down):
        host.copy_(slot, non_blocking=True)
    assert (sim.stream_clock(up), sim.stream_clock(down)) == (close(2), close(second))


def test_the_host_pays_for_issue_and_for_waits(sim: Simulator):
    x = torch.empty(1000, 1000, device="sim")
    sim.set_profile(HardwareProfile(fp32=1e9, launch=0.25, issue=0.5, control=0.125, sync=0.0625))
    x @ x  # pyright: ignore[reportUnusedExpression]
    assert sim.host_clock == close(0.5)
    event = torch.accelerator.current_stream().record_event()
    assert sim.host_clock == close(0.625)
    assert sim.stream_clock(torch.accelerator.current_stream()) == close(0.5 + 2.25)
    event.synchronize()
    assert sim.host_clock == close(2.75 + 0.0625)
    x.add_(1)
    torch.accelerator.synchronize()
    assert sim.host_clock == close(2.8125 + 0.5 + 0.25 + 0.0625)
