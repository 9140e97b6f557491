"""TensorTable: which node of the graph stands for a tensor that the running forward holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import fx

from megatrain.torch_private import FakeTensor
from megatrain.tracer.recording.effect_watch import storage_key
from megatrain.tracer.spec import TensorSpec


class TensorTable:
    """Maps tensors to nodes by identity, and storages to numbers.

    Fake tensors are kept alive, so that no other object takes their identity. Real ones may be large: they are followed
    weakly and forgotten with the last name that the user's code, or the capture for a weight's values, has for them.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nodes: dict[int, fx.Node] = {}
        self._kept: dict[int, torch.Tensor | weakref.ref[torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 0
        self._stand_ins: list[torch.Tensor] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._names: dict[int, list[tuple[fx.Node, torch.Tensor | weakref.ref[torch.Tensor]]]] = {}

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Makes `node` the latest definition of `tensor` and describes the tensor in its meta."""
        kept = tensor if isinstance(tensor, FakeTensor) else self._followed(tensor)
        self._nodes[id(tensor)] = node
        self._kept[id(tensor)] = kept
        number = self._number(tensor)
        self._names[number].append((node, kept))
        node.meta.update(
            spec=TensorSpec.of(tensor, self._device),
            requires_grad=tensor.requires_grad,
            has_history=tensor.requires_grad,  # from the call itself; a later write may make it require a gradient
            storage=number,
            storage_bytes=tensor.untyped_storage().nbytes(),
        )

    def stand_in(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        """Lets `tensor` count as `original` wherever it appears: the same node, the same memory."""
        self._nodes[id(tensor)] = self._nodes[id(original)]
        self._kept[id(tensor)] = self._followed(tensor)
        self.stand_in_memory(tensor, original)

    def stand_in_memory(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        """Lets the memory of `tensor` count as that of `original`."""
        key = storage_key(original)
        if key in self._numbers:
            self._enter(tensor, self._numbers[key])
            if isinstance(tensor, FakeTensor):
                self._stand_ins.append(tensor)

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        """Returns the latest node of a tensor, or None if it was never bound."""
        return self._nodes.get(id(tensor))

    def latest(self, tensor: torch.Tensor) -> fx.Node:
        """Returns the latest node of a tensor that was bound."""
        return self._nodes[id(tensor)]

    def knows_storage(self, key: int) -> bool:
        """Tells whether a bound tensor lies in that storage."""
        return key in self._numbers

    def names(self, key: int) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """Lists what is bound in a storage and still held by somebody, in order of binding."""
        for node, kept in self._names.get(self._numbers.get(key, -1), ()):
            tensor = kept() if isinstance(kept, weakref.ref) else kept
            if tensor is not None:
                yield node, tensor

    def made(self) -> Iterator[tuple[torch.Tensor, fx.Node]]:
        """Lists the fake tensors, with the node of each."""
        for identity, kept in self._kept.items():
            if isinstance(kept, FakeTensor):
                yield kept, self._nodes[identity]

    def forget(self) -> None:
        """Lets go of all tensors, when the capture is over."""
        for table in (self._nodes, self._kept, self._names):
            table.clear()
        self._storages.clear()
        self._stand_ins.clear()

    def _followed(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        identity = id(tensor)

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if self._kept.get(identity) is reference:
                del self._kept[identity], self._nodes[identity]

        return weakref.ref(tensor, forget)

    def _number(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        if key not in self._numbers:
            self._enter(tensor, self._next_number)
            self._names[self._next_number] = []
            self._next_number += 1
        return self._numbers[key]

    def _enter(self, tensor: torch.Tensor, number: int) -> None:
        """Gives the storage of `tensor` a number, for as long as it lives."""
        key, numbers = storage_key(tensor), self._numbers
        numbers[key] = number
        if not isinstance(tensor, FakeTensor):
            self._storages[key] = weakref.ref(tensor.untyped_storage(), lambda _: numbers.pop(key, None))
