"""trace(): captures any nn.Module by running its own forward once on fake state."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import checked, optional
from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_features import check_torch
from megatrain.device import HOST, Device, find, is_on_host
from megatrain.errors import TraceError
from megatrain.tracer.arguments import Arguments, holds_tensors, is_plain
from megatrain.tracer.inventory import check_plain_state
from megatrain.tracer.python.followed_numbers import DecidedError
from megatrain.tracer.recording.capture import Capture
from megatrain.tracer.recording.module_calls import with_backward_hooks
from megatrain.tracer.recording.obstacles import Attempt, Obstacle, StartAgainError
from megatrain.tracer.recording.opaque import Observer, Opaque
from megatrain.tracer.recording.random_numbers import HostRng
from megatrain.tracer.source_line import original
from megatrain.tracer.spec import DEVICE, EXAMPLE_ARGS, EXAMPLE_KWARGS, MODEL, TensorSpec
from megatrain.tracer.traced import TracedModule

# One capture at a time in a process; other threads go on with whatever else they do.
_capturing = threading.RLock()


@checked(model=MODEL, args=EXAMPLE_ARGS, kwargs=EXAMPLE_KWARGS, device=optional(DEVICE))
def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: Device | torch.device | str | None = None,
    opaque: Mapping[str, str] | None = None,
) -> TracedModule:
    """Captures one call `model(*args, **kwargs)` as a flat graph of torch calls.

    The model's own forward runs with fake parameters and buffers (nothing is allocated, models on the meta device
    work) and clones of the inputs. A value that Python code reads from the inputs becomes a guard. If Python code reads
    values that depend on weights or random numbers, the forward runs again on the weights' values, and each such read
    becomes a check in the graph. A module that no graph can repeat becomes opaque: one node that runs its own code. The
    model, its buffers and every random generator are left as they were.

    Args:
        model: Any module; its parameters may be real or on the meta device.
        args: Example positional arguments; tensors on `device`, on meta, or on the CPU where eager takes them there.
        kwargs: Example keyword arguments, likewise.
        device: Compute device of the graph; default: that of the first input that isn't on the CPU or meta, else
            the CPU.
        opaque: Modules to make opaque from the start, with the reason; by name.

    Returns:
        The capture, checked.

    Raises:
        OptionError: If an option isn't what it may be.
        TorchError: If this version of torch can't be used.
        TraceError: If the forward can't be captured faithfully. The model's own exceptions pass unchanged.
    """
    model = original(model)
    arguments = Arguments.of(model, tuple(args), dict(kwargs or {}))
    target = find(device).torch_device if device is not None else device_of(arguments)
    return traced_call(model, arguments, target, opaque)


def traced_call(
    model: nn.Module, arguments: Arguments, target: torch.device, opaque: Mapping[str, str] | None = None
) -> TracedModule:
    """Captures a call of a model itself; a DecidedError if Python decides on a number that a tensor holds."""
    check_torch()
    check_arguments(arguments)
    check_plain_state(model)
    opaque = {**with_backward_hooks(model), **(opaque or {})}
    attempt = Attempt(opaque=opaque, uses_values=arguments.follows_reads, follows_reads=arguments.follows_reads)
    # What a capture puts in place and takes back is whole, wherever Ctrl-C comes; the model's own code it ends at once.
    with _capturing, Interrupts() as interrupts:
        try:
            traced = _captured(model, arguments, target, attempt, interrupts)
        except RuntimeError as error:
            note_host_inputs(error, arguments, target)
            raise
    traced.check()
    return traced


def _captured(
    model: nn.Module, arguments: Arguments, device: torch.device, attempt: Attempt, interrupts: Interrupts
) -> TracedModule:
    """Makes attempts until one succeeds; draws of other threads from Python's and NumPy's generators stay drawn."""
    host = latest = HostRng.now()
    is_others = False
    try:
        while True:
            if HostRng.now() != host:
                latest = HostRng.now()
                host.restore()  # else a model that seeds might leave what it finds, as if it hadn't touched it
            made: list[Capture] = []
            try:
                made.append(Capture(model, arguments, device, attempt, interrupts))
                traced = made[0].run()
                # Without code of the user's that runs again the last attempt drew nothing, and so none before it did.
                is_others = not any(isinstance(node.target, Opaque | Observer) for node in traced.graph.nodes)
                made[0].check_over()
                return traced
            except StartAgainError as error:
                attempt = attempt.again(**error.changes)
            except torch.OutOfMemoryError as error:
                attempt.note_memory(error)
                raise
            except Exception as error:
                attempt = _following(error, attempt, model, has_recalled=any(each.has_recalled for each in made))
    finally:
        if not is_others:
            host.restore()
        elif HostRng.now() == host:
            latest.restore()  # drawn by others during an earlier attempt


def _following(error: Exception, attempt: Attempt, model: nn.Module, *, has_recalled: bool) -> Attempt:
    """Returns the attempt that follows one that has failed.

    What the user gets is what a capture raises that runs every call, whatever an equal call would have done.
    """
    following = attempt.after(error, model) if isinstance(error, Obstacle) else None
    if following is None and has_recalled and not isinstance(error, DecidedError):
        following = attempt.again(recalls=False)
    if following is not None:
        return following
    if isinstance(error, Obstacle):
        raise (error.cause or TraceError(str(error))) from None
    raise error


# Arguments that a capture refuses, and where they are.


def check_arguments(arguments: Arguments) -> None:
    """Refuses what may hide tensors, or change unseen between calls."""
    for name, leaf in zip(arguments.leaf_names, arguments.leaves, strict=True):
        if is_plain(leaf):
            continue
        if isinstance(leaf, torch.Generator):
            raise TraceError(
                f"the argument `{name}` is a torch.Generator, from which the model would draw.\n"
                "  A recompute restores only the default generators.\n"
                "  Leave it out, or draw from it before the call and pass the numbers. Under torch.no_grad() a model "
                "takes it."
            )
        if holds_tensors(leaf):
            raise TraceError(
                f"the argument `{name}` is a {type(leaf).__qualname__} with tensors in it.\n"
                "  Inputs are found in tuples, lists, dicts, UserDicts and classes known to torch.utils._pytree.\n"
                "  Pass the tensors themselves, or register the class. Under torch.no_grad() a compiled model takes "
                "any object, such as a cache."
            )
        raise TraceError(
            f"the argument `{name}` is a {type(leaf).__qualname__}, which may change between calls.\n"
            "  A capture stands for calls with equal arguments: plain values, dtypes, devices and enums compare.\n"
            "  Pass plain values or tensors instead of this object. Under torch.no_grad() a compiled model takes any "
            "object, such as a cache."
        )


def note_host_inputs(error: Exception, arguments: Arguments, device: torch.device) -> None:
    """Notes on an error of the model's own code which inputs are on the host, where it may have wanted them elsewhere.

    Args:
        error: What torch raised at a call of the model's; only one about devices gets a note.
    """
    specs = zip(arguments.names, (TensorSpec.of(t, device) for t in arguments.tensors), strict=True)
    names = [f"`{name}`" for name, spec in specs if spec.on_host]
    if names and "device" in str(error):
        error.add_note(
            f"on the CPU: {', '.join(names)}; the model computes on {device}.\n"
            "  An input on the CPU stays there, as in eager, for calls that take it there.\n"
            f'  Move what the model uses on the device with .to("{device}").'
        )


def device_of(arguments: Arguments) -> torch.device:
    """Returns the device of the first real input that isn't on the host, else the CPU."""
    places = (t.device for t in arguments.tensors if not t.is_meta and not is_on_host(t))
    return next(places, HOST.torch_device)
