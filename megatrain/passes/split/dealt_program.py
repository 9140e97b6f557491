"""DealtProgram: the blocks of a program that are dealt to one of several devices, and what crosses to and from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatrain.errors import LowerError
from megatrain.passes.program import Block, Program, Value
from megatrain.passes.split.strides import span_bytes
from megatrain.passes.trained_blocks import has_backward
from megatrain.ranks.legs import Crossing, Leg, Travelling, legs_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class DealtProgram(Program):
    """A program of some blocks of a whole one, numbered anew. A value that is here twice has two names.

    Args:
        whole: The whole program.
        devices: The device of each block of the whole.
        device_number: This one.
        numbers: The number in the whole of each block here.
        comes: Values that come from another device, in the order of the whole program.
        goes: Values that go to others, likewise.
    """

    whole: Program
    devices: tuple[int, ...]
    device_number: int
    numbers: tuple[int, ...]
    comes: Mapping[str, Crossing]
    goes: Mapping[str, tuple[Crossing, ...]]

    @property
    def has_losses(self) -> bool:
        """Whether the model's outputs are here."""
        return self.device_number == losses_device(self.whole, self.devices)

    def taken(self, inputs: Sequence[T]) -> list[T]:
        """The inputs that are used here, of all inputs of the whole program."""
        used = set(self.inputs)
        return [given for name, given in zip(self.whole.inputs, inputs, strict=True) if name in used]

    def __str__(self) -> str:
        # Not `super()`: a dataclass with slots is another class than the one of this body.
        lines = [f"blocks {', '.join(map(str, self.numbers))} on device {self.device_number}", Program.__str__(self)]
        return "\n".join(lines)


def whole_of(program: Program) -> Program:
    """The whole program of one that was dealt; any other as it is."""
    return program.whole if isinstance(program, DealtProgram) else program


def losses_device(program: Program, devices: Sequence[int]) -> int:
    """The device that has the model's outputs: that of the last block with a backward."""
    backward = [block.index for block in program.blocks if has_backward(program, block)]
    return devices[backward[-1] if backward else -1]


def deal(program: Program, devices: Sequence[int], device: int) -> DealtProgram:
    """Makes the program of one device.

    Args:
        program: The whole one, after `measure`.
        devices: The device of each block; see `device_of_each`.
        device: Which one.

    Raises:
        LowerError: If the program can't be dealt: buffers that it writes, outputs on several devices, or a value that
            can't be brought to another device as it is.
    """
    legs = legs_of(_travelling(program), devices, [has_backward(program, block) for block in program.blocks])
    _check(program, devices, legs)
    here = [leg for leg in legs if leg.device == device]
    numbers = tuple(block for block, other in enumerate(devices) if other == device)
    local = {block: index for index, block in enumerate(numbers)}
    is_here = device == losses_device(program, devices)
    outputs = program.outputs if is_here else ()
    returned = {ref.name for ref in outputs if ref.kind == "value"}
    known = {leg.value for leg in here}
    inputs = tuple(name for name in program.inputs if name in known or name in returned)
    blocks = tuple(_block(program, number, local, here) for number in numbers)
    values = _values(program, here, local, [name for name in inputs if name not in known])
    bound = {key for block in blocks for key in block.binding} | {ref.name for ref in outputs if ref.kind == "state"}
    names = {block.template for block in blocks}
    return DealtProgram(
        name=program.name,
        templates={name: template for name, template in program.templates.items() if name in names},
        blocks=blocks,
        values=values,
        inputs=inputs,
        buffers=(),
        constants={name: tensor for name, tensor in program.constants.items() if name in values},
        commits=(),
        outputs=outputs,
        state={key: entry for key, entry in program.state.items() if key in bound},
        device=program.device,
        provenance=program.provenance,
        alignment=program.alignment,
        block_bytes=program.block_bytes,
        gradient_order=program.gradient_order,
        whole=program,
        devices=tuple(devices),
        device_number=device,
        numbers=numbers,
        comes={leg.name: _renumbered(leg.comes, local) for leg in here if leg.comes is not None},
        goes={leg.name: tuple(_renumbered(each, local) for each in leg.goes) for leg in here if leg.goes},
    )


def _travelling(program: Program) -> list[Travelling]:
    readers = program.readers()
    outputs = {ref.name for ref in program.outputs if ref.kind == "value"}
    differentiated = {block.index for block in program.blocks if has_backward(program, block)}

    def has_gradient(value: Value) -> bool:
        is_read = value.name in outputs or not differentiated.isdisjoint(readers[value.name])
        return value.requires_grad and value.producer is not None and is_read

    return [Travelling(v.name, v.producer, readers[v.name], has_gradient(v)) for v in program.values.values()]


def _check(program: Program, devices: Sequence[int], legs: Sequence[Leg]) -> None:
    if program.commits or program.buffers:
        key = (*(key for key, _ in program.commits), *(key for _, key in program.buffers))[0]
        raise LowerError(
            f"the forward uses the buffer `{key}` and writes it, so that its blocks can't be dealt to devices.\n"
            "  What a micro-batch writes, the next one reads: on another device.\n"
            "  Use a norm without running statistics, or model.eval() for these modules."
        )
    there = losses_device(program, devices)
    outputs = {ref.name for ref in program.outputs if ref.kind == "value"}
    for leg in legs:
        value = program.values[leg.value]
        is_result = value.name in outputs and leg.producer is not None
        if is_result and (leg.device != there or any(crossing.backward is not None for crossing in leg.goes)):
            raise LowerError(
                f"the model returns `{value.name}` of block {leg.producer}, which other devices use as well.\n"
                "  The device of the losses has all outputs, and only there are they differentiated.\n"
                '  Give TrainStep reads="loss" if the loss is the model\'s own, or let the model return less.'
            )
        if leg.goes and span_bytes(value.spec) is None:
            raise LowerError(
                f"value `{value.name}` overlaps itself in memory (strides {value.spec.stride}).\n"
                "  Another device gets values in the layout that they have in one process, to have its bits.\n"
                '  Call contiguous() on it in the model, or train with across_devices="replicate".'
            )


def _block(program: Program, number: int, local: Mapping[int, int], legs: Sequence[Leg]) -> Block:
    block = program.blocks[number]
    names = {leg.value: leg.name for leg in legs if number in leg.readers}
    return replace(block, index=local[number], inputs=tuple(names[name] for name in block.inputs))


def _values(
    program: Program, legs: Sequence[Leg], local: Mapping[int, int], returned: Sequence[str]
) -> dict[str, Value]:
    """The values here: what the model returns without reading it comes last."""
    storages: dict[object, int] = {}
    found: dict[str, Value] = {}

    def add(name: str, value: Value, storage: object) -> None:
        found[name] = replace(value, name=name, storage=storages.setdefault(storage, len(storages)))

    for leg in legs:
        value = program.values[leg.value]
        producer = None if leg.producer is None else local[leg.producer]
        if leg.comes is None:
            add(leg.name, replace(value, producer=producer), value.storage)
            continue
        nbytes = span_bytes(value.spec)
        assert nbytes is not None
        changed = replace(value, producer=None, requires_grad=leg.has_gradient, storage_bytes=nbytes)
        add(leg.name, changed, leg.name)
    for name in returned:
        add(name, program.values[name], program.values[name].storage)
    return found


def _renumbered(crossing: Crossing, local: Mapping[int, int]) -> Crossing:
    backward = None if crossing.backward is None else local[crossing.backward]
    return replace(crossing, forward=local[crossing.forward], backward=backward)
