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
