"""The machine that weighs copies against compute if nobody named one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain
from megatrain.compiled import lowered
from megatrain.device.interface import Device
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.training import step_tables


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA GeForce RTX 3080", "rtx-3080"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx-3080"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx-4090"),
        ("NVIDIA H20", "rtx-4090"),
        ("Tesla T4", "rtx-4090"),
        ("", "rtx-4090"),
    ],
)
def test_the_name_of_a_card_is_found_in_the_table(card: str, name: str):
    assert usual_machine(card).name == name


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_plan_weighs_by_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch):
    """Where copies are slow memory goes to frozen weights first, and where they are fast to graphs."""
    found: list[tuple[int, int]] = []
    with torch.device("meta"):
        model, x = Layers(8192), torch.ones(1024, 8192)
    for card in ("NVIDIA B200", "NVIDIA GH200 480GB"):
        monkeypatch.setattr(Device, "card", lambda _, card=card: card)
        plan = megatrain.plan(model, x, device="cpu", device_memory="1200MiB", optimizer="AdamW")
        found.append((len(plan.schedule.persistent), len(plan.schedule.saves)))
    assert found == [(1, 1), (0, 8)]


def test_steps_and_calls_weigh_by_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def noting(card: str) -> Hardware:
        asked.append(card)
        return usual_machine(card)

    monkeypatch.setattr(Device, "card", lambda _: "NVIDIA H200")
    for module in (step_tables, lowered):
        monkeypatch.setattr(module, "usual_machine", noting)
    model, x = Layers(8), torch.ones(2, 8)
    compiled = megatrain.compile(model, device="cpu", memory="1MiB")
    megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1)).prepare(x)
    assert asked == ["NVIDIA H200"]
    compiled(x)
    assert asked == ["NVIDIA H200"] * 2
