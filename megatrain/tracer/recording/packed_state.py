"""PackedState: what stands for a model's packed parameters during a capture, and how calls on them are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatrain.errors import TraceError
from megatrain.torch_private import FakeTensorMode, pytree
from megatrain.tracer.calls import call_name, function_text
from megatrain.tracer.packing import Packing, attribute_packings, is_wrapper
from megatrain.tracer.recording.obstacles import Obstacle, refuse

Place = int | str
"""Of an argument: its position, or its name."""


def registered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Lists a model's parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class PackedState:
    """Stand-ins of packed parameters, around the fake tensors that stand for their inner tensors.

    Attributes:
        stand_ins: By the id of the registered tensor.

    Raises:
        TraceError: If no stand-in can be made, on this device.
    """

    def __init__(
        self, model: nn.Module, fakes: Mapping[int, torch.Tensor], fake_mode: FakeTensorMode, device: torch.device
    ) -> None:
        self._fakes, self._fake_mode, self._device = dict(fakes), fake_mode, device
        self.stand_ins: dict[int, torch.Tensor] = {}
        self._objects: dict[int, tuple[Any, Packing]] = {}
        self._handlers: dict[int, tuple[torch.Tensor, type]] = {}
        for name, tensor in registered(model):
            if is_wrapper(tensor):
                self.stand_ins[id(tensor)] = self._wrapper(name, tensor)
            else:
                self._attributes(tensor)
        pairs = [(name, self.stand_ins[id(t)], t) for name, t in registered(model) if id(t) in self.stand_ins]
        # The stand-ins' attributes as they were made: a forward must leave them so.
        self._made = [(name, stand_in, _held(stand_in, vars(tensor))) for name, stand_in, tensor in pairs]

    def forget(self) -> None:
        """Lets go of all tensors, when the capture is over."""
        for kept in (self.stand_ins, self._made, self._objects, self._handlers, self._fakes):
            kept.clear()

    def check_unchanged(self) -> None:
        """Checks, after the forward, that it has left the packed parameters as they were."""
        for name, stand_in, before in self._made:
            now = _held(stand_in, before)
            changed = sorted(key for key in before if before[key] != now[key])
            if changed:
                raise TraceError(
                    f"the forward changes the attribute `{changed[0]}` of the packed parameter `{name}`.\n"
                    "  A packed parameter stays as it is: its inner tensors are streamed, and a change would be lost.\n"
                    "  Use quantized layers that only read their weights in the forward (torchao's int8, bitsandbytes' "
                    "4-bit)."
                )

    def check_opaque(self, name: str, module: nn.Module, reason: str) -> None:
        """Refuses a module that runs its own code, if it holds a stand-in: it is given plain tensors."""
        packed = set(map(id, self.stand_ins.values()))
        if any(id(tensor) in packed for _, tensor in registered(module)):
            raise Obstacle(  # the reason has the user's line
                f"holds packed (quantized) weights in `{name or 'the model'}`, a module that runs its own code because "
                f"it {reason}",
                "The weights of such a module are given to it as plain tensors, and packed ones aren't plain.",
                "Quantize these weights by another method, or leave them in bf16 or fp32; on a CPU see docs/limits.md.",
            )

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], originals: Mapping[int, torch.Tensor]
    ) -> PackedCall | None:
        """Returns the call to record in place of a function's, if one of its arguments is packed.

        Raises:
            Obstacle: If a packed argument is inside a list, or has a gradient.
        """
        given: dict[Place, Any] = {**dict(enumerate(args)), **kwargs}
        given = {p: originals.get(id(x), x) if isinstance(x, torch.Tensor) else x for p, x in given.items()}
        packings = {place: packing for place, value in given.items() if (packing := self._packing(value)) is not None}
        nested = _wrappers_in(pytree.tree_leaves([value for place, value in given.items() if place not in packings]))
        if nested:
            refuse(
                f"passes a {type(nested[0]).__qualname__} inside a list or another container to a call",
                "Packed weights are followed where they are arguments of their own.",
                "Pass the weights one by one, or their plain values.",
            )
        # A call of an autograd.Function isn't a torch function: no class is asked.
        is_function = getattr(function, "__name__", "") == "apply"
        asked = map(self._handlers.get, map(id, () if is_function else given.values()))
        handler = next((found[1] for found in asked if found is not None), None)
        if not packings and handler is None:
            return None
        _check_frozen(_wrappers_in(given.values()))
        return PackedCall(function, packings, handler)

    def _packing(self, value: Any) -> Packing | None:
        if is_wrapper(value):
            return Packing.of(value)
        known = self._objects.get(id(value))
        return None if known is None else known[1]

    def _around_fakes(self, packing: Packing, value: Any) -> Any:
        return packing.packed(iter([self._fakes[id(inner)] for _, inner in packing.tensors(value)]))

    def _wrapper(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        packing = Packing.of(tensor)
        assert packing is not None
        stand_in = self._around_fakes(packing, tensor)
        if stand_in.device != self._device:
            stand_in = self._moved(name, tensor, packing)
        attributes = vars(stand_in)
        attributes.update({key: value for key, value in vars(tensor).items() if key not in attributes})
        return stand_in

    def _moved(self, name: str, tensor: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Makes the stand-in of a wrapper whose form says on which device it is, as `.to` does."""
        inner = [t for _, t in packing.tensors(tensor)]
        with self._fake_mode, torch.no_grad():
            here = packing.packed(iter([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inner]))
            there = here.to(self._device)
        moved = Packing.of(there) if is_wrapper(there) else None
        if moved is not None and [p for p, _ in moved.tensors(there)] == [p for p, _ in packing.tensors(tensor)]:
            stand_in = moved.packed(iter([self._fakes[id(t)] for t in inner]))
            if stand_in.device == self._device:
                return stand_in
        raise TraceError(
            f"parameter `{name}` is a {type(tensor).__qualname__}, which can't be brought to {self._device}.\n"
            "  Its inner tensors are streamed to the device, and the class makes a weight of them there.\n"
            "  Compute on the CPU, or load this weight in bf16 or fp32."
        )

    def _attributes(self, tensor: torch.Tensor) -> None:
        packings = attribute_packings(tensor)
        if not packings:
            return
        stand_in = self.stand_ins[id(tensor)] = self._fakes[id(tensor)]
        for name, packing in packings.items():
            value = vars(tensor)[name]
            vars(stand_in)[name] = self._fakes[id(value)] if packing is None else self._around_fakes(packing, value)
            if packing is not None:
                self._note_object(vars(stand_in)[name], packing)
        kind: Any = type(tensor)
        if kind.__torch_function__ is not nn.Parameter.__torch_function__:
            self._handlers[id(stand_in)] = (stand_in, kind)

    def _note_object(self, value: Any, packing: Packing) -> None:
        self._objects[id(value)] = (value, packing)
        for name, inner in packing.inner:
            if inner is not None:
                self._note_object(getattr(value, name), inner)


