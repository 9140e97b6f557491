"""Workload: everything that scheduling needs of a program, without tensors, graphs or a device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import msgspec

from megatrain.base.checks import checked
from megatrain.base.sizes import PAGE, aligned
from megatrain.errors import ScheduleError
from megatrain.hardware.work import MEMORY, Kernels, Works, fault_of_works


@dataclass(frozen=True, slots=True)
class ValueWork:
    """A tensor that crosses block boundaries, or enters or leaves the model.

    Args:
        name: Unique name, for messages only.
        nbytes: Bytes of its elements; what a transfer of it moves, and what its gradient takes, where the value lies.
        storage: Index into `Workload.storages`. Values that alias share one storage.
        producer: Block that computes it; None for an input of the model.
        readers: Blocks whose forward reads it, ascending, each once.
        is_output: The model returns it, so it stays on the device until the step ends, or outputs are released.
        has_gradient: A gradient flows back through it.
        is_parkable: It may leave the device between forward and backward (no input or output of the model, shares its
            storage with nothing, not on the host).
        is_committed: A buffer takes its content when the step ends; it is also an output, and nothing releases it.
        on_host: It and its gradient are in host memory, as in eager; they take no bytes of the device and never move.
        is_result: Its producer's forward keeps it for its own backward, which then computes less; only where the
            schedule keeps the block's results. Nothing else reads it.
    """

    name: str
    nbytes: int
    storage: int
    producer: int | None
    readers: tuple[int, ...]
    is_output: bool
    has_gradient: bool
    is_parkable: bool
    is_committed: bool = False
    on_host: bool = False
    is_result: bool = False

    @property
    def is_there(self) -> bool:
        """Whether it is there when a step begins: no block computes it."""
        return self.producer is None


@dataclass(frozen=True, slots=True)
class KeptWork:
    """The bytes and work of a block that keeps results of its forward for its backward.

    Args:
        forward_workspace_bytes: As in `BlockWork`; results don't count.
        backward_workspace_bytes: As in `BlockWork`; results don't count.
        repeated: The kernels of the recompute then.
    """

    forward_workspace_bytes: int
    backward_workspace_bytes: int
    repeated: Works = ()


@dataclass(frozen=True, slots=True)
class BlockWork:
    """The bytes and work of one block.

    Args:
        name: Printed name, for messages only.
        state_bytes: Bytes its state takes in a slot, padding included.
        gradient_bytes: Bytes of the gradients of its trainable parameters; 0 when frozen.
        saved_bytes: Bytes that its forward holds for its backward if its graph is retained, beyond its
            inputs, outputs and state.
        forward_workspace_bytes: Most bytes alive inside the forward beyond its inputs, outputs and state.
        backward_workspace_bytes: The same for (recompute and) backward, beyond inputs, state and the
            gradients it produces.
        has_backward: A gradient flows into or through it, so its backward runs.
        forward: What the kernels of one forward compute and move.
        backward: The same of one backward, without the recompute that a `B` of a dropped graph begins with.
        update_bytes: Host bytes that the update of its parameters reads and writes. 0 if it updates none: they
            aren't trained, or another block that shares them does it.
        shares: Other blocks that hold some of the parameters which this block updates, or rows of them, ascending.
        gradient_padding: Bytes between its gradients where they land on the host, each tensor on a boundary of
            `megatrain.base.sizes.ALIGNMENT` bytes.
        frozen_bytes: The part of `state_bytes` that no step changes: parameters that aren't trained, buffers that the
            forward only reads, constants.
        num_gradients: Parameters with a gradient: what a micro-batch adds to the sum of the earlier ones, one by one.
        kept: Of the block where it keeps its results; None if it has none.
        partial_gradient_bytes: The part of `gradient_bytes` that isn't whole as it leaves the device: the host adds
            gradients of other blocks to it, and takes its norm. The device takes the norms of all others.
        optimizer_bytes: Device bytes that the state of the optimizer takes there, low halves of masters included, if
            the device updates the block. 0 if only the host can.
        update_workspace_bytes: Most device bytes alive inside such an update, beyond state and gradients.
        moment_bytes: Bytes of the optimizer's state that a file has between the host's updates of the block: each
            update needs them read before it, and written after it. 0 where all of it stays in memory.
    """

    name: str
    state_bytes: int
    gradient_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    has_backward: bool
    forward: Works = ()
    backward: Works = ()
    update_bytes: int = 0
    shares: tuple[int, ...] = ()
    gradient_padding: int = 0
    frozen_bytes: int = 0
    num_gradients: int = 0
    kept: KeptWork | None = None
    partial_gradient_bytes: int = 0
    optimizer_bytes: int = 0
    update_workspace_bytes: int = 0
    moment_bytes: int = 0

    @property
    def landing_bytes(self) -> int:
        """Host bytes that the gradients of its parameters take where they land."""
        return self.gradient_bytes + self.gradient_padding

    @property
    def is_mostly_frozen(self) -> bool:
        """Whether at least half of its state is frozen: then it is worth the memory to have it there all the time."""
        return 0 < self.state_bytes <= 2 * self.frozen_bytes

    @property
    def device_update(self) -> Works:
        """The kernels of an update on the device: they read and write what the host's update does."""
        return (Kernels(MEMORY, 0, self.update_bytes, max(1, self.num_gradients)),)

    def measured(self, has_results: bool) -> BlockWork | KeptWork:
        """What has the workspace of the block, where its results are kept or not."""
        return self.kept if self.kept is not None and has_results else self

    def whole_backward(self, is_saved: bool, micro_batch: int, has_results: bool = False) -> Works:
        """The kernels of a `B`: with a recompute if the graph isn't retained, and sums with earlier micro-batches."""
        recomputed = () if is_saved else self.kept.repeated if self.kept and has_results else self.forward
        if micro_batch == 0 or self.gradient_bytes == 0:
            return recomputed + self.backward
        sums = Kernels(MEMORY, 0, 3 * self.gradient_bytes, max(1, self.num_gradients))
        return (*recomputed, *self.backward, sums)


