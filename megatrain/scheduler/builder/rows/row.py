"""OpRow: the same op of all micro-batches of a block, and RowEffects: what rows do, which is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.scheduler.builder.stays import Stay
from megatrain.scheduler.effects import Effects, kind_of
from megatrain.scheduler.items import ITEMS, Effect, Item, Stream
from megatrain.scheduler.parking import Parks
from megatrain.scheduler.table import Slot

# What there is of each micro-batch; of all else there is one for all of them.
_OF_EACH = {"value", "original", "returned", "gradient", "parked", "saved", "record"}


# Items, and the micro-batches whose ops concern them.
_Once = tuple[tuple[int, tuple[int, ...]], ...]
# Effects tell the first micro-batch, and the second, from the others.
_DIFFERENT = 3


class OpRow(NamedTuple):
    """One op of each micro-batch, or one that serves all of them.

    Attributes:
        stream: Where it runs.
        what: Its letter.
        block: Its block.
        ticks: Of each micro-batch, ascending, or the one tick.
        slot: The slot that it fills, if it fills one.
    """

    stream: Stream
    what: str
    block: int
    ticks: Sequence[int]
    slot: Slot | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowEffect:
    """The effect of a row on items, by their numbers: those that each micro-batch has, and those that exist once.

    Args:
        reads: Items of each micro-batch that its op reads.
        makes: Likewise those that it makes.
        adds: Likewise the sums that it adds to.
        reads_once: Items that exist once, and the micro-batches whose ops read them.
        makes_once: Likewise those that they make.
        adds_once: Likewise the sums that they add to.
        takes: Of the items that it makes or adds to, those that take memory of the device.
        takes_once: Likewise those that exist once.
        ends: Likewise of the items that it reads.
        ends_once: Likewise those that exist once.
        workspace: Of each op, in bytes.
        effects: Of each op.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    adds: tuple[int, ...]
    reads_once: _Once
    makes_once: _Once
    adds_once: _Once
    takes: tuple[int, ...]
    takes_once: _Once
    ends: tuple[int, ...]
    ends_once: _Once
    workspace: tuple[int, ...]
    effects: tuple[Effect, ...]


class WhatIsKept(NamedTuple):
    """What a plan retains, keeps and parks: all that the effects of its rows depend on.

    Attributes:
        saves: As in `Effects`, like the others.
        results: See there.
        parked: See there.
        persistent: See there.
        effects: Makes those of the plan, if some rows are new.
    """

    saves: frozenset[int]
    results: frozenset[int]
    parked: Parks
    persistent: frozenset[int]
    effects: Callable[[], Effects]


