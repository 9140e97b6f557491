"""Legs: how values travel between devices to which the blocks of a model are dealt, and their gradients back.

A value is on the device that computes it, and goes on to each device that reads it. Where a gradient flows back, the
gradient is a sum of one term of each reader, the last reader's first: one process adds them in this order. So such a
value goes from device to device in the order of its readers, and the sum so far comes back the same way, last first;
neighbouring readers on one device are one leg. A value without a gradient goes from its producer to each device once.

Everything that goes from one device to another at once is one message. A message is received before the first block of
the receiver that follows what made the values, and sent after the last block of the sender before that. So messages
between two devices come in one order on both sides: that of the blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that comes from another device or goes on to one, and its gradient, which goes the other way.

    Args:
        device: The other device.
        forward: The block here before whose forward the value comes, or after whose forward it goes.
        forward_there: The block of the whole model on the other device after whose forward it goes, or before whose
            forward it comes.
        backward: The block here after whose backward the gradient goes, or before whose backward it comes; None if
            there is none.
        backward_there: The block of the whole model on the other device, likewise.
    """

    device: int
    forward: int
    forward_there: int
    backward: int | None = None
    backward_there: int | None = None


@dataclass(frozen=True, slots=True)
class Travelling:
    """A value of the whole model, as far as dealing needs it.

    Args:
        name: Unique.
        producer: The block that computes it; None for what all devices have from the start.
        readers: The blocks that read it, ascending.
        has_gradient: Whether some backward computes or reads its gradient.
    """

    name: str
    producer: int | None
    readers: tuple[int, ...]
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class Leg:
    """A value on one device. All blocks are numbers of the whole model, those of its crossings too.

    Args:
        value: The value of the whole model.
        name: Unique on the device.
        device: The device.
        producer: The block that computes the value here; None if it comes, or is there from the start.
        readers: The blocks here that read it.
        has_gradient: Whether a gradient of it is computed or read here.
        comes: From where; None if it is computed here, or there from the start.
        goes: To where; of these at most one brings a gradient back.
    """

    value: str
    name: str
    device: int
    producer: int | None
    readers: tuple[int, ...]
    has_gradient: bool
    comes: Crossing | None = None
    goes: tuple[Crossing, ...] = ()


def legs_of(values: Sequence[Travelling], devices: Sequence[int], backward: Sequence[bool]) -> list[Leg]:
    """Finds the legs of all values, in the order of the values.

    Args:
        values: Of the whole model.
        devices: The device of each block.
        backward: Whether each block has a backward.

    >>> for leg in legs_of([Travelling("x", 0, (1, 2), True)], [0, 1, 0], [True] * 3):
    ...     print(leg.name, leg.device, leg.readers, leg.goes)
    x 0 () (Crossing(device=1, forward=0, forward_there=1, backward=0, backward_there=1),)
    x 1 (1,) (Crossing(device=0, forward=1, forward_there=2, backward=1, backward_there=2),)
    x.2 0 (2,) ()
    """
    places = _Places(devices, backward)
    return [leg for value in values for leg in _legs(value, places)]


class _Places:
    """Where blocks are: the next one of a device, and the one before."""

    def __init__(self, devices: Sequence[int], backward: Sequence[bool]) -> None:
        self.devices, self.has_backward = devices, backward
        self._blocks: dict[int, list[int]] = {}
        self._backward: dict[int, list[int]] = {}
        for block, device in enumerate(devices):
            self._blocks.setdefault(device, []).append(block)
            if backward[block]:
                self._backward.setdefault(device, []).append(block)

    def forward_message(self, made: int, receiver: int) -> tuple[int, int]:
        """After which block of its device a value goes that is there with `made`, and before which one it comes."""
        there = self._blocks[receiver]
        comes = there[bisect_right(there, made)]
        here = self._blocks[self.devices[made]]
        return here[bisect_left(here, comes) - 1], comes

    def backward_message(self, made: int, receiver: int) -> tuple[int, int]:
        """The same of a gradient that is there with the backward of `made`: backwards run in reverse."""
        there = self._backward[receiver]
        comes = there[bisect_left(there, made) - 1]
        here = self._backward[self.devices[made]]
        return here[bisect_right(here, comes)], comes


def _legs(value: Travelling, places: _Places) -> list[Leg]:
    by_device: dict[int, list[int]] = {}
    for block in value.readers:
        by_device.setdefault(places.devices[block], []).append(block)
    if value.producer is None:
        return [Leg(value.name, value.name, d, None, tuple(r), value.has_gradient) for d, r in by_device.items()]
    legs = [Leg(value.name, value.name, places.devices[value.producer], value.producer, (), value.has_gradient)]
    for block in value.readers if value.has_gradient else ():
        if places.has_backward[block]:
            if places.devices[block] != legs[-1].device:
                name = value.name if all(leg.device != places.devices[block] for leg in legs) else None
                name = f"{value.name}.{len(legs)}" if name is None else name
                legs.append(Leg(value.name, name, places.devices[block], None, (), has_gradient=True))
            legs[-1] = replace(legs[-1], readers=(*legs[-1].readers, block))
    for index in range(1, len(legs)):
        legs[index - 1], legs[index] = _joined(legs[index - 1], legs[index], places)
    for device, blocks in by_device.items():
        rest = [block for block in blocks if not (value.has_gradient and places.has_backward[block])]
        legs = _with_further_readers(value, legs, device, rest, places) if rest else legs
    return legs


def _joined(one: Leg, other: Leg, places: _Places) -> tuple[Leg, Leg]:
    """A leg and the next one, with the crossing between them."""
    made = one.producer if one.comes is None else one.comes.forward
    assert made is not None
    goes, comes = places.forward_message(made, other.device)
    back_goes, back_comes = places.backward_message(other.readers[0], one.device)
    there = Crossing(other.device, goes, comes, back_comes, back_goes)
    here = Crossing(one.device, comes, goes, back_goes, back_comes)
    return replace(one, goes=(*one.goes, there)), replace(other, comes=here)


def _with_further_readers(
    value: Travelling, legs: list[Leg], device: int, blocks: Sequence[int], places: _Places
) -> list[Leg]:
    """The legs with readers on a device through which no gradient flows: on a leg that is there, or one more."""
    found = list(legs)
    for block in blocks:
        known = [i for i, leg in enumerate(found) if leg.device == device and _begin(leg) <= block]
        if known:
            leg = found[known[-1]]
            found[known[-1]] = replace(leg, readers=tuple(sorted((*leg.readers, block))))
            continue
        assert value.producer is not None
        goes, comes = places.forward_message(value.producer, device)
        found[0] = replace(found[0], goes=(*found[0].goes, Crossing(device, goes, comes)))
        here = Crossing(found[0].device, comes, goes)
        found.append(Leg(value.name, f"{value.name}.{len(found)}", device, None, (block,), False, here))
    return found


def _begin(leg: Leg) -> int:
    """The block with which it is there."""
    begin = leg.producer if leg.comes is None else leg.comes.forward
    assert begin is not None
    return begin
