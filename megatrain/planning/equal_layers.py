"""Models of equal layers: a capture with few of them stands for all, and its program has the others added.

A layer that repeats computes as the ones before it, on state of its own. `Layers` finds after how many layers the
modules of a model repeat, and `Repeated` copies the blocks of one period. Both refuse whatever isn't plainly the same,
and the whole model is captured then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatrain.passes.check import verify_program
from megatrain.passes.program import Block, Program, Value
from megatrain.tracer.inventory import StateEntry

# Layers at the beginning that may differ from all others, and the longest period.
_MOST_FIRST, _MOST_PERIOD = 4, 8
_PERIODS = 3
"""The last of so many periods is copied: the two before it show that it reads what the one before it made."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, which repeat from one of them on.

    Args:
        path: Of the list that holds them.
        first: The first of a period.
        period: After how many layers they repeat.
        kinds: What each is: its modules, their settings and the shapes of their state.
    """

    path: str
    count: int
    first: int
    period: int
    kinds: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layers | None:
        """Finds them; None if no list of layers repeats."""
        lists = {path: each for path, each in model.named_modules() if isinstance(each, nn.ModuleList)}
        outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        if not outer:
            return None
        path = max(outer, key=lambda each: len(lists[each]))
        layers = lists[path]
        kinds = tuple(map(_kind, layers))
        for first in range(_MOST_FIRST):
            for period in range(1, _MOST_PERIOD + 1):
                if first + period < len(kinds) and kinds[first:-period] == kinds[first + period :]:
                    return cls(path, len(kinds), first, period, kinds)
        return None

    @property
    def fewest(self) -> int:
        """Layers that a capture needs to show how they repeat; those after the last whole period are like them."""
        return self.first + _PERIODS * self.period + (self.count - self.first) % self.period

    def begins_like(self, other: Layers | None) -> bool:
        """Tells whether a model with fewer layers has the same kinds in the same places."""
        return other is not None and other.path == self.path and other.kinds == self.kinds[: other.count]


def _kind(layer: nn.Module) -> Any:
    """What a layer is; its place among the others isn't part of it."""
    plain = (int, float, str, bool, tuple, type(None))
    return tuple(
        (
            name,
            type(module),
            tuple((n, v) for n, v in vars(module).items() if n != "layer_idx" and isinstance(v, plain)),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple((n, b.shape, b.dtype) for n, b in module.named_buffers(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


class _DiffersError(Exception):
    """The blocks don't repeat as the layers do."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Makes the program of a whole model of that of one with few layers."""

    layers: Layers
    entries: Mapping[str, StateEntry]

    def program(self, few: Program) -> Program | None:
        """Adds blocks until all layers are there; None if the blocks of two periods differ, or read across them."""
        try:
            found = _Copying(self.layers, self.entries, few).program()
        except _DiffersError:
            return None
        verify_program(found)
        return found


class _Copying:
    """The copies of one period of blocks: the copy c of a block is so many blocks after it, c periods of layers on."""

    def __init__(self, layers: Layers, entries: Mapping[str, StateEntry], few: Program) -> None:
        self._layers, self._entries, self._few = layers, entries, few
        self._key = re.compile(rf"(?<![\w.]){re.escape(layers.path)}\.(\d+)(?![\w])")
        self._copies = (layers.count - layers.fewest) // layers.period
        begin = [layers.first + n * layers.period for n in range(1, _PERIODS + 1)]
        places = [self._layer(block.name) for block in few.blocks]
        # The period before the one that is copied, that one, and what follows.
        self._before, self._start, self._end = (next(_found(places, layer), len(places)) for layer in begin)
        if begin[-1] == layers.fewest:
            last = max((i for i, place in enumerate(places) if place is not None), default=-1)
            self._end = last + 1
        self._size = self._end - self._start

    def program(self) -> Program:
        """The program with the copies.

        Raises:
            _DiffersError: If it isn't plain what they are.
        """
        few = self._few
        self._check()
        blocks, values = list(few.blocks[: self._end]), dict(few.values)
        storage = 1 + max(value.storage for value in few.values.values())
        for copy in range(1, self._copies + 1):
            for block in few.blocks[self._start : self._end]:
                made, found = self._copied(block, copy, blocks, storage)
                storage += len(found)
                blocks.append(made)
                values.update({value.name: value for value in found})
        for block in few.blocks[self._end :]:
            blocks.append(self._moved(block, blocks))
            for name in block.outputs:
                producer = block.index + self._copies * self._size
                values[name] = replace(values.pop(name), producer=producer)
        bound = {key for block in blocks for key in block.binding}
        return replace(
            few,
            blocks=tuple(blocks),
            values=values,
            state=self._state(bound),
            gradient_order=self._gradient_order(),
        )

    def _state(self, bound: Collection[str]) -> dict[str, StateEntry]:
        """The state that blocks read, in the order of the whole model; what is cut has the same parts there."""
        parts: dict[str, dict[str, StateEntry]] = {}
        for entry in self._few.state.values():
            for copy in range(self._copies + 1 if entry.base is not None else 0):
                whole = self._entries[self._renamed(entry.owner, copy)]
                part = whole.part(*entry.rows)
                parts.setdefault(whole.key, {})[part.key] = part
        found = (parts.get(key, {key: entry}) for key, entry in self._entries.items())
        return {key: entry for each in found for key, entry in each.items() if key in bound}

    def _layer(self, name: str) -> int | None:
        """The only layer that a block or a tensor of state belongs to; None if it belongs to none."""
        found = {int(number) for number in self._key.findall(name)}
        if len(found) > 1:
            raise _DiffersError
        return found.pop() if found else None

    def _renamed(self, name: str, copies: int) -> str:
        shift = copies * self._layers.period
        return self._key.sub(lambda match: f"{self._layers.path}.{int(match[1]) + shift}", name)

    def _check(self) -> None:
        """Two periods have the same blocks, and each reads what all have, itself, or the period before it."""
        few = self._few
        if few.commits or few.buffers or not self._size or self._start - self._before != self._size:
            raise _DiffersError
        for entry in few.state.values():
            whole = self._entries.get(entry.owner)
            if whole is None or (whole if entry.base is None else whole.part(*entry.rows)) != entry:
                raise _DiffersError
        for block in few.blocks[self._start : self._end]:
            other = few.blocks[block.index - self._size]
            alike = (
                block.template == other.template
                and block.name == self._renamed(other.name, 1)
                and block.binding == tuple(self._renamed(key, 1) for key in other.binding)
                and all(map(self._is_same_value, other.outputs, block.outputs))
                and all(map(self._is_same_input, other.inputs, block.inputs))
            )
            if not alike:
                raise _DiffersError
        storages = [value.storage for value in few.values.values()]
        made = {name for block in few.blocks[self._before : self._end] for name in block.outputs}
        shared = any(storages.count(few.values[name].storage) > 1 for name in made)
        if shared or any(ref.kind == "value" and ref.name in made for ref in few.outputs):
            raise _DiffersError

    def _is_same_value(self, one: str, other: str) -> bool:
        here, there = self._few.values[one], self._few.values[other]
        return replace(here, name="", producer=None, storage=0) == replace(there, name="", producer=None, storage=0)

    def _is_same_input(self, one: str, other: str) -> bool:
        """Whether a period reads what the one before it reads, or its own in the same place."""
        here, there = self._few.values[one].producer, self._few.values[other].producer
        if one == other:
            return here is None or here < self._before - self._size
        if here is None or there is None or there - here != self._size:
            return False
        return self._few.blocks[here].outputs.index(one) == self._few.blocks[there].outputs.index(other)

    def _copied(self, block: Block, copy: int, blocks: Sequence[Block], storage: int) -> tuple[Block, Sequence[Value]]:
        index = block.index + copy * self._size
        names = tuple(f"{name}_copy_{copy}" for name in block.outputs)
        outputs = [
            replace(self._few.values[name], name=new, producer=index, storage=storage + i)
            for i, (name, new) in enumerate(zip(block.outputs, names, strict=True))
        ]
        made = Block(
            index,
            self._renamed(block.name, copy),
            block.template,
            tuple(self._input(name, copy, blocks) for name in block.inputs),
            names,
            tuple(self._renamed(key, copy) for key in block.binding),
        )
        return made, outputs

    def _moved(self, block: Block, blocks: Sequence[Block]) -> Block:
        """A block after the copies; it reads what the last of them made."""
        for name in block.inputs:
            producer = self._few.values[name].producer
            if producer is not None and self._before - self._size <= producer < self._start:
                raise _DiffersError
        return replace(
            block,
            index=block.index + self._copies * self._size,
            name=self._renamed(block.name, self._copies),
            inputs=tuple(
                self._input(name, self._copies, blocks) if self._is_of_layers(name) else name for name in block.inputs
            ),
            binding=tuple(self._renamed(key, self._copies) for key in block.binding),
        )

    def _is_of_layers(self, name: str) -> bool:
        producer = self._few.values[name].producer
        return producer is not None and self._start <= producer < self._end

    def _input(self, name: str, copy: int, blocks: Sequence[Block]) -> str:
        producer = self._few.values[name].producer
        if producer is None or producer < self._before:
            return name
        return blocks[producer + copy * self._size].outputs[self._few.blocks[producer].outputs.index(name)]

    def _gradient_order(self) -> tuple[tuple[str, ...], ...]:
        first = self._layers.first + (_PERIODS - 1) * self._layers.period
        found: list[tuple[str, ...]] = []
        period: list[tuple[str, ...]] = []
        for group in self._few.gradient_order:
            layers = {self._layer(key) for key in group}
            if len(layers) > 1:
                raise _DiffersError
            layer = layers.pop()
            if layer is None or layer < first:
                found.append(group)
            elif layer < first + self._layers.period:
                if period and found[-1] != period[-1]:
                    raise _DiffersError
                period.append(group)
                found.append(group)
            else:
                found.append(tuple(self._renamed(key, self._copies) for key in group))
        if not period:
            return tuple(found)
        at = found.index(period[0])
        copies = [
            tuple(self._renamed(key, copy) for key in group) for copy in range(self._copies, 0, -1) for group in period
        ]
        return (*found[:at], *copies, *found[at:])


def _found(places: Sequence[int | None], layer: int) -> Any:
    return (i for i, place in enumerate(places) if place == layer)
