"""How fast the way between a PCIe card and the host is, as Linux says; nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LEAST_GT_PER_S = 8.0
"""PCIe 3. Bridges of Thunderbolt and of virtual machines say that they are older, and are not."""


def link_share(address: str, devices: Path = _DEVICES) -> float:
    """The part of a card's own link that its way to the host has: half for a card of 16 lanes in a slot of 8.

    A link is as fast as the slower of its ends (PCIe 3 beside PCIe 4), and has the lanes that its ends agreed on. A
    switch on the way has a link of its own. A card at rest lowers its current speed, so the highest one counts.

    Args:
        address: The card's, such as `0000:65:00.0`.
        devices: Where Linux lists PCI devices.

    Returns:
        Above 0 and at most 1; 1 where the system doesn't say.
    """
    card = (devices / address).resolve()
    own = _figure(card, "max_link_speed") * _figure(card, "max_link_width")
    rates = [speed * lanes for speed, lanes in _ends(card) if speed >= _LEAST_GT_PER_S and lanes]
    return min(1.0, *(rate / own for rate in rates)) if own and rates else 1.0


def _ends(card: Path) -> Iterator[tuple[float, float]]:
    """GT/s and lanes of each end of a link between the card and the host: the card, and bridges on the way."""
    for device in (card, *card.parents):
        if _ADDRESS.fullmatch(device.name):
            yield _figure(device, "max_link_speed"), _figure(device, "current_link_width")


def _figure(device: Path, name: str) -> float:
    """The number with which such a file begins; 0 if there is none, or if it says `Unknown`."""
    with suppress(OSError, ValueError, IndexError):
        return float((device / name).read_text().split()[0])
    return 0.0
