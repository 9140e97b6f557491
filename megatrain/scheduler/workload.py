"""Workload: everything that scheduling needs of a program, without tensors, graphs or a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from megatrain.checks import checked, from_data
from megatrain.errors import ScheduleError
from megatrain.hardware.work import Kernels, Works, fault_of_works, products
from megatrain.scheduler.works import BlockWork, KeptWork, ValueWork


@dataclass(frozen=True, slots=True)
class Workload:
    """Blocks in execution order, the values between them, and the storages behind the values.

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
        found = asdict(self)
        if not self.last_reads_values:
            del found["last_reads_values"]
        return found

    @staticmethod
    @checked()
    def from_dict(data: Mapping[str, Any]) -> Workload:
        """Reads what `to_dict` wrote.

        Raises:
            ScheduleError: If it is something else.
        """
        try:
            return from_data(
                Workload,
                blocks=tuple(_read_block(**block) for block in data["blocks"]),
                values=tuple(_read_value(**value) for value in data["values"]),
                storages=tuple(data["storages"]),
                loss_bytes=data.get("loss_bytes", 0),
                last_reads_values=data.get("last_reads_values", False),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ScheduleError(
                f"these data aren't a workload: {type(error).__name__}: {error}\n"
                "  The data must come from Workload.to_dict.\n  Give the result of to_dict, unchanged."
            ) from error


def _read_block(
    *,
    shares: Sequence[int] = (),
    forward: Any = (),
    backward: Any = (),
    forward_flops: int = 0,
    kept: Any = None,
    **rest: Any,
) -> BlockWork:
    works = [_read_works(found) for found in (forward, backward)]
    if forward_flops:  # an earlier version knew only these; it took a backward as twice that
        works = [products(forward_flops), products(2 * forward_flops)]
    with_results = None if kept is None else _read_kept(**kept)
    return from_data(BlockWork, shares=tuple(shares), forward=works[0], backward=works[1], kept=with_results, **rest)


def _read_kept(*, repeated: Any, **rest: Any) -> KeptWork:
    return from_data(KeptWork, repeated=_read_works(repeated), **rest)


def _read_works(found: Any) -> Works:
    works = tuple(Kernels(*work) for work in found)
    fault = fault_of_works(works)
    if fault is not None:
        raise ValueError(f"a list of kernels {fault}")
    return works


def _read_value(*, readers: list[int], **rest: Any) -> ValueWork:
    return from_data(ValueWork, readers=tuple(readers), **rest)


def _check_counts(owner: str, sizes: Mapping[Any, Any]) -> None:
    for name, size in sizes.items():
        if isinstance(size, int) and size < 0:
            raise ScheduleError(f"{owner} has a negative size: {name} = {size}.")
