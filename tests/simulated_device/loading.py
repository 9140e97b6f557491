"""Loads the simulated device into this process, as torch's accelerator."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import torch

from megatrain.device import register
from tests.simulated_device.adapter import SimulatedDevice
from tests.simulated_device.building import built_library, compiler
from tests.simulated_device.interface import opened
from tests.simulated_device.simulator import Simulator
from tests.simulated_device.torch_module import NAME, SimModule

_loaded: list[Simulator] = []


def unavailable() -> str | None:
    """Why this machine can't have the device, or None if it can."""
    if _loaded:
        return None
    if sys.platform != "linux":
        return "the simulated device needs Linux"
    if compiler() is None:
        return "the simulated device needs a C++ compiler: none is in PATH, nor in $CXX"
    if torch.accelerator.is_available():
        return f"this machine has an accelerator: {torch.accelerator.current_accelerator()}"
    return None


def is_loaded() -> bool:
    """Whether this process has the device."""
    return bool(_loaded)


def load(*, range_bytes: int = 1 << 40) -> Simulator:
    """Makes the device known to torch and megatrain as `"sim"`, compiled first where it must be.

    Repeated calls return the same object.

    Args:
        range_bytes: Addresses of each device, less if the system doesn't give so many.

    Raises:
        RuntimeError: If it is `unavailable`, or the compiler fails.
    """
    if _loaded:
        return _loaded[0]
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    importlib.import_module("torch._meta_registrations")  # meta kernels written in Python
    path = built_library()
    torch.ops.load_library(str(path))
    library = opened(path)
    library.sim_load(range_bytes)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, SimModule(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # `parameter.data = other` asks whether both tensors are of compatible kinds, which torch denies for a device of
    # another maker. Without this, module.to(device) makes new parameters, and tied weights come apart.
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Before torch is initialised for the accelerator once, no address counts as page-locked.
    torch.empty(1, pin_memory=True)
    simulator = Simulator(library)
    simulator.reset()
    register(NAME, partial(SimulatedDevice, simulator))
    _loaded.append(simulator)
    return simulator
