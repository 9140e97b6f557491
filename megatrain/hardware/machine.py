"""The machine that an option names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatrain.base.checks import either, instance_of, one_of
from megatrain.hardware.hardware import Hardware, on_this_system
from megatrain.hardware.presets import PRESETS

if TYPE_CHECKING:  # its folder imports torch, and this one is imported where torch isn't
    from megatrain.device import Device

MEASURED = "measured"
HARDWARE = either(one_of(MEASURED, *Hardware.presets()), instance_of(Hardware))
"""What `hardware` may be: a machine, one of the table by its name, or the machine of a device, which is measured."""


def machine_of(hardware: Hardware | str, device: Any) -> Hardware:
    """The machine that `hardware` names, once it has passed `HARDWARE`.

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
    r"RTX 5060 Ti\b": "rtx-5060-ti",
    r"RTX 5080\b": "rtx-5080",
    r"RTX 5090\b": "rtx-5090",
    r"RTX PRO 6000\b": "rtx-pro-6000",
    r"\bL40S\b": "l40s",
    r"\bA100\b": "a100",
    r"\bH100 (PCIe|NVL)\b": "h100-pcie",
    r"\bH100\b": "h100-sxm",
    r"\bH20\b": "h20",
    r"\bH200\b": "h200",
    r"\bGH200\b": "gh200",
    r"\bB200\b": "b200",
    r"\bB300\b": "b300",
    r"\bGB200\b": "gb200",
    r"\bMI300X\b": "mi300x",
    r"\bMI355X\b": "mi355x",
    r"\bGB10\b": "gb10",
}
# Of a card that is divided (MIG), by sevenths of its compute: the eighths of its memory.
_EIGHTHS = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
_USUAL = "rtx-4090"


def usual_machine(device: Device | None = None) -> Hardware:
    """The machine by which copies and compute are weighed if nobody named one: that of the card, or an RTX 4090.

    Where about 5000 FLOPs take as long as a byte of a copy, as there, a plan is a good one for most cards. Of a card
    in a slot of fewer lanes, or of an older PCIe, copies take as much longer; and of a part of a card (MIG) compute.
    """
    machine = on_this_system(Hardware.preset(_preset_of(device) or _USUAL), device)
    share = slot_share(device)
    machine = _scaled(machine, f"{share:g} of it, as the slot has", h2d_bytes_per_s=share, d2h_bytes_per_s=share)
    part = re.search(r"\bMIG (?:(\d)c\.)?(\d)g\b", "" if device is None else device.card())
    if part is None:
        return machine
    compute, memory = int(part[1] or part[2]) / 7, _EIGHTHS.get(int(part[2]), 8) / 8
    rates = {"flops_per_s": compute, "memory_bytes_per_s": memory, "memory_bytes": memory}
    return _scaled(machine, f"the share that {part[0]} has", **rates)


def _scaled(machine: Hardware, why: str, **shares: float) -> Hardware:
    figures, origins = dict[str, Any](), dict(machine.origins)
    for name, share in shares.items():
        now: Any = getattr(machine, name)
        if share == 1 or now is None:
            continue
        is_of_kinds = isinstance(now, Mapping)
        rates: Mapping[str, float] = now if is_of_kinds else {}
        figures[name] = {kind: share * rate for kind, rate in rates.items()} if is_of_kinds else type(now)(share * now)
        for figure in [f"{name} {kind}" for kind in rates] or [name]:
            origins[figure] = f"{origins[figure]}; {why}"
    return replace(machine, **figures, origins=origins)


def slot_share(device: Device | None) -> float:
    """The part of the card's own link that its slot has; 1 where nothing is known, or copies don't go over PCIe."""
    is_pcie = PRESETS[_preset_of(device) or _USUAL].is_pcie
    return device.link_share() if device is not None and is_pcie else 1.0


def unknown_card(device: Device | None) -> str:
    """Says that the table lacks a device's card; empty if it has the card, or the device has no name of one."""
    card = "" if device is None else device.card()
    if not card or _preset_of(device):
        return ""
    return f"{card} is in no table of cards: copies and compute are weighed as of an {_USUAL} without hardware="


def _preset_of(device: Device | None) -> str:
    """The name of a device's card in the table; empty if it isn't there."""
    card = "" if device is None else device.card()
    # Laptops have the names of cards that are twice as fast.
    fitting = [] if "Laptop" in card else [name for pattern, name in _NAMES.items() if re.search(pattern, card)]
    return fitting[0] if fitting else ""
