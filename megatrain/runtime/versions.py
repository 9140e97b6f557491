"""Whether tensors were written since: by torch's counts, by samples of their bytes, and by sums of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatrain.base.torch_private import StorageWeakRef, storage_of
from megatrain.device import Device
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.runtime.random_calls import RngState
from megatrain.tracer.block_image import stored_stride
from megatrain.tracer.spec import TensorSpec

_SAMPLES = 64  # bytes of each tensor
_COLUMNS = 4096


class Stamp(NamedTuple):
    """How often a tensor of the model's state was written, to tell later whether it was written again.

    Args:
        place: Its place in the host store, written when the user replaced the memory or the tensor.
    """

    tensor: torch.Tensor
    place: torch.Tensor
    versions: tuple[int, int]
    address: int

    @staticmethod
    def of(tensor: torch.Tensor, place: torch.Tensor) -> Stamp:
        """Reads the counters."""
        return Stamp(tensor, place, (version(tensor), version(place)), tensor.data_ptr())

    @property
    def is_current(self) -> bool:
        """Whether nobody wrote since."""
        return self.versions == (version(self.tensor), version(self.place))

    @property
    def has_moved(self) -> bool:
        """Whether the user has given the tensor other memory since."""
        return self.tensor.data_ptr() != self.address


class Sample:
    """A few bytes of each of some tensors, which reveal writes that torch doesn't count (`p.data.mul_()`, NumPy).

    Most of these write whole tensors. A look costs one small copy, whatever the size of the tensors.

    Args:
        parts: The bytes of each, see `sampled`, on one device.
    """

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        self._before = _joined(parts)

    def look(self, parts: Mapping[str, torch.Tensor]) -> Callable[[], list[str]]:
        """Looks at the bytes as they are now; the result waits for the device, and names the tensors that differ."""
        same = _joined(parts) == self._before

        def differ() -> list[str]:
            if bool(same.all()):
                return []
            pieces = same.split([part.numel() for part in parts.values()])
            return [name for name, piece in zip(parts, pieces, strict=True) if not bool(piece.all())]

        return differ


def _joined(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts.values())) if parts else torch.empty(0)


def sampled(tensor: torch.Tensor, count: int = _SAMPLES) -> torch.Tensor:
    """Returns some `count` bytes of a tensor, `uint8`: as a view, if the tensor is dense."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    is_dense = flat.stride() == stored_stride(TensorSpec.of(flat))
    flat = flat.as_strided((flat.numel(),), (1,)) if is_dense else flat.reshape(-1)
    bytes_ = flat.view(torch.uint8)
    # An odd distance meets all bytes of the elements in turn: a small change may leave the high ones as they are.
    return bytes_[:: bytes_.numel() // count | 1]


def sums_of_bytes(piece: torch.Tensor) -> torch.Tensor:
    """Sums of the bytes in many columns, of whole numbers that wrap around, and the bytes of the rest as they are.

    One changed byte changes a sum.
    """
    row = 8 * _COLUMNS
    piece = piece if piece.storage_offset() % 8 == 0 else piece.clone()  # else it has no view as larger numbers
    whole = piece.numel() // row * row
    columns = piece[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
    return torch.cat([columns.view(torch.uint8), piece[whole:]])


class Given:
    """A tensor that the caller has, too: it is looked at again, but not kept."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        # It counts the writes into the tensor, and has none of its memory.
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = version(self._counter)

    def now(self) -> torch.Tensor | None:
        """Returns the tensor; None if it is gone, or was written in a way that torch counts."""
        storage = storage_of(self._memory.cdata) if self._version == version(self._counter) else None
        return None if storage is None else torch.empty_like(self._counter.detach()).set_(storage, *self._form)


class Handed:
    """The inputs and outputs of a call, which its caller may write before the backward."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = {name: t for name, t in tensors.items() if t.layout == torch.strided and t.numel()}
        self._given = {name: Given(tensor) for name, tensor in found.items()}
        self._samples = {name: Sample({name: sampled(tensor)}) for name, tensor in found.items()}

    def look(self) -> Callable[[], list[str]]:
        """As `Sample.look`."""
        now = {name: tensor for name, given in self._given.items() if (tensor := given.now()) is not None}
        looks = [self._samples[name].look({name: sampled(tensor)}) for name, tensor in now.items()]
        return lambda: [name for look in looks for name in look()]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The inputs of a call, and the other state that its forward read or changed.

    Args:
        inputs: The caller's tensors, where the capture had them, by the value they enter as.
        buffers: Buffers that the forward writes, as they were, on the host, by the value they enter as.
        state: A stamp per tensor of state that some block reads.
    """

    inputs: Mapping[str, torch.Tensor]
    versions: Mapping[str, int]
    buffers: Mapping[str, torch.Tensor]
    state: Mapping[str, Stamp]
    rng: RngState | None

    @staticmethod
    def of(
        program: Program,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        places: Mapping[str, torch.Tensor],
        device: Device,
    ) -> Start:
        """Notes the starting state of a call."""
        named = {name: tensor.detach() for name, tensor in zip(program.inputs, inputs, strict=True)}
        is_random = any(template.is_random for template in program.templates.values())
        return Start(
            inputs=named,
            versions={name: version(tensor) for name, tensor in named.items()},
            buffers={name: tensors[key].detach().clone() for name, key in program.buffers},
            state={key: Stamp.of(tensors[key], place) for key, place in places.items()},
            rng=RngState.now(device, program.opaque_calls) if is_random else None,
        )

    def check_state(self, keys: Iterable[str], movable: Collection[str]) -> None:
        """Checks that the weights are those of the forward.

        Args:
            movable: Which may have other memory by now, as eager's backward reads their old one.
        """
        for key in keys:
            if not self.state[key].is_current or (self.state[key].has_moved and key not in movable):
                raise _written(key, self.state[key].tensor)

    def check_sample(self, sample: Sample, places: Mapping[str, torch.Tensor]) -> None:
        """Checks the same by a few bytes of each tensor.

        Args:
            sample: Of the places, when the forward was over.
            places: The same bytes now.
        """
        for key in sample.look(places)():
            raise _written(key, self.state[key].tensor, _UNCOUNTED)

    def check_inputs(self) -> None:
        """Checks that the inputs haven't changed."""
        for name, tensor in self.inputs.items():
            if version(tensor) != self.versions[name]:
                raise ExecuteError(
                    f"value `{name}` was modified in place between forward and backward.\n"
                    "  A second backward of a call repeats the forward, from the same inputs.\n"
                    "  Clone inputs before writing into them."
                )


_UNCOUNTED = "  torch doesn't count this write (through `.data` or NumPy), but some bytes are other ones.\n"


def _written(key: str, tensor: torch.Tensor, more: str = "") -> ExecuteError:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return ExecuteError(
        f"{kind} `{key}` was modified between forward and backward.\n{more}"
        "  The backward needs the parameters and buffers that the forward read.\n"
        "  Call backward first: before optimizer.step(), load_state_dict() or a call that updates buffers."
    )


def check_handed(changed: Iterable[str]) -> None:
    """Refuses writes into inputs and outputs that torch doesn't count."""
    for name in changed:
        raise ExecuteError(
            f"value `{name}` was modified in place between forward and backward.\n{_UNCOUNTED}"
            "  The backward needs inputs and outputs as the forward had them.\n"
            "  Clone inputs and outputs before writing into them, and zero the gradients of this backward."
        )


def version(tensor: torch.Tensor) -> int:
    """The tensor's version counter; tensors made in inference mode have none."""
    try:
        return tensor._version
    except RuntimeError:  # not by `is_inference`, for which torch lets other threads run: each update asks often
        if tensor.is_inference():
            return 0
        raise
