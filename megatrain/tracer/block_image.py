"""BlockImage: the layout of a block's state in a range of bytes, in a slot and on the host."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from megatrain.base.sizes import ALIGNMENT, aligned
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a block's state.

    Args:
        key: The state it holds; tied state has one key.
        base: For a part of a tensor: the key of the whole.
        first_row: For a part: its first row in the whole.
    """

    key: str
    spec: TensorSpec
    offset: int
    base: str | None = None
    first_row: int = 0

    @property
    def owner(self) -> str:
        """The key of the tensor on the host that contains it."""
        return self.base or self.key

    def __str__(self) -> str:
        return f"{self.offset}: {self.key} {self.spec}"


@dataclass(frozen=True, slots=True)
class BlockImage:
    """Layout of a block's state, entries ascending and without overlap.

    Args:
        entries: In the order of the template's state.
        nbytes: Bytes in all, a multiple of `alignment`.
        alignment: Entries begin at multiples of so many bytes.
    """

    entries: tuple[Entry, ...]
    nbytes: int
    alignment: int = ALIGNMENT

    def __str__(self) -> str:
        return "\n".join([f"image: {self.nbytes} B", *(f"  {entry}" for entry in self.entries)])


def image(specs: Sequence[tuple[str, TensorSpec]], alignment: int = ALIGNMENT) -> BlockImage:
    """Lays tensors out one after the other."""
    assert len({key for key, _ in specs}) == len(specs), "a key occurs twice in one block's state"
    entries: list[Entry] = []
    offset = 0
    for key, spec in specs:
        entries.append(Entry(key, spec, offset))
        offset += aligned(spec.nbytes, alignment)
    return BlockImage(tuple(entries), offset, alignment)


def state_image(state: Sequence[StateEntry], alignment: int = ALIGNMENT) -> BlockImage:
    """Lays a block's state out; parts of tensors are separate entries that name their whole on the host."""
    layout = image([(entry.key, entry.spec) for entry in state], alignment)
    entries = (replace(e, base=s.base, first_row=s.rows[0]) for e, s in zip(layout.entries, state, strict=True))
    return replace(layout, entries=tuple(entries))


def optimizer_image(layout: BlockImage, trained: Container[str]) -> BlockImage:
    """Lays out what AdamW keeps of a block's trained state, flat: of each a low half if it is bf16, and two moments."""
    parts: list[tuple[str, TensorSpec]] = []
    for entry in layout.entries:
        if entry.key not in trained:
            continue
        shape = (entry.spec.numel,)
        if entry.spec.dtype == torch.bfloat16:
            parts.append((f"{entry.key}.low", TensorSpec(shape, torch.int16)))
        parts += [(f"{entry.key}.{name}", TensorSpec(shape, torch.float32)) for name in ("exp_avg", "exp_avg_sq")]
    return image(parts, layout.alignment)


def views(layout: BlockImage, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors of an image as views of a contiguous `uint8` buffer, in the order of its entries."""
    # One view per dtype, then one as_strided per tensor: half the cost of slicing, casting and reshaping
    # each.
    typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: buffer}
    found: list[torch.Tensor] = []
    for entry in layout.entries:
        dtype = entry.spec.dtype
        if dtype not in typed:
            typed[dtype] = buffer[: layout.nbytes].view(dtype)
        base = typed[dtype]
        offset = base.storage_offset() + entry.offset // dtype.itemsize
        found.append(base.as_strided(entry.spec.shape, stored_stride(entry.spec), offset))
    return found


@lru_cache(maxsize=65536)
def stored_stride(spec: TensorSpec) -> tuple[int, ...]:
    """Returns the strides with which a tensor is stored: its own if dense, else those of a contiguous one.

    Dense means that its elements fill its memory without gaps or overlaps, in any order (channels last, a transposed
    weight). Others, such as an expanded tensor, keep their values and shape but become contiguous.
    """
    if spec.stride is not None and is_dense(spec.shape, spec.stride):
        return spec.stride
    strides: list[int] = []
    step = 1
    for size in reversed(spec.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Tells whether two specs are stored alike: a tensor that isn't dense becomes contiguous in the store."""
    return (one.shape, one.dtype, stored_stride(one)) == (other.shape, other.dtype, stored_stride(other))


def has_strides_of(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tells whether a gradient lies as its parameter does; a sparse one has no strides."""
    if gradient.layout != torch.strided or (strides := gradient.stride()) == (others := parameter.stride()):
        return True
    return all(size == 1 or mine == its for size, mine, its in zip(gradient.shape, strides, others, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tells whether elements fill their memory without gaps or overlaps, in any order of dimensions."""
    step = 1
    for size, jump in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if jump != step:
            return False
        step *= size
    return True
