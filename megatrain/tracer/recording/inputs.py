"""The inputs of a capture: which are refused, how they enter the graph, and what a forward writes into them."""

from __future__ import annotations

from enum import Enum

import torch

from megatrain.device import HOST, Device, is_on_host
from megatrain.errors import ExecuteError, TraceError
from megatrain.torch_private import FakeTensorMode
from megatrain.tracer.arguments import Arguments, HeldNumber, holds_tensors
from megatrain.tracer.recording.obstacles import Attempt
from megatrain.tracer.recording.recorder import Recorder
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import WrittenInputs
from megatrain.tracer.user_dicts import IMMUTABLE


def is_plain(leaf: object) -> bool:
    """Tells whether a capture can stand for calls with this argument: a tensor, or a value that never changes."""
    return isinstance(leaf, (torch.Tensor, Enum, HeldNumber, *IMMUTABLE))


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


def check_device(arguments: Arguments, device: Device) -> None:
    """Refuses a call whose tensors are neither where it computes nor on the host.

    Whether the model takes a tensor of the host as it is, a capture finds out: the model's own calls do or don't.
    """
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if tensor.device != device.torch_device and not is_on_host(tensor):
            raise ExecuteError(
                f"input `{name}` is on {tensor.device}, the compute device is {device}.\n"
                "  Inputs must be on the compute device, as for any module on that device, or on the CPU.\n"
                f'  Move it with .to("{device.torch_device}").'
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


def bind_inputs(
    recorder: Recorder, arguments: Arguments, fake_mode: FakeTensorMode, device: torch.device, attempt: Attempt
) -> tuple[list[torch.Tensor], WrittenInputs]:
    """Makes a placeholder for each input; returns what the forward gets, and which of it are copies for writing."""
    given: list[torch.Tensor] = []
    names: list[str] = []
    indices: list[int] = []
    for index, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True)):
        node = recorder.tape.graph.create_node("placeholder", name, name=name)
        given.append(_copied(tensor, fake_mode, device, uses_values=attempt.uses_values))
        recorder.tape.bind_input(given[-1], node)
        if node.name in attempt.written_inputs:
            names.append(name)
            indices.append(index)
    for index in indices:
        given[index] = recorder.record(torch.Tensor.clone, (given[index],), {})
    return given, WrittenInputs(tuple(names), tuple(indices))


def _copied(
    tensor: torch.Tensor, fake_mode: FakeTensorMode, device: torch.device, *, uses_values: bool
) -> torch.Tensor:
    if not tensor.is_meta and (uses_values or not tensor.requires_grad):
        return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)
    place = device if tensor.is_meta else tensor.device
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    return fake.requires_grad_(tensor.requires_grad)
