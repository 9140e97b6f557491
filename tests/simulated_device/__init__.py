"""A simulated accelerator, `"sim"`: memory of its own, streams whose order a test chooses, and virtual time.

It is torch's accelerator (by the name that torch keeps for other makers), so it belongs in a process of its own:
`pytest -p tests.simulated_device.plugin tests/simulated_device`. Importing this module loads nothing.

There are no threads. Each stream has a queue; a task runs on the host thread whose call makes it due, under one lock.
So an order is the test's choice, not the machine's, and can be repeated. See source/*.h for the rules of each part.
"""

from tests.simulated_device.adapter import SimulatedDevice
from tests.simulated_device.building import BuildError
from tests.simulated_device.loading import is_loaded, load, unavailable
from tests.simulated_device.simulator import HardwareProfile, Simulator, Span, Synchronization

__all__ = [
    "BuildError",
    "HardwareProfile",
    "SimulatedDevice",
    "Simulator",
    "Span",
    "Synchronization",
    "is_loaded",
    "load",
    "unavailable",
]
