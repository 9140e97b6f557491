"""Items: the things that ops read and make, and the memory of each; Effect and OpKind: what ops do; Stream: where."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.hardware.work import Works

Ints = NDArray[np.int64]

# The number of an item or an op that concerns no block in particular.
NO_BLOCK = -1


class Stream(str):
    """The name of a queue of ops that run one after the other; different streams run at the same time."""

    __slots__ = ()
    H2D: ClassVar[Stream]
    COMPUTE: ClassVar[Stream]
    D2H: ClassVar[Stream]
    HOST: ClassVar[Stream]
    DISK: ClassVar[Stream]


_NAMES = ("h2d", "compute", "d2h", "host", "disk")
Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.HOST, Stream.DISK = map(Stream, _NAMES)


class Item(NamedTuple):
    """Something that one op makes and another reads; `ITEMS` has the kinds.

    What exists once for all micro-batches, such as the gradients of a block's parameters, of which there is one sum,
    counts as that of micro-batch 0.

    Attributes:
        kind: A key of `ITEMS`.
        number: The index of a value or of a block, as the kind says.
        micro_batch: Whose it is.
    """

    kind: str
    number: int
    micro_batch: int = 0


class ItemFacts(NamedTuple):
    """What holds for an item that takes bytes, in any table of a step.

    Attributes:
        storage: The storage that it shares with other values; None if it shares none.
        outlives: Whether it still exists when the step is over.
    """

    item: Item
    memory: str
    nbytes: int
    storage: int | None
    outlives: bool


class FactColumns:
    """The facts of many items, as columns that get longer."""

    def __init__(self) -> None:
        self._columns = array("q"), array("b"), array("b"), array("q")
        self._groups: dict[tuple[int, int, int], int] = {}

    def append(self, facts: ItemFacts) -> None:
        """Adds an item."""
        group = group_of(self._groups, facts.item, facts.nbytes, facts.storage)
        row = facts.nbytes, facts.memory == "device", facts.outlives, group
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def arrays(self) -> FactArrays:
        """The columns so far."""
        nbytes, is_on_device, outlives, groups = map(np.array, self._columns)
        return FactArrays(nbytes, is_on_device.astype(bool), outlives.astype(bool), groups)


class FactArrays(NamedTuple):
    """Facts of items, by number.

    Attributes:
        groups: Those of one group share their bytes; -1 is no group.
    """

    nbytes: Ints
    is_on_device: NDArray[np.bool_]
    outlives: NDArray[np.bool_]
    groups: Ints


def group_of(known: dict[tuple[int, int, int], int], item: Item, nbytes: int, storage: int | None) -> int:
    """The number of the items that share bytes with an item, by storage; -1 if it shares none."""
    return -1 if storage is None else known.setdefault((storage, item.micro_batch, nbytes), len(known))


@dataclass(frozen=True, slots=True)
class ItemKind:
    """The properties of all items of one kind.

    Args:
        memory: Where it takes bytes from the op that makes it to the last that reads it: on the `"device"`, or on the
            host where gradients are `"landing"`. None for what takes none there: slots, parked values and parameters
            have bytes of their own for the whole step.
        edge: The kind of dependency of its readers on its makers.
        part: What its bytes are called in the account of a peak.
    """

    memory: str | None = None
    edge: str = "data"
    part: str = ""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one op.

    Args:
        reads: Items that must be there when it starts, and that nothing may overwrite before it ends.
        makes: Items that exist when it ends; their former contents are overwritten from its start.
        adds: Items that are sums: it makes the first summand, or adds another.
        moves: Bytes that it moves or, on the host, reads and writes.
        work: What its kernels compute and move on the device.
        workspace: Device bytes that it takes while it runs, beyond the items that it makes.
        num_parameters: Parameters that it updates.
        is_recorded: Its kernels are launched by one call.
    """

    reads: tuple[Item, ...] = ()
    makes: tuple[Item, ...] = ()
    adds: tuple[Item, ...] = ()
    moves: int = 0
    work: Works = ()
    workspace: int = 0
    num_parameters: int = 0
    is_recorded: bool = False


@dataclass(frozen=True, slots=True)
class OpKind:
    """One row of the table.

    Args:
        stream: Where it runs.
        what: One letter.
        effect: Its effect, as a function of the step's `Effects`, block and micro-batch.
        workspace: Device bytes that it takes while it runs, beyond the items that it makes; None if it takes none.
        per_micro_batch: Whether it runs once for each micro-batch, or once for all of them.
        has_block: Whether it concerns one block.
        has_slot: Whether it fills a slot.
    """

    stream: Stream
    what: str
    effect: Callable[[Any, int, int], Effect]
    workspace: Callable[[Any, int, int], int] | None = None
    per_micro_batch: bool = False
    has_block: bool = True
    has_slot: bool = False


ITEMS: dict[str, ItemKind] = {
    # By the index of a value.
    "value": ItemKind("device", part="activations"),
    # A value that is parked, until it has left the device, and what comes back.
    "original": ItemKind("device", part="activations"),
    "returned": ItemKind("device", part="activations"),
    "gradient": ItemKind("device", part="gradients of activations"),
    # By the index of a block.
    # The values that its `A` moves, in host memory.
    "parked": ItemKind(),
    # The same values in a file, where an op of the disk has moved them on.
    "evicted": ItemKind(),
    "saved": ItemKind("device", part="retained graphs"),
    # What a B must know of its F besides: the state of random generators.
    "record": ItemKind(),
    "parameters": ItemKind("device", part="gradients of parameters"),
    # Gradients on the host, of this step and, where updates are deferred, of the step before.
    "landed": ItemKind("landing"),
    "waiting": ItemKind("landing"),
    # A block's state in a slot, and in host memory.
    "weights": ItemKind(edge="weight"),
    "state": ItemKind(edge="weight"),
    # The optimizer's state of a block in host memory, where a file has it between its updates.
    "moments": ItemKind(),
    # The sum of the squares of the gradients that are whole with a block.
    "squares": ItemKind(),
    # Of all blocks together: the norm of the gradients, and that the gradients so far have left.
    "norm": ItemKind(),
    "left": ItemKind(),
}
