"""The machine that an option names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatrain.checks import either, instance_of, one_of
from megatrain.hardware.hardware import Hardware
from megatrain.hardware.presets import PRESETS

if TYPE_CHECKING:  # its folder imports torch, and this one is imported where torch isn't
    from megatrain.device import Device

MEASURED = "measured"
HARDWARE = either(one_of(MEASURED, *Hardware.presets()), instance_of(Hardware))
"""What `hardware` may be: a machine, one of the table by its name, or the machine of a device, which is measured."""


def machine_of(hardware: Hardware | str, device: Any) -> Hardware:
    """The machine that `hardware` names, once it has passed `HARDWARE`.

    Args:
        hardware: A machine, or a name.
        device: As for `Hardware.measure`, whose cache is read first.

    Raises:
        OptionError: If the device can't be used.
    """
    if isinstance(hardware, Hardware):
        return hardware
    return Hardware.measure(device) if hardware == MEASURED else Hardware.preset(hardware)


# Cards of the table, by what the name of a device says.
_NAMES = {
    r"RTX 3080\b": "rtx-3080",
    r"RTX 3090\b": "rtx-3090",
    r"RTX 4090\b": "rtx-4090",
    r"RTX 5090\b": "rtx-5090",
    r"\bA100\b": "a100",
    r"\bH100 (PCIe|NVL)\b": "h100-pcie",
    r"\bH100\b": "h100-sxm",
    r"\bH200\b": "h200",
    r"\bGH200\b": "gh200",
    r"\bB200\b": "b200",
    r"\bGB10\b": "gb10",
}


def usual_machine(device: Device | None = None) -> Hardware:
    """The machine by which copies and compute are weighed if nobody named one: that of the card, or an RTX 4090.

    Where about 5000 FLOPs take as long as a byte of a copy, as there, a plan is a good one for most cards. Of a card
    in a slot of fewer lanes, or of an older PCIe, copies take as much longer.

    Args:
        device: Says the name of its card, and how much of its link it has; without one, or a name, an RTX 4090.
    """
    machine = Hardware.preset(_preset_of(device))
    share = slot_share(device)
    if share == 1:
        return machine
    copies = ("h2d_bytes_per_s", "d2h_bytes_per_s")
    origins = {copy: f"{machine.origins[copy]}; {share:g} of it, as the slot has" for copy in copies}
    slower: dict[str, Any] = {copy: share * getattr(machine, copy) for copy in copies}
    return replace(machine, **slower, origins={**machine.origins, **origins})


def slot_share(device: Device | None) -> float:
    """The part of the card's own link that its slot has; 1 where nothing is known, or copies don't go over PCIe."""
    return 1.0 if device is None or not PRESETS[_preset_of(device)].is_pcie else device.link_share()


def _preset_of(device: Device | None) -> str:
    card = "" if device is None else device.card()
    # Laptops have the names of cards that are twice as fast.
    fitting = [] if "Laptop" in card else [name for pattern, name in _NAMES.items() if re.search(pattern, card)]
    return fitting[0] if fitting else "rtx-4090"