class RowEffects:
    """The effects of the rows of all plans of a workload.

    The effect of a row depends on few choices of a plan: whether its block's graph is retained or its results are kept,
    and which values that it touches are parked. So each is made once for each of these.

    Args:
        effects: Of any plan.

    Attributes:
        memory: Of each item, by number: where it takes bytes, as in `ItemKind`.
        nbytes: How many.
        outlives: Whether it is there when the step is over.
        storage: The storage that it shares with other items of its micro-batch; None if it shares none.
        weights: The block whose weights in a slot it is; None for all else.
        standing: The items that are there when the step begins.
        num_micro_batches: Of the step.
        state_bytes: Of each block, what a copy of its weights fills.
    """

    def __init__(self, effects: Effects) -> None:
        self.num_micro_batches = effects.kind.micro_batches
        self.state_bytes = [effects.copied(block.state_bytes) for block in effects.workload.blocks]
        self._touched = [
            tuple(dict.fromkeys((*inputs, *outputs, *results)))
            for inputs, outputs, results in zip(effects.inputs, effects.outputs, effects.kept, strict=True)
        ]
        self._known: dict[Hashable, dict[Hashable, RowEffect]] = {}
        self._numbers: dict[Item, int] = {}
        self.memory: list[str | None] = []
        self.nbytes: list[int] = []
        self.outlives: list[bool] = []
        self.storage: list[int | None] = []
        self.weights: list[int | None] = []
        self.standing = tuple(self._number(effects, item) for item in effects.standing() if item.micro_batch == 0)

    def of(self, rows: Sequence[OpRow], kept: WhatIsKept) -> list[RowEffect]:
        """The effect of each row of a plan."""
        away = {value for values in kept.parked.values() for value in values}
        known = self._known.setdefault
        of_compute = [
            known((block, block in kept.saves, block in kept.results, *map(away.__contains__, touched)), {})
            for block, touched in enumerate(self._touched)
        ]
        of_others = known(None, {})
        found: list[RowEffect] = []
        for row in rows:
            stream, what, block = row[:3]
            if stream == Stream.COMPUTE:
                effects = of_compute[block]
            elif what == "A":
                effects = known((stream, *kept.parked[block]), {})
            elif what == "W" and block in kept.persistent:
                effects = known("persistent", {})
            else:
                effects = of_others
            key = what, block, stream
            effect = effects.get(key)
            if effect is None:
                effect = effects[key] = self._made(row, kept.effects())
            found.append(effect)
        return found

    def _made(self, row: OpRow, step: Effects) -> RowEffect:
        key = row.stream, row.what, row.block
        count = self.num_micro_batches if kind_of(row.stream, row.what).per_micro_batch else 1
        numbers = range(min(count, _DIFFERENT))
        effects = [step.of(*key, number) for number in numbers]
        workspace = [step.workspace(*key, number) for number in numbers]
        (reads, reads_once), (makes, makes_once), (adds, adds_once) = (
            self._split(step, [getattr(effect, part) for effect in effects], count)
            for part in ("reads", "makes", "adds")
        )
        memory, more = self.memory, count - len(numbers)
        return RowEffect(
            reads,
            makes,
            adds,
            reads_once,
            makes_once,
            adds_once,
            tuple(item for item in (*makes, *adds) if memory[item] == "device"),
            tuple(each for each in (*makes_once, *adds_once) if memory[each[0]] == "device"),
            tuple(item for item in reads if memory[item] == "device"),
            tuple(each for each in reads_once if memory[each[0]] == "device"),
            (*workspace, *workspace[-1:] * more),
            (*effects, *effects[-1:] * more),
        )

    def _split(self, step: Effects, of_ops: Sequence[tuple[Item, ...]], count: int) -> tuple[tuple[int, ...], _Once]:
        """The items of each micro-batch, which its own op has, and the others, with the ops that have them.

        Args:
            step: The effects.
            of_ops: The items of the first ops.
            count: Of all ops; further ones have the items of the last.
        """
        each: dict[int, list[int]] = {}
        once: dict[int, list[int]] = {}
        for number, items in enumerate(of_ops):
            for item in dict.fromkeys(items):
                is_of_each = item.kind in _OF_EACH
                assert item.micro_batch == (number if is_of_each else 0), "an op concerns its own micro-batch"
                (each if is_of_each else once).setdefault(self._number(step, item), []).append(number)
        assert all(len(numbers) == len(of_ops) for numbers in each.values()), "micro-batches have the same items"
        for numbers in once.values():
            numbers += range(len(of_ops), count) if numbers[-1] == len(of_ops) - 1 else ()
        return tuple(each), tuple((item, tuple(numbers)) for item, numbers in once.items())

    def _number(self, step: Effects, item: Item) -> int:
        first = item._replace(micro_batch=0)
        if first not in self._numbers:
            self._numbers[first] = len(self._numbers)
            self.memory.append(ITEMS[item.kind].memory)
            self.nbytes.append(step.nbytes(item) if ITEMS[item.kind].memory is not None else 0)
            self.outlives.append(step.outlives(item))
            self.storage.append(step.shared_storage(item))
            self.weights.append(item.number if item.kind == "weights" else None)
        return self._numbers[first]


def weight_rows(stays: Sequence[Stay], slots: Sequence[Slot], loads: Sequence[int]) -> list[OpRow]:
    """The rows of `W`.

    Args:
        stays: Of weights on the device.
        slots: That of each stay.
        loads: The tick of its `W`.
    """
    placed = zip(stays, slots, loads, strict=True)
    return [OpRow(Stream.H2D, "W", stay.block, (tick,), slot) for stay, slot, tick in placed]
