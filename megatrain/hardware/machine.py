"""The machine that an option names."""

from __future__ import annotations

from typing import Any

from megatrain.checks import either, instance_of, one_of
from megatrain.hardware.hardware import Hardware

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
