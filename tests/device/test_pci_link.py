"""How much of its link a card has, read from trees of files as Linux shows them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatrain.device import cuda as cuda_module
from megatrain.device.cuda import Cuda, link_share

CARD, PORT, ROOT = "0000:65:00.0", "0000:64:00.0", "0000:60:01.1"
PCIE3, PCIE4, PCIE5 = "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe"


def machine_with(tmp_path: Path, *ends: tuple[str, str, int, int]) -> Path:
    """Ends of links from the root to the card, each an address, its highest speed, the lanes in use and the most."""
    folder = tmp_path / "devices" / "pci0000:60"
    listed = tmp_path / "bus" / "pci" / "devices"
    listed.mkdir(parents=True)
    for address, speed, lanes, most in ends:
        folder /= address
        folder.mkdir(parents=True)
        files = {
            "max_link_speed": speed,
            "current_link_speed": "2.5 GT/s PCIe",  # the card is at rest
            "current_link_width": lanes,
            "max_link_width": most,
        }
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
        (listed / address).symlink_to(folder)
    return listed


@pytest.mark.parametrize(
    ("ends", "share"),
    [
        pytest.param([(ROOT, PCIE4, 16, 16), (CARD, PCIE4, 16, 16)], 1, id="all of it"),
        pytest.param([(ROOT, PCIE5, 16, 16), (CARD, PCIE4, 16, 16)], 1, id="a newer board"),
        pytest.param([(ROOT, PCIE4, 8, 8), (CARD, PCIE4, 8, 16)], 0.5, id="8 of 16 lanes"),
        pytest.param([(ROOT, PCIE3, 16, 16), (CARD, PCIE4, 16, 16)], 0.5, id="an older board"),
        pytest.param([(ROOT, PCIE3, 4, 4), (CARD, PCIE5, 4, 16)], 1 / 16, id="4 lanes of an older board"),
        pytest.param([(ROOT, PCIE4, 8, 16), (PORT, PCIE4, 8, 16), (CARD, PCIE4, 16, 16)], 0.5, id="behind a switch"),
        pytest.param([(ROOT, "2.5 GT/s PCIe", 4, 4), (CARD, PCIE4, 4, 16)], 0.25, id="Thunderbolt"),
        pytest.param([(ROOT, "Unknown", 0, 255), (CARD, PCIE4, 16, 16)], 1, id="a virtual bridge"),
        pytest.param([(CARD, "Unknown", 0, 255)], 1, id="a virtual card"),
        pytest.param([(ROOT, PCIE5, 16, 16), (CARD, PCIE4, 0, 16)], 1, id="only the board says its lanes"),
    ],
)
def test_the_slowest_link_on_the_way_counts(tmp_path: Path, ends: list[tuple[str, str, int, int]], share: float):
    assert link_share(CARD, machine_with(tmp_path, *ends)) == share


def test_a_card_of_nvidia_is_looked_up_by_its_address(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    card = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x65, pci_device_id=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(cuda_module, "link_share", lambda address: asked.append(address) or 0.5)
    device = Cuda.__new__(Cuda)
    device.torch_device = torch.device("cuda", 0)
    assert device.link_share() == 0.5
    assert asked == ["0001:65:0a.0"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device.link_share() == 1
