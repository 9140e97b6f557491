"""The inventory of a model's state: parameters and buffers, with ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from megatrain.tracer.packing import taken_apart
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One parameter, buffer or constant of the model.

    Args:
        key: Its first fully qualified name.
        kind: `"parameter"`, `"buffer"` or `"constant"` (a tensor that is read and that no module registers).
        ties: The other names of the same tensor; for a part, of the whole.
        packed_in: For the tensors of a packed parameter: the key of what the model registers.
        base: For a part of a tensor: the key of the whole, which is what the model registers.
        rows: For a part: its first row along the first dimension, and the row after its last.
    """

    key: str
    kind: str
    spec: TensorSpec
    requires_grad: bool
    ties: tuple[str, ...] = ()
    persistent: bool = True
    packed_in: str | None = None
    base: str | None = None
    rows: tuple[int, int] = (0, 0)

    @property
    def owner(self) -> str:
        """The key of the registered tensor that holds it."""
        return self.base or self.key

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns its tensor, given the registered ones by key."""
        whole = tensors[self.owner]
        return whole if self.base is None else whole[slice(*self.rows)]

    def part(self, start: int, end: int) -> StateEntry:
        """Describes rows `start` to `end` (exclusive) as state of their own, `weight[0:64]`."""
        assert self.spec.stride is None
        spec = TensorSpec((end - start, *self.spec.shape[1:]), self.spec.dtype)
        return replace(self, key=f"{self.key}[{start}:{end}]", spec=spec, base=self.key, rows=(start, end))

    @property
    def is_writable(self) -> bool:
        """Whether a forward may write into it: buffers, and parameters that aren't trained (a moving average)."""
        return self.kind == "buffer" or (self.kind == "parameter" and not self.requires_grad)


def inventory(module: nn.Module) -> tuple[dict[str, StateEntry], dict[str, torch.Tensor]]:
    """Lists the registered state of `module`: plain tensors, and the inner tensors of packed ones.

    Returns:
        The entries and the tensors, both by key, in registration order, each tensor once.

    Raises:
        TraceError: If a packed parameter can't be taken apart.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    homes: dict[int, str] = {}
    for kind, named in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            found = taken_apart(name, tensor)
            for path, inner in found:
                names.setdefault(id(inner), []).append(".".join((name, *path)))
                tensors.setdefault(id(inner), (kind, inner))
                if len(found) > 1 or inner is not tensor:
                    homes.setdefault(id(inner), name)
    transient = _non_persistent(module)
    entries: dict[str, StateEntry] = {}
    for identity, (kind, tensor) in tensors.items():
        key, *ties = names[identity]
        spec = TensorSpec.of(tensor)
        home = homes.get(identity)
        persistent = (home or key) not in transient
        entries[key] = StateEntry(key, kind, spec, tensor.requires_grad, tuple(ties), persistent, home)
    return entries, {names[identity][0]: tensor for identity, (_, tensor) in tensors.items()}


def first_packed(entries: Mapping[str, StateEntry]) -> str | None:
    """Returns the name of the first packed parameter or buffer; None if all are plain."""
    return next((entry.packed_in for entry in entries.values() if entry.packed_in is not None), None)


def _non_persistent(module: nn.Module) -> set[str]:
    found: set[str] = set()
    for prefix, child in module.named_modules():
        hidden = child._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  # no public list exists
        found.update(f"{prefix}.{name}" if prefix else name for name in hidden)
    return found


class StateValues:
    """Gives the values behind fake state, on the device of the capture.

    Parameters are aliased, or copied to the device while they are in use; buffers are copied once, because a forward
    may write into them.
    """

    def __init__(
        self,
        fakes: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        entries: Mapping[str, StateEntry],
    ):
        self._sources = {id(fake): (fake, tensors[key]) for key, fake in fakes.items()}
        self._parameters = {id(fake) for key, fake in fakes.items() if entries[key].kind == "parameter"}
        self._values: dict[int, torch.Tensor] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self.is_used = False

    def forget(self) -> None:
        """Lets go of all tensors, when the capture is over."""
        self._sources.clear()
        self._values.clear()
        self._leaves.clear()

    def has(self, tensor: torch.Tensor) -> bool:
        """Tells whether this is a fake state tensor, not one that stands for an input without values."""
        return id(tensor) in self._sources

    def value(self, fake: torch.Tensor, refuse: Callable[[], NoReturn] | None = None) -> torch.Tensor:
        """Returns the values of one fake state tensor, with its `requires_grad`.

        Args:
            refuse: Called by a backward that reaches a copy of a parameter, and raises. Autograd's graph doesn't hold
                such a copy. With None the copy is a leaf, for a backward to reach.
        """
        self.is_used = True
        if id(fake) not in self._values:
            _, source = self._sources[id(fake)]
            value = source.detach()
            if id(fake) not in self._parameters:
                value = value.clone(memory_format=torch.preserve_format)
            value = value.to(fake.device)
            if refuse is not None and fake.requires_grad and value.device != source.device:
                value = with_own_history(value, refuse)
            self._values[id(fake)] = value.requires_grad_(fake.requires_grad)
        return self._values[id(fake)]

    def is_value(self, tensor: torch.Tensor, fake: torch.Tensor) -> bool:
        """Tells whether a tensor is the one that `value` gave for a fake one."""
        return self._values.get(id(fake)) is tensor

    def leaf(self, fake: torch.Tensor) -> torch.Tensor:
        """Returns the same values in a leaf of autograd's graph, for code that may run a backward."""
        value = self.value(fake)
        if value.is_leaf:
            return value
        if id(fake) not in self._leaves:
            self._leaves[id(fake)] = value.detach().requires_grad_()
        return self._leaves[id(fake)]

    def is_shared(self, fake: torch.Tensor) -> bool:
        """Tells whether the values of this fake tensor are the model's own, not to be written into."""
        return self.is_used and id(fake) in self._parameters

    def let_go(self) -> None:
        """Frees the copies of parameters on a device other than the host."""
        for identity, (_, source) in self._sources.items():
            value = self._values.get(identity)
            if value is not None and value.device != source.device and identity in self._parameters:
                del self._values[identity]
                self._leaves.pop(identity, None)


def with_own_history(value: torch.Tensor, refuse: Callable[[], NoReturn]) -> torch.Tensor:
    """Gives `value`, which has no history, one that holds no memory: a graph of autograd would hold a leaf."""
    with torch.enable_grad():
        return _History.apply(torch.zeros((), requires_grad=True), [value], refuse)


class _History(torch.autograd.Function):
    """Returns a tensor that isn't an argument of the call, so that the graph doesn't hold it."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, held: list[torch.Tensor], refuse: Callable[[], NoReturn]) -> Any:
        ctx.refuse = refuse
        return held.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.refuse()
