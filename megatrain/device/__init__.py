"""Devices: everything that differs between the host, CUDA and other accelerators, in one place.

`Device` has all questions of the library to a device. `Cpu` is the plain case. `Accelerator` speaks torch's generic
interface, so it serves CUDA, XPU and backends of other makers; `Cuda` adds what only CUDA has. Your own kind of device
is a subclass: give an object of it to `megatrain.compile(device=...)`, or `register` it to be known by name.
docs/extending.md writes one.
"""

from megatrain.device.accelerator import Accelerator
from megatrain.device.cuda import Cuda
from megatrain.device.interface import (
    Device,
    DeviceEvent,
    DeviceStream,
    HostMoment,
    LaunchGraphs,
    Memory,
    Moment,
    is_late,
    is_on_host,
    is_same_kind,
)
from megatrain.device.kinds import (
    HOST,
    Cpu,
    autocast_kinds,
    find,
    num_accelerators,
    present_accelerator,
    register,
    take_accelerator,
    unregister,
    usable,
    used_device,
)

__all__ = [
    "HOST",
    "Accelerator",
    "Cpu",
    "Cuda",
    "Device",
    "DeviceEvent",
    "DeviceStream",
    "HostMoment",
    "LaunchGraphs",
    "Memory",
    "Moment",
    "autocast_kinds",
    "find",
    "is_late",
    "is_on_host",
    "is_same_kind",
    "num_accelerators",
    "present_accelerator",
    "register",
    "take_accelerator",
    "unregister",
    "usable",
    "used_device",
]
