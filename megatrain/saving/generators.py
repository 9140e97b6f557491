"""Generators: the state of all global random generators as a value that a checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megatrain.checks import shown
from megatrain.device import Cuda, Device, present_accelerator
from megatrain.errors import CheckpointError
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


def generators_now() -> dict[str, Any]:
    """Reads torch's generators, of the CPU and of each device of the accelerator, Python's and NumPy's.

    Raises:
        CheckpointError: If the accelerator doesn't give the state of its generators.
    """
    accelerator = present_accelerator()
    return {
        "torch": torch.get_rng_state(),
        "devices": None if accelerator is None else {"type": accelerator.kind, "states": _states(accelerator)},
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def check_generators(state: dict[str, Any]) -> None:
    """Tells whether this machine has the generators of a state.

    Args:
        state: From `generators_now`, of this version or an earlier one.

    Raises:
        CheckpointError: If it isn't such a state, or this machine has another kind or number of accelerators.
    """
    wrong = problems(_OLD_STATE if Cuda.name in state else _STATE, state, "generators") or list(_refused(state))
    if wrong:
        raise CheckpointError(
            "\n  ".join(
                [
                    f"the checkpoint's random states are invalid, in {len(wrong)} places.",
                    *wrong,
                    "Random states must be a result of generators_now().",
                    "Load an older checkpoint, or seed anew with torch.manual_seed.",
                ]
            )
        )
    kind, states = _of_devices(state)
    here = present_accelerator()
    count = len(_states(here)) if states and here is not None and kind == here.kind else 0
    if states and len(states) != count:
        found = f"{count} {kind.upper()} devices" if count else "none of that kind"
        raise CheckpointError(
            f"the checkpoint has random states of {len(states)} {kind.upper()} devices, this machine has {found}.\n"
            "  Each device draws from its own generator, so the numbers would differ.\n"
            "  Resume with the same number of devices, or seed anew with torch.manual_seed."
        )


def restore_generators(state: dict[str, Any]) -> None:
    """Sets all generators to states from `generators_now`.

    Raises:
        CheckpointError: As `check_generators`, before anything is set.
    """
    check_generators(state)
    torch.set_rng_state(state["torch"])
    _, states = _of_devices(state)
    here = present_accelerator()
    if states and here is not None:
        here.set_generator_states(states)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


# -- devices -------------------------------------------------------------------------------------------------------


def _states(accelerator: Device) -> list[torch.Tensor]:
    """Reads the generator of each device of a kind on this machine."""
    states = accelerator.generator_states()
    if states is not None:
        return states
    raise CheckpointError(
        f"torch.{accelerator.kind} doesn't give the state of its random generators.\n"
        "  A resumed run would draw other numbers, without an error.\n"
        "  Leave generators_now() out of the checkpoint and seed anew after loading, or train on another device."
    )


def _of_devices(state: dict[str, Any]) -> tuple[str, list[torch.Tensor]]:
    """The kind of the devices and their states; in the first schema they were CUDA's."""
    if Cuda.name in state:
        return Cuda.name, state[Cuda.name]
    return ("cpu", []) if state["devices"] is None else (state["devices"]["type"], state["devices"]["states"])


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
_DEVICES = record({"type": text("[a-z0-9]+", "a type of devices"), "states": listing(_bytes)})
_STATE = record({**_COMMON, "devices": optional(_DEVICES)})
_OLD_STATE = record({**_COMMON, Cuda.name: listing(_bytes)})


def _refused(state: dict[str, Any]) -> Iterator[str]:
    """Tries the states on generators that nobody draws from."""
    try:
        torch.Generator().set_state(state["torch"])
    except RuntimeError as error:
        yield f"generators.torch is refused: {error}"
    try:
        np.random.RandomState(type(np.random.get_bit_generator())()).set_state(state["numpy"])  # pyright: ignore
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        yield f"generators.numpy is refused: {error}"
    kind, states = _of_devices(state)
    here = present_accelerator()
    if states and here is not None and kind == here.kind:
        sizes = {own.numel() for own in _states(here)}
        yield from (f"generators.devices has a state of {s.numel()} B" for s in states if s.numel() not in sizes)
