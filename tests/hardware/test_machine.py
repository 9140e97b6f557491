"""The machine that weighs copies against compute if nobody named one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import HOST, Device
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.machine import usual_machine
from megatrain.planning import plan_step

CARDS = {
    "rtx-3080": "NVIDIA GeForce RTX 3080, NVIDIA GeForce RTX 3080 Ti",
    "rtx-3090": "NVIDIA GeForce RTX 3090",
    "rtx-5060-ti": "NVIDIA GeForce RTX 5060 Ti",
    "rtx-5080": "NVIDIA GeForce RTX 5080",
    "rtx-5090": "NVIDIA GeForce RTX 5090",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "l40s": "NVIDIA L40S",
    "a100": "NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe",
    "h100-sxm": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe, NVIDIA H100 NVL",
    "h20": "NVIDIA H20",
    "h200": "NVIDIA H200",
    "gh200": "NVIDIA GH200 480GB",
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "mi300x": "AMD Instinct MI300X",
    "mi355x": "AMD Instinct MI355X",
    "gb10": "NVIDIA GB10",
    # What the table lacks, and what has no name.
    "rtx-4090": "NVIDIA GeForce RTX 3080 Laptop GPU, NVIDIA GB300, Tesla T4, ",
}


def test_the_name_of_a_card_is_found_in_the_table(monkeypatch: pytest.MonkeyPatch):
    for name, cards in CARDS.items():
        for card in cards.split(", "):
            monkeypatch.setattr(Device, "card", lambda _, card=card: card)
            assert usual_machine(HOST) == Hardware.preset(name), card
    assert usual_machine() == Hardware.preset("rtx-4090")


@pytest.mark.parametrize(("card", "is_unknown"), [("NVIDIA GB300", True), ("NVIDIA H200", False), ("", False)])
def test_a_card_that_the_table_lacks_is_named(card: str, is_unknown: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Device, "card", lambda _: card)
    told = f"{card} is in no table of cards: copies and compute are weighed as of an rtx-4090 without hardware="
    model, x = Layers(8), torch.ones(2, 8)
    texts = [
        str(megatrain.compile(model, device="cpu", memory="1MiB", hardware=hardware).megatrain)
        + str(megatrain.plan(model, x, device="cpu", optimizer="SGD", hardware=hardware))
        for hardware in (None, "h100-sxm")
    ]
    assert [text.count(told) for text in texts] == [2 if is_unknown else 0, 0]


@pytest.mark.parametrize(
    ("part", "compute", "memory"),
    [("1g.10gb", 1, 1), ("1c.3g.40gb", 1, 4), ("4g.40gb", 4, 4), ("7g.80gb", 7, 8)],
)
def test_a_part_of_a_card_has_its_share(part: str, compute: int, memory: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Device, "card", lambda _: f"NVIDIA H100 80GB HBM3 MIG {part}")
    whole, found = Hardware.preset("h100-sxm"), usual_machine(HOST)
    assert found.flops_per_s == pytest.approx({kind: rate * compute / 7 for kind, rate in whole.flops_per_s.items()})  # pyright: ignore
    assert found.memory_bytes_per_s == whole.memory_bytes_per_s * memory / 8
    assert found.memory_bytes == whole.memory_bytes * memory // 8  # pyright: ignore
    assert found.h2d_bytes_per_s == whole.h2d_bytes_per_s
    assert (f"the share that MIG {part.partition('.')[0]}" in str(found).replace("1c.3g", "1c")) or compute == 7


def test_copies_take_longer_where_the_slot_has_fewer_lanes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Device, "link_share", lambda _: 0.25)
    whole, found = Hardware.preset("rtx-4090"), usual_machine(HOST)
    copies = {"h2d_bytes_per_s": 6.25e9, "d2h_bytes_per_s": 6.25e9}
    assert found == replace(whole, **copies)
    assert "0.25 of it, as the slot has" in str(found)
    # Its copies don't go over PCIe.
    monkeypatch.setattr(Device, "card", lambda _: "NVIDIA GH200 480GB")
    assert usual_machine(HOST) == Hardware.preset("gh200")


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


def test_steps_and_calls_weigh_by_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def noting(device: Device) -> Hardware:
        asked.append(device.card())
        return usual_machine(device)

    monkeypatch.setattr(Device, "card", lambda _: "NVIDIA H200")
    monkeypatch.setattr(plan_step, "usual_machine", noting)
    model, x = Layers(8), torch.ones(2, 8)
    compiled = megatrain.compile(model, device="cpu", memory="1MiB")
    megatrain.TrainStep(compiled, torch.optim.SGD(model.parameters(), lr=0.1)).prepare(x)
    assert asked == ["NVIDIA H200"]
    compiled(x)
    assert asked == ["NVIDIA H200"] * 2