def _held(stand_in: torch.Tensor, names: Iterable[str]) -> dict[str, Any]:
    """What a stand-in holds under these names, in values that compare: identities of tensors, keys of objects."""
    return {name: _told(vars(stand_in).get(name)) for name in names}


def _told(value: Any) -> Any:
    packing = None if isinstance(value, torch.Tensor) else Packing.of(value)
    if packing is None:
        return type(value), id(value)
    return packing.key, [id(tensor) for _, tensor in packing.tensors(value)]


def check_run(run: Any) -> None:
    """Refuses a call of an autograd.Function whose forward torch has begun to run: its arguments can't be made anew."""
    if run is not None:
        refuse(
            "calls an autograd.Function on packed weights through an `apply` that it looked up earlier",
            "A capture follows such a call only where `apply` is looked up in the forward.",
            "Call `Function.apply` in the forward.",
        )


def unpacked_result(result: Any, *, is_random: bool) -> tuple[Any, Any]:
    """Takes the wrappers in a call's result apart; `is_random` tells whether the call drew random numbers.

    Returns:
        The result of plain tensors; and the result itself if that isn't the same, else None.

    Raises:
        Obstacle: If a wrapper in it has a gradient, or random values.
    """
    wrappers = _wrappers_in(pytree.tree_leaves(result))
    if not wrappers:
        return result, None
    _check_frozen(wrappers)
    if is_random:
        refuse(
            f"draws random numbers into a {type(wrappers[0]).__qualname__}",
            "A graph draws into plain tensors.",
            "Draw a plain tensor first, and make the packed one of it.",
        )
    return _unpacked(result), result


