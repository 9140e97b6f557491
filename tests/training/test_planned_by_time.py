"""Training steps that are planned for a machine: the fastest plan runs, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.hardware.hardware import Hardware
from tests.models import Stack
from tests.training.parity import SideBySide, adamw, gpt_batch

# A link so slow that weights which stay save more than graphs that are retained; or so fast that they save nothing.
SLOW_LINK = Hardware(1e6, 1e6, 1e12, host_bytes_per_s=1e12)
FAST_LINK = Hardware(1e12, 1e12, 1e6, host_bytes_per_s=1e12)


class Wide(nn.Module):
    """Layers whose graphs take as many bytes as their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def taken(hardware: Any, memory: str) -> tuple[megatrain.Schedule, list[torch.Tensor]]:
    """The schedule of the third step, and the parameters after it."""
    torch.manual_seed(0)
    compiled = megatrain.compile(Wide(), device="cpu", memory=memory, hardware=hardware)
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-2))
    for number in range(3):
        step(torch.randn(128, 64, generator=torch.Generator().manual_seed(number)))
    step.flush()
    return step.schedule, [p.detach().clone() for p in compiled.parameters()]


def test_each_machine_gets_the_plan_that_is_fastest_there():
    found = {name: taken(machine, "450KiB") for name, machine in (("slow", SLOW_LINK), ("fast", FAST_LINK), ("", None))}
    schedules = {name: schedule for name, (schedule, _) in found.items()}
    assert schedules["slow"].simulate(SLOW_LINK).step_s < 0.97 * schedules["fast"].simulate(SLOW_LINK).step_s
    assert schedules["fast"].simulate(FAST_LINK).step_s < 0.97 * schedules["slow"].simulate(FAST_LINK).step_s
    for name, machine in (("slow", SLOW_LINK), ("fast", FAST_LINK)):
        assert schedules[name].simulate(machine).step_s <= schedules[""].simulate(machine).step_s
        assert schedules[name].device_bytes <= 450 << 10
        assert all(torch.equal(one, other) for one, other in zip(found[name][1], found[""][1], strict=True))


@pytest.mark.parametrize("mode", [{"spread": True}, {"max_grad_norm": 0.5}])
def test_batches_of_other_shapes_are_planned_again(mode: dict[str, Any]):
    sides = SideBySide.of("gpt", adamw, compile_options={"memory": "40KiB", "hardware": SLOW_LINK}, **mode)
    seen: set[int] = set()
    for number in range(4):
        sides.take(gpt_batch(number, 1 + number % 2), seed=number)
        seen.add(sides.step.schedule.device_bytes)
        assert sides.step.schedule.device_bytes <= 40 << 10
    assert len(seen) > 1
    sides.assert_same()


def test_a_machine_is_named_or_measured(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(Hardware, "measure", lambda device: asked.append(device) or SLOW_LINK)
    compiled = megatrain.compile(Stack(2), device="cpu", hardware="measured")
    assert [str(device) for device in asked] == ["cpu"]
    assert compiled.megatrain.options.hardware == SLOW_LINK
    assert "steps planned by their time" in str(compiled.megatrain)
    assert megatrain.compile(Stack(2), device="cpu", hardware="a100").megatrain.options.hardware == Hardware.preset(
        "a100"
    )
    with pytest.raises(megatrain.OptionError, match=r"hardware is .measured., .rtx-3080., "):
        megatrain.compile(Stack(2), device="cpu", hardware="a10")
