"""Generators: the state of all global random generators as a value that a checkpoint holds."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megatrain.checks import shown
from megatrain.counts import counted
from megatrain.device import Cuda, Device, find
from megatrain.errors import CheckpointError, ResumeWarning
from megatrain.files.json_rules import (
    anything,
    entries,
    integer,
    listing,
    one_of,
    optional,
    problems,
    record,
    text,
)


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
        state: From `generators_now`, of this version or an earlier one.
        device: The compute device; see `generators_now`.

    Raises:
        CheckpointError: If it isn't.
    """
    form = _STATE if "device" in state else _SECOND if "devices" in state else _FIRST
    wrong = problems(form, state, "generators") or list(_refused(state, find(device)))
    if wrong:
        raise CheckpointError(
            "\n  ".join(
                [
                    f"the checkpoint's random states are invalid, in {counted(len(wrong), 'place')}.",
                    *wrong,
                    "Random states must be a result of generators_now().",
                    "Load an older checkpoint, or seed anew with torch.manual_seed.",
                ]
            )
        )


def restore_generators(state: dict[str, Any], device: Device | torch.device | str | None = None) -> None:
    """Sets the generators to states from `generators_now`; those of devices other than the compute device stay.

    The number of devices doesn't matter. On a device of another kind, random numbers can't go on as they were: that is
    a `ResumeWarning`. This device's generator is then seeded from the state, so that each resumed run draws the same.

    Args:
        state: From `generators_now`, of this version or an earlier one.
        device: The compute device; see `generators_now`.

    Raises:
        CheckpointError: As `check_generators`, before anything is set.
    """
    target = find(device)
    check_generators(state, target)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    kind, own = _of_device(state, target)
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


def _of_device(state: dict[str, Any], target: Device) -> tuple[str | None, torch.Tensor | None]:
    """The kind of device that drew, and the state of its generator; None if the generator was that of the CPU.

    Earlier schemas have the states of all devices of the machine, and not which of them computed: it is taken to have
    the number of the present one, unless there was only one.
    """
    if "device" in state:
        found = state["device"]
        return (None, None) if found is None else (found["kind"], found["state"])
    kind, states = _of_all_devices(state)
    if not states:
        return None, None
    number = 0 if len(states) == 1 else target.torch_device.index or 0
    return (kind, states[number]) if number < len(states) else (f"another {kind} device", None)


def _of_all_devices(state: dict[str, Any]) -> tuple[str, list[torch.Tensor]]:
    """The kind and the states in an earlier schema; in the first one they were CUDA's."""
    if Cuda.name in state:
        return Cuda.name, state[Cuda.name]
    return ("cpu", []) if state["devices"] is None else (state["devices"]["type"], state["devices"]["states"])


def _seed_of(state: dict[str, Any]) -> int:
    """A seed for a generator that the state doesn't have."""
    return int.from_bytes(hashlib.sha256(state["torch"].numpy().tobytes()).digest()[:8], "little") >> 1


# -- the form of a state -----------------------------------------------------------------------------------------------


def _bytes(value: Any, place: str) -> Iterator[str]:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        yield f"{place} is {shown(value)}, not bytes in a tensor"


def _number(value: Any, place: str) -> Iterator[str]:
    if type(value) not in (int, float):
        yield f"{place} is {shown(value)}, not a number"


def _words(value: Any, place: str) -> Iterator[str]:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint32 or value.shape != (624,):
        yield f"{place} is {shown(value)}, not 624 numbers of 32 bits in an array"


def _numpy(value: Any, place: str) -> Iterator[str]:
    """NumPy itself takes any position, and reads beyond the end of its memory."""
    is_twister = isinstance(value, dict) and value.get("bit_generator") == "MT19937"
    twister = record({"key": _words, "pos": integer(0, 624)})
    fields = {"bit_generator": text(), "state": twister if is_twister else anything}
    others = None if is_twister else anything
    yield from record({**fields, "has_gauss": integer(0, 1), "gauss": _number}, others)(value, place)


_WORDS = entries(*[integer(0, 2**32 - 1)] * 624, integer(0, 624), kind=tuple)
_COMMON = {"torch": _bytes, "python": entries(one_of((3,)), _WORDS, optional(_number), kind=tuple), "numpy": _numpy}
_KIND = text("[a-z0-9]+", "a kind of device")
_STATE = record({**_COMMON, "device": optional(record({"kind": _KIND, "state": _bytes}))})
_SECOND = record({**_COMMON, "devices": optional(record({"type": _KIND, "states": listing(_bytes)}))})
_FIRST = record({**_COMMON, Cuda.name: listing(_bytes)})


def _refused(state: dict[str, Any], target: Device) -> Iterator[str]:
    """Tries the states on generators that nobody draws from."""
    try:
        torch.Generator().set_state(state["torch"])
    except RuntimeError as error:
        yield f"generators.torch is refused: {error}"
    try:
        np.random.RandomState(type(np.random.get_bit_generator())()).set_state(state["numpy"])  # pyright: ignore
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        yield f"generators.numpy is refused: {error}"
    (kind, own), here = _of_device(state, target), target.generator_state()
    if kind == target.kind and own is not None and here is not None and own.numel() != here.numel():
        yield f"generators.{'device' if 'device' in state else 'devices'} has a state of {own.numel()} B"
