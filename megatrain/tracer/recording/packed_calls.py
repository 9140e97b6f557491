"""How calls on packed parameters are recorded: with plain tensors, of which each call makes the packed ones again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megatrain.base.torch_private import pytree
from megatrain.tracer.calls import call_name, function_text
from megatrain.tracer.packing import PackedState, Packing, is_wrapper, registered
from megatrain.tracer.recording.obstacles import Obstacle, refuse

Place = int | str
"""Of an argument: its position, or its name."""


def check_opaque(state: PackedState, name: str, module: nn.Module, reason: str) -> None:
    """Refuses a module that runs its own code, if it holds a stand-in: it is given plain tensors."""
    packed = set(map(id, state.stand_ins.values()))
    if any(id(tensor) in packed for _, tensor in registered(module)):
        raise Obstacle(  # the reason has the user's line
            f"holds packed (quantized) weights in `{name or 'the model'}`, a module that runs its own code because "
            f"it {reason}",
            "The weights of such a module are given to it as plain tensors, and packed ones aren't plain.",
            "Quantize these weights by another method, or leave them in bf16 or fp32; on a CPU see docs/limits.md.",
        )


def packed_call(
    state: PackedState,
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    originals: Mapping[int, torch.Tensor],
) -> PackedCall | None:
    """Returns the call to record in place of a function's, if one of its arguments is packed."""
    given: dict[Place, Any] = {**dict(enumerate(args)), **kwargs}
    given = {p: originals.get(id(x), x) if isinstance(x, torch.Tensor) else x for p, x in given.items()}
    packings = {place: packing for place, value in given.items() if (packing := state.packing(value)) is not None}
    nested = _wrappers_in(pytree.tree_leaves([value for place, value in given.items() if place not in packings]))
    if nested:
        refuse(
            f"passes a {type(nested[0]).__qualname__} inside a list or another container to a call",
            "Packed weights are followed where they are arguments of their own.",
            "Pass the weights one by one, or their plain values.",
        )
    # A call of an autograd.Function isn't a torch function: no class is asked.
    is_function = getattr(function, "__name__", "") == "apply"
    handler = None if is_function else state.handler(given.values())
    if not packings and handler is None:
        return None
    _check_frozen(_wrappers_in(given.values()))
    return PackedCall(function, packings, handler)


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
