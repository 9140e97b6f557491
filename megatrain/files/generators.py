"""Generators: the state of all global random generators as a value that a checkpoint holds."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatrain.base.checks import shown
from megatrain.device import Device, find
from megatrain.errors import CheckpointError, ResumeWarning


def generators_now(device: Device | torch.device | str | None = None) -> dict[str, Any]:
    """Reads torch's generators, of the CPU and of the compute device, Python's and NumPy's.

    Args:
        device: The compute device, as in `compile`; None takes the same.
    """
    target = find(device)
    own = target.generator_state()
    return {
        "torch": torch.get_rng_state(),
        "device": None if own is None else {"kind": target.kind, "state": own},
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def check_generators(state: dict[str, Any], device: Device | torch.device | str | None = None) -> None:
    """Checks that a state is one.

    Args:
        state: From `generators_now`.
        device: The compute device; see `generators_now`.

    Raises:
        CheckpointError: If it isn't.
    """
    wrong = _refused(state, find(device))
    if wrong is not None:
        raise CheckpointError(
            f"the checkpoint's random states are invalid: {wrong}.\n"
            "  Random states must be a result of generators_now().\n"
            "  Load an older checkpoint, or seed anew with torch.manual_seed."
        )


def restore_generators(state: dict[str, Any], device: Device | torch.device | str | None = None) -> None:
    """Sets the generators to states from `generators_now`; those of devices other than the compute device stay.

    The number of devices doesn't matter. On a device of another kind, random numbers can't go on as they were: that is
    a `ResumeWarning`. This device's generator is then seeded from the state, so that each resumed run draws the same.

    Args:
        state: From `generators_now`.
        device: The compute device; see `generators_now`.

    Raises:
        CheckpointError: As `check_generators`, before anything is set.
    """
    target = find(device)
    check_generators(state, target)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    kind, own = _of_device(state)
    here = None if target.generator_state() is None else target.kind
    if kind != here:
        own = target.seeded_state(_seed_of(state))
        warnings.warn(
            f"the checkpoint's random numbers were drawn on {kind or 'the CPU'}, and {target} draws others: dropout "
            f"differs from here on, alike in each run resumed on {target.kind}. To go on with the same numbers, "
            f"resume on {kind or 'the CPU'}.",
            ResumeWarning,
            stacklevel=2,
        )
    if own is not None:
        target.set_generator_state(own)


# -- devices -------------------------------------------------------------------------------------------------------


def _of_device(state: dict[str, Any]) -> tuple[str | None, torch.Tensor | None]:
    """The kind of device that drew, and the state of its generator; None if the generator was that of the CPU."""
    found = state["device"]
    return (None, None) if found is None else (found["kind"], found["state"])


def _seed_of(state: dict[str, Any]) -> int:
    """A seed for a generator that the state doesn't have."""
    return int.from_bytes(hashlib.sha256(state["torch"].numpy().tobytes()).digest()[:8], "little") >> 1


def _refused(state: dict[str, Any], target: Device) -> str | None:
    """Tries the states on generators that nobody draws from; says which is refused, and why."""
    tries: dict[str, Callable[[Any], object]] = {
        "torch": torch.Generator().set_state,
        "device": lambda found: _check_device(found, target),
        "python": random.Random().setstate,
        "numpy": _set_numpy,
    }
    for name, set_state in tries.items():
        try:
            set_state(state[name])
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            return f"generators.{name} is refused: {error}"
    return None


def _check_device(found: Any, target: Device) -> None:
    here = target.generator_state()
    if found is None or found["kind"] != target.kind or here is None:
        return
    if found["state"].numel() != here.numel():
        raise ValueError(f"it has {found['state'].numel()} B")


def _set_numpy(state: dict[str, Any]) -> None:
    generator: Any = type(np.random.get_bit_generator())  # pyright: ignore
    np.random.RandomState(generator()).set_state(state)
    if state["bit_generator"] == "MT19937":  # which takes any position, and reads beyond the end of its memory
        at, key = state["state"]["pos"], state["state"]["key"]
        if type(at) is not int or not 0 <= at <= 624 or getattr(key, "dtype", None) != np.uint32:
            raise ValueError(f"it is at {shown(at)} of {shown(key)}")
