"""PackedCall: a call on objects around tensors, as a call on these tensors; the target of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatrain.torch_private import pytree
from megatrain.tracer.calls import call_name, function_text
from megatrain.tracer.packed.packing import Packing, UnfollowedError, is_wrapper

Place = int | str
"""Of an argument: its position, or its name."""


class PackedCall:
    """Packs some arguments, calls a function on them, and takes apart what it returns.

    All tensors of a graph are plain ones. An argument that is an object around tensors is given as a tuple of these
    tensors; the same object is made of them before the call, so the class's own code runs in each step.

    Args:
        function: What the user's code called.
        packings: By place: the form of the arguments to pack.
        handler: The class whose `__torch_function__` torch would ask at this call, if there is one.
    """

    def __init__(self, function: Callable[..., Any], packings: Mapping[Place, Packing], handler: Any = None):
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
        return unpacked(self.result(*args, **kwargs))

    def result(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the call; returns what the function returned."""
        return self._result({**dict(enumerate(args)), **kwargs}, len(args))

    def first_result(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the call, and looks whether it leaves the packed arguments as they were: each call gets new ones.

        Raises:
            UnfollowedError: If it changes one, other than by writing into a tensor.
        """
        everything: dict[Place, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = {place: everything[place] for place in self._packings}
        result = self._result(everything, len(args))
        for place, packing in self._packings.items():
            now = Packing.of(everything[place])
            held = [] if now is None else [tensor for _, tensor in now.tensors(everything[place])]
            is_same = len(held) == len(tensors[place]) and all(
                a is b for a, b in zip(held, tensors[place], strict=True)
            )
            if now is None or now.key != packing.key or not is_same:
                raise UnfollowedError(
                    f"changes the {packing.kind.__qualname__} that it gives to a call",
                    "Each call gets a new one, around the streamed tensors, so a change would be lost.",
                    "Quantize the weights by another method, or load them in bf16 or fp32.",
                )
        return result

    def _result(self, everything: dict[Place, Any], num_args: int) -> Any:
        for place, packing in self._packings.items():
            everything[place] = packing.packed(iter(everything[place]))
        args = tuple(everything[index] for index in range(num_args))
        kwargs = {str(name): value for name, value in everything.items() if isinstance(name, str)}
        if self._handler is None:
            return self._function(*args, **kwargs)
        return self._handler.__torch_function__(self._function, (self._handler,), args, kwargs)

    def apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with the tensors of each packed one in its place, as a tuple."""
        everything: dict[Place, Any] = {**dict(enumerate(args)), **kwargs}
        for place, packing in self._packings.items():
            everything[place] = tuple(tensor for _, tensor in packing.tensors(everything[place]))
        return tuple(everything[index] for index in range(len(args))), {name: everything[name] for name in kwargs}

    def call_text(self, arguments: str) -> str:
        """Prints the call on arguments that are printed already."""
        return f"packed {function_text(self._function)}({arguments})"


def unpacked(result: Any) -> Any:
    """Returns a call's result with the inner tensors of each wrapper in its place, as a tuple."""

    def apart(leaf: Any) -> Any:
        packing = Packing.of(leaf) if is_wrapper(leaf) else None
        return leaf if packing is None else tuple(tensor for _, tensor in packing.tensors(leaf))

    return pytree.tree_map(apart, result)


def wrappers_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Lists the wrappers among values."""
    return [value for value in values if is_wrapper(value)]
