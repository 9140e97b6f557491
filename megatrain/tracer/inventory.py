"""The inventory of a model's state: parameters and buffers, with ties; what of it is refused, what stands for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megatrain.base.torch_private import FakeTensor, FakeTensorMode
from megatrain.errors import TraceError
from megatrain.tracer.packing import Path, is_wrapper, taken_apart
from megatrain.tracer.spec import TensorSpec, storage_key


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
    def is_trained(self) -> bool:
        """Whether it is a parameter that an optimizer may update."""
        return self.kind == "parameter" and self.requires_grad

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


def fake_state(
    tensors: dict[str, torch.Tensor], fake_mode: FakeTensorMode, device: torch.device
) -> dict[str, torch.Tensor]:
    """Makes a fake tensor on `device` for each state tensor, with the same layout and `requires_grad`."""
    fakes: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(fake_mode, meta, device)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True
            fake.requires_grad_(tensor.requires_grad)
            attributes: dict[str, Any] = vars(fake)
            attributes |= {k: v for k, v in vars(tensor).items() if k not in attributes}
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
        fakes[key] = fake
    return fakes


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


# What is neither packed nor plain is refused: no spec describes it, and no arena holds it.

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor is dense, and that its class changes nothing about what calls on it do."""
    if type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    if is_lazy(tensor):
        raise TraceError(
            f"{what} is not initialized yet.\n"
            "  A lazy module takes its shapes from the first batch, but a capture needs them earlier.\n"
            "  Call the model itself once, uncompiled, then compile it."
        )
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"{tensor.layout}"
        raise TraceError(
            f"{what} is a {kind.removeprefix('torch.')} tensor.\n"
            "  Inputs, parameters and buffers must be dense tensors, described fully by shape, dtype and strides.\n"
            "  Pass its dense parts, and build the tensor inside the forward."
        )
    if is_wrapper(tensor):
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__}, a tensor class that keeps its values in inner tensors.\n"
            "  Only parameters and buffers may be of such a class.\n"
            "  Pass its inner tensors, and make the object around them inside the forward."
        )
    if _changes_calls(type(tensor)):
        _refuse_class(what, type(tensor))


def _refuse_class(what: str, kind: type) -> NoReturn:
    if _dispatches(kind):
        rest = (
            "a tensor class that says nowhere where its values are.\n"
            "  A class of packed tensors lists its inner tensors in `__tensor_flatten__`; then they can be streamed.\n"
            "  Load the weights in bf16 or fp32 instead (frozen weights too), or replace them by their dequantized "
            "values."
        )
    elif issubclass(kind, nn.Parameter):
        rest = (
            "a class of parameters with its own behaviour, and holds plain values.\n"
            "  Quantized weights are followed when they are quantized, with scales and tables in their attributes.\n"
            "  If a later step quantizes this one (with bitsandbytes, `model.to(device)`), take it first; otherwise "
            "assign a torch.nn.Parameter of its values."
        )
    else:
        rest = (
            "a special tensor class.\n"
            "  This class may change the meaning of every call, and a capture of plain tensors can't show the change.\n"
            "  Use a plain tensor: `.as_subclass(torch.Tensor)`, if its values are ordinary."
        )
    raise TraceError(f"{what} is a {kind.__qualname__}, {rest}")


def check_plain_state(model: nn.Module) -> None:
    """Checks all parameters and buffers: each is plain, or frozen and packed of plain tensors."""
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if type(tensor) in _PLAIN:
                check_plain(f"{what} `{name}`", tensor)
            else:
                _check_packed(f"{what} `{name}`", name, tensor)


def _check_packed(what: str, name: str, tensor: torch.Tensor) -> None:
    inner = [] if is_lazy(tensor) else [(path, held) for path, held in taken_apart(name, tensor) if path]
    if is_wrapper(tensor):
        _check_frozen(what, tensor)
    elif not inner and (is_lazy(tensor) or tensor.is_floating_point() or tensor.is_complex()):
        check_plain(what, tensor)
    _check_whole(what, tensor, inner)
    for path, held in inner:
        check_plain(f"the inner tensor `{'.'.join(path)}` of {what}", held)


def _check_whole(what: str, tensor: torch.Tensor, inner: Collection[tuple[Path, torch.Tensor]]) -> None:
    """Refuses codes that move about while their library computes, and those whose scales are nowhere beside them."""
    if is_wrapper(tensor) or tensor.is_floating_point() or tensor.is_complex():
        return
    kind = type(tensor).__qualname__
    again = [".".join(path) for path, held in inner if storage_key(held) == storage_key(tensor)]
    if again:
        raise TraceError(
            f"{what} is a {kind} that holds its values again in its attribute `{again[0]}`.\n"
            "  Such weights (bitsandbytes' 8-bit layers) move between attributes in each forward, where no capture "
            f"follows.\n{_PACKED_WAY_OUT}"
        )
    if not inner:
        raise TraceError(
            f"{what} is a {kind} of codes without scales beside them (of a GGUF file, or bitsandbytes' 8 bit).\n"
            "  Their class alone knows how to read them; a capture of plain tensors doesn't.\n"
            "  Unpack a GGUF model after loading, by `model.dequantize()` of diffusers; transformers does so by itself."
            f"\n{_PACKED_WAY_OUT}"
        )


_PACKED_WAY_OUT = (
    "  Quantize with torchao's Int8WeightOnlyConfig or to bitsandbytes' 4 bit, or load the weights in bf16."
)


def _check_frozen(what: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise TraceError(
            f"{what} is a {type(tensor).__qualname__} that is trained.\n"
            "  Its values are in inner tensors, which no gradient reaches: packed (quantized) weights are streamed "
            "frozen.\n"
            "  Freeze it with requires_grad_(False) and train adapters (LoRA), or load it in bf16 or fp32."
        )


def _dispatches(kind: type) -> bool:
    """Tells whether a class computes by itself, so that its dense values say nothing."""
    return any("__torch_dispatch__" in vars(base) for base in kind.__mro__ if base not in _PLAIN)


def _changes_calls(kind: type) -> bool:
    """Tells whether a class other than torch's own gives its tensors another behaviour (or passes on its type)."""
    own = [c for c in kind.__mro__ if c not in _PLAIN and issubclass(c, torch.Tensor)]
    if issubclass(kind, nn.Parameter):
        return any("__torch_function__" in vars(c) or "__torch_dispatch__" in vars(c) for c in own)
    return any(not c.__module__.startswith("torch._C") for c in own)
