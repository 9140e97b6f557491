"""walk(): the model's own code runs in the body, with its state on the device as calls read it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from megatrain.device import is_on_host
from megatrain.errors import ExecuteError
from megatrain.runtime.engine import Engine
from megatrain.runtime.walk.loans import Learned, Loans
from megatrain.runtime.walk.mode import WalkMode
from megatrain.runtime.walk.walk_figures import WalkFigures
from megatrain.tracer.capture.sandbox import uncompiled
from megatrain.tracer.inventory import first_packed


@contextmanager
def walk(
    what: str, model: nn.Module, engine: Engine, budget_bytes: int, learned: Learned
) -> Generator[Callable[[], WalkFigures]]:
    """Runs the body without a schedule: torch calls on this thread find the model's state on the compute device.

    The slots' memory is given back before. The model's own code does everything else, and what it leaves in attributes
    and in objects of the caller (caches) is what it would leave there in eager.

    Args:
        what: The call, for errors.
        model: Its modules' state is in the engine's store, or comes there now.
        engine: Idle, in a turn of its model.
        budget_bytes: The bound of the device's memory: for state, for what calls return, and for what is held already.
        learned: What earlier walks have shown.

    Yields:
        A function that returns the figures so far.

    Raises:
        ExecuteError: If the state has no values, or a parameter is packed; or, from a torch call of the body, if there
            is no room on the device, or gradients are switched on.
    """
    entries = engine.adopt_state()
    packed = first_packed(entries)
    if packed is not None:
        raise ExecuteError(
            f"{what} is a walk, which can't bring the packed (quantized) parameter `{packed}` to the device.\n"
            "  A walk replaces parameters by copies on the device, and those of a packed one lie within it.\n"
            "  Run it eagerly, on the host: compiled.megatrain.model has the same weights."
        )
    engine.release_slots()
    loans = Loans(what, engine, entries, budget_bytes, learned)
    keys: Mapping[int, str] = {id(tensor): key for key, tensor in engine.tensors.items()}
    try:
        with uncompiled(), engine.streams.step(waits_for=("h2d",)):
            with WalkMode(loans, keys, engine.device.torch_device):
                yield lambda: loans.figures
            loans.end()
    finally:
        loans.end(has_failed=True)
        bring_buffers_home(model, engine)


def bring_buffers_home(model: nn.Module, engine: Engine) -> None:
    """Copies buffers to the host that the forward has replaced by tensors of the device."""
    if engine.device.is_host:
        return
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_on_host(buffer):
                if id(buffer) not in copies:
                    copies[id(buffer)] = engine.device.to_host(buffer)
                module._buffers[name] = copies[id(buffer)]
