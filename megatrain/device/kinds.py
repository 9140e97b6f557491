"""Kinds of devices: the class of each kind, the device of a name, and the accelerator of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from megatrain.base.checks import Rule, checked, function
from megatrain.device.accelerator import Accelerator
from megatrain.device.cuda import Cuda
from megatrain.device.interface import Device, is_on_host
from megatrain.errors import OptionError


class Cpu(Device):
    """The host. There is only one, so every number means the same device."""

    can_bind = True
    has_inductor = True
    lock_bytes = 0

    def __init__(self, index: int | None = None) -> None:
        del index
        super().__init__(torch.device("cpu"))


HOST: Device = Cpu()
"""The host, for work that is the host's wherever blocks compute."""

_OWN: dict[str, Callable[[int | None], Device]] = {HOST.kind: Cpu, Cuda.name: Cuda}
_makers = dict(_OWN)
_KIND = Rule(
    "a name of lower-case letters",
    '{name}="toy"',
    lambda value: (
        None if isinstance(value, str) and value.isalpha() and value.islower() else "can't name a kind of device"
    ),
)


@checked(kind=_KIND, make=function(1))
def register(kind: str, make: Callable[[int | None], Device]) -> None:
    """Makes a kind of device known by name: `compile(device="toy")`, or `"toy:1"`.

    Args:
        kind: The name, of lower-case letters; one of torch's own kinds gets another class.
        make: The class, or a function; called with the number after the colon, or None.

    Raises:
        OptionError: If the kind is registered already.
    """
    if _makers.get(kind) is not _OWN.get(kind):
        raise OptionError(
            f'the kind of device "{kind}" is registered already.\n'
            "  A kind stands for one class, in the whole process.\n  Call unregister() with it first."
        )
    _makers[kind] = make


@checked(kind=_KIND)
def unregister(kind: str) -> None:
    """Forgets a kind that was registered; models that are compiled for it keep their device.

    Raises:
        OptionError: If it isn't registered.
    """
    if _makers.get(kind) is _OWN.get(kind):
        raise OptionError(
            f'the kind of device "{kind}" is not registered.\n'
            "  A kind has the name that was passed to register().\n  Give that name."
        )
    del _makers[kind]
    if kind in _OWN:
        _makers[kind] = _OWN[kind]


def find(given: Device | torch.device | str | int | None) -> Device:
    """Returns the device of a name; None means the accelerator if there is one that lacks nothing, else the CPU.

    An accelerator without a number is the current one of its kind. `find` doesn't check that a named device exists.

    Raises:
        RuntimeError: If torch has no device of that name.
    """
    if given is None:
        present = present_accelerator()
        return HOST if present is None or present.lacking() else present
    if isinstance(given, Device):
        return given
    kind, index = _named(given)
    return _makers.get(kind, partial(Accelerator, kind))(index)


def usable(given: Device | torch.device | str | None) -> Device:
    """Returns the device of a name, as `find`, for a run.

    Raises:
        OptionError: If it lacks something that a run needs.
    """
    found = find(given)
    missing = found.lacking()
    if missing:
        raise OptionError(
            f"device {found} lacks {', '.join(missing)}.\n"
            "  A run copies weights while it computes, within the free memory of the device, and repeats random "
            "numbers.\n"
            '  Use device="cpu", a CUDA device, or another accelerator for which torch has these.'
        )
    return found


def present_accelerator() -> Device | None:
    """The accelerator that this machine has, the current one if there are several; None without any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else find(found)


def take_accelerator(index: int) -> None:
    """Makes the accelerator of a number this process's current one; does nothing where there is none."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(index)


def num_accelerators() -> int:
    """How many accelerators this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def used_device(tensors: Iterable[torch.Tensor]) -> Device:
    """The device of the first tensor that an accelerator holds; the host if there is none."""
    return find(next((t.device for t in tensors if not (is_on_host(t) or t.is_meta)), HOST.torch_device))


def autocast_kinds() -> tuple[str, ...]:
    """Names under which `torch.autocast` may be on in this process; asks no driver for more than its presence."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (HOST.kind,) if found is None else (HOST.kind, found.type)


def fault_of_name(given: object) -> str | None:
    """Says why a value names no device, or None if it names one."""
    if not isinstance(given, Device | torch.device | str | int) or isinstance(given, bool):
        return "is not a device"
    try:
        if not isinstance(given, Device):
            _named(given)
    except (RuntimeError, ValueError, OverflowError):
        return "is not a device"
    return None


def fault(given: object) -> str | None:
    """Says why a value isn't a device of this machine, or None if it is one.

    A capture for a device that isn't there would end the process: torch's own kernels abort.
    """
    wrong = fault_of_name(given)
    if wrong is not None:
        return wrong
    assert isinstance(given, Device | torch.device | str | int)
    kind, index = (given.torch_device.type, given.torch_device.index) if isinstance(given, Device) else _named(given)
    if kind == "meta":
        return "has no values to compute with"
    if kind == HOST.kind or not _is_torchs(kind):
        return None
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind:
        return f"is not available here: there is {here or 'no accelerator'}"
    count = torch.accelerator.device_count()
    return f"is not available here: there are {count} of its kind" if (index or 0) >= count else None


def _is_torchs(kind: str) -> bool:
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def _named(given: torch.device | str | int) -> tuple[str, int | None]:
    """The kind and the number of a device; a user's own kind has no torch device of its name."""
    if isinstance(given, str):
        kind, _, number = given.partition(":")
        if kind in _makers.keys() - _OWN.keys():
            return kind, int(number) if number else None
    device = torch.device(given)
    return device.type, device.index