def _check_frozen(wrappers: Iterable[torch.Tensor]) -> None:
    for wrapper in wrappers:
        if wrapper.requires_grad:
            refuse(
                f"computes a {type(wrapper).__qualname__} that requires a gradient",
                "A graph knows the plain tensors inside, and gradients flow through the object around them.",
                "Detach it, or compute with plain tensors.",
            )


class PackedCall:
    """Packs some arguments, calls a function on them, and takes apart what it returns; the target of a graph node.

    All tensors of a graph are plain ones. An argument that is an object around tensors is given as a tuple of these
    tensors; the same object is made of them before the call, so the class's own code runs in each step.

    Args:
        packings: By place: the form of the arguments to pack.
        handler: The class whose `__torch_function__` torch would ask at this call, if there is one.
    """

    def __init__(self, function: Callable[..., Any], packings: Mapping[Place, Packing], handler: Any):
        self._function = function
        self._packings = dict(packings)
        self._handler = handler
        self._key = function, handler, tuple((place, packing.key) for place, packing in self._packings.items())
        self.__name__ = f"packed {call_name(function)}"
        # What asks a node for the class whose method it calls finds it.
        self.__self__ = getattr(function, "__self__", None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedCall) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the call; returns plain tensors, those of a wrapper as a tuple."""
        return _unpacked(self._made(args, kwargs)[0])

    def first_result(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the call, and looks whether it leaves the packed arguments as they were: each call gets new ones.

        Raises:
            Obstacle: If it changes one, other than by writing into a tensor.
        """
        result, packed = self._made(args, kwargs)
        for place, packing in self._packings.items():
            now, tensors = Packing.of(packed[place]), args[place] if isinstance(place, int) else kwargs[place]
            held = [] if now is None else [tensor for _, tensor in now.tensors(packed[place])]
            is_same = len(held) == len(tensors) and all(a is b for a, b in zip(held, tensors, strict=True))
            if now is None or now.key != packing.key or not is_same:
                refuse(
                    f"changes the {packing.kind.__qualname__} that it gives to a call",
                    "Each call gets a new one, around the streamed tensors, so a change would be lost.",
                    "Quantize the weights by another method, or load them in bf16 or fp32.",
                )
        return result

    def _made(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[Place, Any]]:
        """Returns the function's result, and the packed arguments."""
        given = {place: args[place] if isinstance(place, int) else kwargs[place] for place in self._packings}
        packed = {place: self._packings[place].packed(iter(tensors)) for place, tensors in given.items()}
        args, kwargs = _replaced(args, kwargs, packed)
        if self._handler is None:
            return self._function(*args, **kwargs), packed
        return self._handler.__torch_function__(self._function, (self._handler,), args, kwargs), packed

    def apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with the tensors of each packed one in its place, as a tuple."""
        given = {place: args[place] if isinstance(place, int) else kwargs[place] for place in self._packings}
        apart = {p: tuple(tensor for _, tensor in self._packings[p].tensors(x)) for p, x in given.items()}
        return _replaced(args, kwargs, apart)

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        return f"packed {function_text(self._function)}({arguments})"


def _replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], others: Mapping[Place, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    left = {name: others.get(name, value) for name, value in kwargs.items()}
    return tuple(others.get(place, value) for place, value in enumerate(args)), left


def _unpacked(result: Any) -> Any:
    """Returns a call's result with the inner tensors of each wrapper in its place, as a tuple."""

    def apart(leaf: Any) -> Any:
        packing = Packing.of(leaf) if is_wrapper(leaf) else None
        return leaf if packing is None else tuple(tensor for _, tensor in packing.tensors(leaf))

    return pytree.tree_map(apart, result)


def _wrappers_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if is_wrapper(value)]
