"""Source: the values of a tensor as a save takes them, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from megatrain.device import is_on_host
from megatrain.files.weight_files import DTYPES, PIECE_BYTES, parts
from megatrain.memory.host_arena import scratch
from megatrain.torch_private import is_traceable_wrapper_subclass
from megatrain.tracer.spec import TensorSpec

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
"""Names that safetensors has for element types."""

Place = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to write, or a function that makes its values while they are written.

    Args:
        spec: Shape and dtype of the stored tensor, contiguous.
        pieces: Gives the values in the order of the elements, as contiguous tensors on the CPU of `spec.dtype`. Each
            is read before the next is asked for, so one buffer may serve for all. Called once for each save.
        place: Where in memory the values lie; two sources with the same place are stored once. None: nowhere.
    """

    spec: TensorSpec
    pieces: Callable[[], Iterator[torch.Tensor]] = field(repr=False)
    place: Place | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> Source:
        """Describes a tensor that can be stored (see `obstacle`); takes no memory beyond a piece.

        Args:
            tensor: On any device but meta, with any strides.
        """
        tensor = tensor.detach()
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        place = None
        if tensor.numel():
            place = (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        return Source(spec, lambda: _pieces(tensor), place)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in parts(tensor, max(1, PIECE_BYTES // tensor.dtype.itemsize)):
        is_plain = is_on_host(part) and part.is_contiguous() and not part.is_conj() and not part.is_neg()
        # The copy also resolves what torch keeps lazily: conjugates, negatives.
        yield part if is_plain else scratch(part.shape, part.dtype).copy_(part)


def obstacle(tensor: torch.Tensor) -> str | None:
    """Says why a tensor can't be stored, if it can't."""
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return f"is a {type(tensor).__name__} of layout {tensor.layout}, whose values are not plain numbers"
    if tensor.dtype not in KINDS:
        return f"is {tensor.dtype}, a dtype that safetensors doesn't have"
    return None


def without_ties(sources: Mapping[str, Source]) -> tuple[dict[str, Source], dict[str, str]]:
    """Separates names for the same memory.

    Returns:
        The sources, each memory under its first name; and for every other name the name that is stored.
    """
    first: dict[Place, str] = {}
    ties: dict[str, str] = {}
    for name, source in sources.items():
        if source.place is not None and first.setdefault(source.place, name) != name:
            ties[name] = first[source.place]
    return {name: source for name, source in sources.items() if name not in ties}, ties


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; writing to it changes the tensor."""
    # Strides of dimensions of size 1 mean nothing, and `reshape` may keep one of them.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]