@dataclass(frozen=True, slots=True)
class Workload:
    """Blocks in execution order, the values between them, and the storages of the values.

    Of a step with several micro-batches this describes one, the largest; each has values of its own. `merging.merge`
    makes it of several.

    Args:
        blocks: In execution order; index in the tuple is the block's index.
        values: In order of definition, the model's inputs first.
        storages: Bytes of each storage, on the device, or on the host if its values are.
        loss_bytes: Device bytes that the caller's loss of one micro-batch and its backward take, beyond the outputs and
            their gradients; in a training step, whose schedule has the loss between forward and backward.
        last_reads_values: Whether Python code reads values in the forward of the last block. Such a forward may have to
            run again with another capture, so no loss is made and no backward begins before all forwards are over.
    """

    blocks: tuple[BlockWork, ...]
    values: tuple[ValueWork, ...]
    storages: tuple[int, ...]
    loss_bytes: int = 0
    last_reads_values: bool = False

    def inputs(self) -> list[list[int]]:
        """Values that each block reads, ascending."""
        found: list[list[int]] = [[] for _ in self.blocks]
        for index, value in enumerate(self.values):
            for block in value.readers:
                found[block].append(index)
        return found

    def outputs(self) -> list[list[int]]:
        """Values that each block computes for others, ascending."""
        return self._made(are_results=False)

    def results(self) -> list[list[int]]:
        """Values that each block may keep for its own backward, ascending."""
        return self._made(are_results=True)

    def _made(self, *, are_results: bool) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for index, value in enumerate(self.values):
            if value.producer is not None and value.is_result == are_results:
                found[value.producer].append(index)
        return found

    def backward_readers(self, value: int) -> tuple[int, ...]:
        """Blocks whose backward reads the value, ascending."""
        work = self.values[value]
        readers = (work.producer,) if work.is_result and work.producer is not None else work.readers
        return tuple(b for b in readers if self.blocks[b].has_backward)

    def backward_blocks(self) -> tuple[int, ...]:
        """Blocks that have a backward, ascending; the last one is where the step turns around."""
        return tuple(i for i, block in enumerate(self.blocks) if block.has_backward)

    def gradient_blocks(self) -> tuple[int, ...]:
        """Blocks whose parameters get gradients, ascending: each has one `G` in a step."""
        return tuple(i for i, b in enumerate(self.blocks) if b.has_backward and b.gradient_bytes > 0)

    def update_blocks(self) -> tuple[int, ...]:
        """Blocks with an update of their own, ascending: each has one `U` in a step that updates."""
        return tuple(i for i, b in enumerate(self.blocks) if b.update_bytes > 0)

    def update_group(self, block: int) -> tuple[int, ...]:
        """The blocks that hold parameters which `U` of a block updates: itself first."""
        return (block, *self.blocks[block].shares)

    def has_value_gradient(self, value: int) -> bool:
        """Tells whether some backward computes or reads the gradient of the value."""
        work = self.values[value]
        if not work.has_gradient:
            return False
        if work.producer is not None and not self.blocks[work.producer].has_backward:
            return False
        if work.is_output and work.producer is not None:
            return True
        return bool(self.backward_readers(value))

    def check(self) -> None:
        """Raises `ScheduleError` unless every index is in range, every order right and every size a count."""
        for index, block in enumerate(self.blocks):
            _check_counts(f"block {index} ({block.name})", asdict(block))
            if block.kept is not None:
                _check_counts(f"block {index} ({block.name}) with results", asdict(block.kept))
            self._check_update(index, block)
        _check_counts("a storage", dict(enumerate(self.storages)))
        _check_counts("the loss", {"loss_bytes": self.loss_bytes})
        sharers = [0] * len(self.storages)
        for value in self.values:
            self._check_value(value)
            sharers[value.storage] += 1
        on_host = {value.storage for value in self.values if value.on_host}
        for value in self.values:
            stays = value.is_there or value.is_output or value.on_host
            if value.is_parkable and (stays or sharers[value.storage] > 1):
                raise ScheduleError(
                    f"value {value.name} can't be parked.\n"
                    "  A parkable value is computed by a block, isn't returned, isn't on the host, and shares its "
                    "storage with no other value."
                )
            if not value.on_host and value.storage in on_host:
                raise ScheduleError(
                    f"value {value.name} shares storage {value.storage} with a value on the host.\n"
                    "  A storage is on the device or on the host, with all its values."
                )

    def _check_update(self, index: int, block: BlockWork) -> None:
        path = (-1, *block.shares, len(self.blocks))
        if index in block.shares or any(a >= b for a, b in pairwise(path)):
            raise ScheduleError(
                f"block {index} ({block.name}) can't share parameters with blocks {list(block.shares)}.\n"
                "  `shares` lists other blocks of the model, ascending, each once."
            )
        if block.frozen_bytes > block.state_bytes:
            raise ScheduleError(
                f"block {index} ({block.name}) has {block.frozen_bytes} frozen bytes in a state of "
                f"{block.state_bytes} bytes.\n  Frozen bytes are a part of the state."
            )
        if block.optimizer_bytes > 0 and (block.update_bytes == 0 or block.shares):
            raise ScheduleError(
                f"block {index} ({block.name}) can't be updated on the device.\n"
                "  Such a block trains parameters, and shares none of these."
            )
        if block.moment_bytes > 0 and block.update_bytes == 0:
            raise ScheduleError(
                f"block {index} ({block.name}) has optimizer state in a file, and nothing to update.\n"
                "  State lies in a file between the updates of a block."
            )
        if block.update_bytes > 0 and not (block.has_backward and block.gradient_bytes > 0 and block.state_bytes > 0):
            raise ScheduleError(
                f"block {index} ({block.name}) has nothing to update.\n"
                "  A block with an update has a state, a backward and gradients."
            )

    def _check_value(self, value: ValueWork) -> None:
        _check_counts(f"value {value.name}", {"nbytes": value.nbytes})
        is_alone = value.producer is not None and not (value.readers or value.is_output or value.has_gradient)
        if value.is_result and not (is_alone and self._keeps(value.producer)):
            raise ScheduleError(
                f"value {value.name} isn't a result that a block keeps.\n"
                "  A result is made by a block with a backward that says what it does with results, and only this "
                "backward reads it."
            )
        if not 0 <= value.storage < len(self.storages):
            raise ScheduleError(f"value {value.name} has storage {value.storage}, which doesn't exist.")
        first = 0 if value.producer is None else value.producer + 1
        path = (first - 1, *value.readers, len(self.blocks))
        if (value.producer or 0) < 0 or first > len(self.blocks) or any(a >= b for a, b in pairwise(path)):
            raise ScheduleError(
                f"value {value.name} of block {value.producer} is read by blocks {list(value.readers)}.\n"
                "  Readers come after the producer, ascending, each once."
            )

    def _keeps(self, block: int | None) -> bool:
        work = self.blocks[block] if block is not None and 0 <= block < len(self.blocks) else None
        return work is not None and work.has_backward and work.kept is not None

    def to_dict(self) -> dict[str, Any]:
        """The workload as plain lists and dictionaries, for JSON."""
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    @checked()
    def from_dict(data: Mapping[str, Any]) -> Workload:
        """Reads what `to_dict` wrote.

        Raises:
            ScheduleError: If it is something else.
        """
        try:
            found = msgspec.convert(data, Workload)
            for block in found.blocks:
                for works in (block.forward, block.backward, () if block.kept is None else block.kept.repeated):
                    if fault := fault_of_works(works):
                        raise ValueError(f"a list of kernels {fault}")
            if found.to_dict() != data:
                raise ValueError("it lacks fields, or has others")
        except ValueError as error:  # msgspec's own among them
            raise ScheduleError(
                f"these data aren't a workload: {error}\n"
                "  The data must come from Workload.to_dict.\n  Give the result of to_dict, unchanged."
            ) from error
        return found


def chunk_bytes(workload: Workload, values: Iterable[int]) -> int:
    """Bytes of a buffer of the host, or of a range of a file, that has some values: whole pages."""
    return aligned(sum(aligned(workload.values[value].nbytes) for value in values), PAGE)


# Half a million sizes of so many bytes add up in 64 bits.
_MOST_BYTES = 1 << 44


def _check_counts(owner: str, sizes: Mapping[Any, Any]) -> None:
    for name, size in sizes.items():
        if isinstance(size, int) and not 0 <= size <= _MOST_BYTES:
            raise ScheduleError(f"{owner} has an impossible size: {name} = {size}.\n  A size is 0 to 16 TiB.")
