"""device_of_each(): deals the blocks of a program to devices, in turns, so that all devices have about as much to do.

All micro-batches run through a block before the next block of a device. So turns are short: each device computes a
block or a few, and hands on; the next device goes on while the first has another micro-batch. Blocks that hold one
trained parameter are on one device, which makes its update; so are the blocks that make what the losses are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatrain.counts import counted
from megatrain.errors import LowerError
from megatrain.hardware.work import total_flops
from megatrain.passes.program import Program
from megatrain.passes.trained_blocks import has_backward, trained_holders

# A byte of weights counts like so many FLOP: while it crosses a link of 25 GB/s, a card computes about ten times as
# many. It crosses twice for all micro-batches together.
_FLOP_PER_BYTE = 600
# Deals are compared by a step of so many micro-batches for each device.
_MICRO_BATCHES = 2
# More legs than that are dealt one by one: a model of so many blocks has as many of each kind.
_MOST_LEGS = 64


class _Cost(NamedTuple):
    """What the forward of a block takes, and its backward with the forward repeated; 0 without one."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def device_of_each(program: Program, num_devices: int) -> tuple[int, ...]:
    """Deals blocks to devices.

    Args:
        program: After `measure`.
        num_devices: How many there are, at least two.

    Returns:
        The device of each block, which depends on the program alone.

    Raises:
        LowerError: If there are too few blocks that may be on different devices.
    """
    costs = [_cost(program, index) for index in range(len(program.blocks))]
    groups = _together(program)
    deals = dict.fromkeys(_deals(costs, num_devices, groups))
    able = [devices for devices in deals if len(set(devices)) == num_devices]
    if not able:
        raise LowerError(
            f"{counted(len(costs), 'block')} can't be dealt to {counted(num_devices, 'device')}.\n"
            "  Each device has at least one block. Blocks that share a trained parameter are on one device, and so are "
            "those whose results the model returns.\n"
            '  Use fewer devices or a smaller block_bytes; give TrainStep reads="loss" if the loss is the model\'s own.'
        )
    return min(able, key=lambda devices: _step(costs, devices, num_devices))


def _cost(program: Program, index: int) -> _Cost:
    block = program.blocks[index]
    cost = program.templates[block.template].cost
    assert cost is not None, "measure runs before dealing"
    copied = _FLOP_PER_BYTE * program.state_bytes(block) / 2
    forward = total_flops(cost.forward) + copied + 1.0
    if not has_backward(program, block):
        return _Cost(forward, 0.0)
    return _Cost(forward, forward + total_flops(cost.backward_of(program.needs_gradients(block))) + copied)


def _together(program: Program) -> Sequence[Sequence[int]]:
    """The blocks that must be on one device: by the first of them, each block once."""
    groups = [{block, *others} for block, *others in trained_holders(program).values()]
    producers = [program.values[ref.name].producer for ref in program.outputs if ref.kind == "value"]
    turns = [block.index for block in program.blocks if has_backward(program, block)][-1:]
    groups.append({*turns, *(producer for producer in producers if producer is not None)})
    merged: list[set[int]] = []
    for group in groups:
        apart = [other for other in merged if other.isdisjoint(group)]
        merged = [*apart, group.union(*(other for other in merged if other not in apart))]
    return sorted(sorted(group) for group in merged if group)


def _deals(costs: Sequence[_Cost], num_devices: int, groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Some deals: legs of about equal cost in turns, and each block to the device with the least, last one first."""
    totals = [cost.total for cost in costs]
    for number in range(num_devices, min(len(costs), _MOST_LEGS) + 1):
        yield _in_turns(_legs(totals, number), num_devices, groups)
    yield _in_turns(range(1, len(costs) + 1), num_devices, groups)
    yield _to_the_least(totals, num_devices, groups)


def _in_turns(ends: Sequence[int], num_devices: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    devices: list[int] = []
    for number, end in enumerate(ends):
        devices += [number % num_devices] * (end - len(devices))
    for first, *others in groups:
        for block in others:
            devices[block] = devices[first]
    return tuple(devices)


def _to_the_least(costs: Sequence[float], num_devices: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Gives each block to the device with the least so far, but not to the one that has the block after it."""
    members = {block: group for group in groups for block in group}
    found: dict[int, int] = {}
    loads = [0.0] * num_devices
    for block in reversed(range(len(costs))):
        if block not in found:
            others = [device for device in range(num_devices) if device != found.get(block + 1)]
            device = min(others, key=loads.__getitem__)
            for member in members.get(block, (block,)):
                found[member] = device
                loads[device] += costs[member]
    # The first block is on the first device.
    names = {device: name for name, device in enumerate(dict.fromkeys(found[block] for block in range(len(costs))))}
    return tuple(names[found[block]] for block in range(len(costs)))


def _step(costs: Sequence[_Cost], devices: Sequence[int], num_devices: int) -> float:
    """When a step ends in which each block waits for the one before, and each device takes its blocks in order."""
    numbers = range(_MICRO_BATCHES * num_devices)
    free, ready = [0.0] * num_devices, [0.0] * len(numbers)

    def run(block: int, number: int, seconds: float) -> None:
        device = devices[block]
        ready[number] = free[device] = max(free[device], ready[number]) + seconds

    *blocks, last = range(len(costs))
    for block in blocks:
        for number in numbers:
            run(block, number, costs[block].forward)
    for number in numbers:
        run(last, number, costs[last].total)
    for block in reversed(blocks):
        for number in numbers:
            run(block, number, costs[block].backward)
    return max(free)


def _legs(costs: Sequence[float], number: int) -> list[int]:
    """Where so many contiguous legs end, of which the most expensive one is as cheap as can be."""
    low, high = max(costs), sum(costs)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(costs, middle, number)) <= number else (middle, high)
    return _cut(costs, high, number)


def _cut(costs: Sequence[float], most: float, number: int) -> list[int]:
    """Ends of legs that each cost at most so much; more legs than needed only where there are to be so many."""
    ends: list[int] = []
    held = 0.0
    for index, cost in enumerate(costs):
        left, legs = len(costs) - index, number - len(ends) - 1
        if index and (held + cost > most or left == legs) and (not ends or ends[-1] != index):
            ends.append(index)
            held = 0.0
        held += cost
    return [*ends, len(costs)]
