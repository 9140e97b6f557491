"""DealtValues: moves values and their gradients between devices to which the blocks of a model are dealt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatrain.device import HOST, Device
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.passes.split.dealt_program import DealtProgram
from megatrain.passes.split.strides import carried_shape, span, span_bytes
from megatrain.ranks.channels.mailbox import Mail, Mailbox, Rooms, Way
from megatrain.ranks.legs import Crossing
from megatrain.runtime.call import Call
from megatrain.runtime.engine import Engine
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.streams.events import Aborted
from megatrain.runtime.taken import Taken
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Stream
from megatrain.scheduler.step_kind import StepKind
from megatrain.sizes import aligned
from megatrain.tracer.spec import TensorSpec

_WORD = 8


class DealtValues:
    """Moves what crosses, through rooms of host memory.

    A message has a head: of each tensor whether there is one, and its strides; then the tensors' elements. Kernels see
    strides, so a tensor has the same ones on both devices. The thread of a stream waits for its copies, since another
    rank reads or writes the room next.

    Args:
        engine: Has the ranks, and the streams.
        loaded: The programs, one per micro-batch.
        kind: Of the step; a step whose blocks are all here moves nothing.

    Raises:
        ExecuteError: If a value can't be brought to another device as it is.
    """

    def __init__(self, engine: Engine, loaded: Sequence[Loaded], kind: StepKind):
        self._engine, self._device = engine, engine.device
        self._programs = [each.program for each in loaded if isinstance(each.program, DealtProgram)]
        assert not kind.is_dealt or len(self._programs) == len(loaded), "blocks are dealt, but here are all of them"
        check_dense(self._programs, self._device)
        self._rooms = _rooms(self._programs) if self._programs else {}
        self._ways = {
            (id(program), what, takes): _by_device(program, what, takes=takes)
            for program in {id(each): each for each in self._programs}.values()
            for what in "XD"
            for takes in (True, False)
        }

    @property
    def _mailbox(self) -> Mailbox:
        ranks = self._engine.ranks
        assert ranks is not None
        assert ranks.mailbox is not None
        return ranks.mailbox

    def begin(self) -> None:
        """Has the rooms there, before a step."""
        if self._rooms:
            self._mailbox.expect(self._rooms)

    def take(self, call: Call, kind: str, name: str) -> bool:
        """Takes memory of the device for what will come; tells whether it comes from another device."""
        program = call.loaded.program
        if not isinstance(program, DealtProgram):
            return False
        spec = program.values[name].spec
        place = HOST.torch_device if spec.on_host else self._device.torch_device
        if kind in ("value", "original"):
            nbytes = span_bytes(spec)
            assert nbytes is not None
            memory = torch.empty(nbytes // spec.dtype.itemsize, dtype=spec.dtype, device=place)
            call.set_value(name, memory.as_strided(spec.shape, _stride(spec)))
        elif kind == "gradient":
            # What comes has strides of its own.
            call.set_gradient(name, torch.empty(spec.numel, dtype=spec.dtype, device=place))
        return kind != "returned"

    def come(self, taken: Taken, instruction: Instruction) -> None:
        """X from other devices."""
        self._receive(taken, instruction, self._value)

    def go(self, taken: Taken, instruction: Instruction) -> None:
        """X to other devices."""
        call = taken.calls[instruction.micro_batch]
        self._send(taken, instruction, call.values.get)

    def gradients_come(self, taken: Taken, instruction: Instruction) -> None:
        """D from other devices."""
        self._receive(taken, instruction, self._gradient)

    def gradients_go(self, taken: Taken, instruction: Instruction) -> None:
        """D to other devices."""
        call = taken.calls[instruction.micro_batch]
        self._send(taken, instruction, call.gradients.get)

    def go_on(self) -> None:
        """Gives a transfer up if the step has failed meanwhile."""
        if self._engine.streams.failure is not None:
            raise Aborted("a transfer between devices")

    # -- messages ------------------------------------------------------------------------------------------

    def _moved(self, instruction: Instruction) -> Iterator[tuple[int, list[tuple[str, TensorSpec]]]]:
        """The values that an op moves, by the other device, in the order of the whole program."""
        program = self._programs[instruction.micro_batch]
        takes = instruction.position.stream == Stream.RECEIVE
        by_device = self._ways[id(program), instruction.op.what, takes].get(instruction.op.block, {})
        for device, names in by_device.items():
            yield device, [(name, program.values[name].spec) for name in names]

    def _send(self, taken: Taken, instruction: Instruction, tensor_of: Callable[[str], torch.Tensor | None]) -> None:
        for device, moved in self._moved(instruction):
            with self._give(device, instruction) as mail:
                self._lock(mail)
                head, offset = _head(mail, moved)
                for words, (name, spec) in zip(head, moved, strict=True):
                    tensor = tensor_of(name)
                    words[0] = int(tensor is not None)
                    if tensor is not None:
                        self._check_like(name, tensor, spec)
                        words[1:] = torch.tensor(tensor.stride(), dtype=torch.int64)
                        self._put(mail, offset, tensor.detach(), spec)
                    offset += aligned(spec.nbytes)
                self._device.synchronize()

    def _receive(
        self,
        taken: Taken,
        instruction: Instruction,
        place_of: Callable[[Call, str, TensorSpec, tuple[int, ...]], torch.Tensor],
    ) -> None:
        call = taken.calls[instruction.micro_batch]
        for device, moved in self._moved(instruction):
            with self._mailbox.take(device, instruction.micro_batch, self.go_on) as mail:
                self._lock(mail)
                head, offset = _head(mail, moved)
                for words, (name, spec) in zip(head, moved, strict=True):
                    if words[0]:
                        stride = tuple(int(jump) for jump in words[1:])
                        self._get(mail, offset, place_of(call, name, spec, stride), spec)
                    else:
                        call.drop("gradient" if instruction.op.what == "D" else "value", name)
                    offset += aligned(spec.nbytes)
                self._device.synchronize()

    def _give(self, device: int, instruction: Instruction) -> AbstractContextManager[Mail]:
        return self._mailbox.give(device, instruction.micro_batch, self.go_on)

    def _lock(self, mail: Mail) -> None:
        self._engine.bus.lock([mail.arena])

    def _put(self, mail: Mail, offset: int, tensor: torch.Tensor, spec: TensorSpec) -> None:
        carried = _carried(tensor)
        out = mail.content[offset : offset + carried.numel() * spec.dtype.itemsize].view(spec.dtype)
        flat = _flat(carried)
        if flat is None or spec.on_host:
            out.view(carried.shape).copy_(carried)
        else:
            self._engine.bus.to_host(out, flat, mail.arena)

    def _get(self, mail: Mail, offset: int, place: torch.Tensor, spec: TensorSpec) -> None:
        carried = _carried(place)
        source = mail.content[offset : offset + carried.numel() * spec.dtype.itemsize].view(spec.dtype)
        flat = _flat(carried)
        if flat is None or spec.on_host:
            carried.copy_(source.view(carried.shape))
        else:
            self._engine.bus.to_device(flat, source, mail.arena)

    def _value(self, call: Call, name: str, spec: TensorSpec, stride: tuple[int, ...]) -> torch.Tensor:
        memory = call.values[name]
        if memory.stride() == stride:
            return memory
        if span(spec.shape, stride) * spec.dtype.itemsize > memory.untyped_storage().nbytes():
            raise ExecuteError(
                f"value `{name}` has the strides {stride} on another device, not {memory.stride()} as captured.\n"
                "  Another device gets values in the layout that they have in one process, to have its bits.\n"
                '  Call contiguous() on it in the model, or train with across_devices="replicate".'
            )
        place = memory.as_strided(spec.shape, stride)  # dimensions of one element may have any
        call.set_value(name, place)
        return place

    def _gradient(self, call: Call, name: str, spec: TensorSpec, stride: tuple[int, ...]) -> torch.Tensor:
        memory = call.gradients[name]
        if (needed := span(spec.shape, stride)) > memory.numel():
            memory = torch.empty(needed, dtype=spec.dtype, device=memory.device)  # only on the host: see `_check_like`
        place = memory.as_strided(spec.shape, stride)
        call.set_gradient(name, place)
        return place

    # -- what can cross ------------------------------------------------------------------------------------

    def _check_like(self, name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
        is_plain = tensor.layout == torch.strided and tensor.dtype == spec.dtype and tuple(tensor.shape) == spec.shape
        if not is_plain or carried_shape(tensor.shape, tensor.stride()) is None:
            raise ExecuteError(
                f"`{name}`, or its gradient, is {tensor.dtype}{list(tensor.shape)}, {tensor.layout}, strides "
                f"{tensor.stride() if tensor.layout == torch.strided else 'none'}; captured as {spec}.\n"
                "  Between devices go dense tensors that don't overlap themselves, and gradients like their values.\n"
                '  Train this model with across_devices="replicate".'
            )
        if tensor.numel() > 0:
            spec = TensorSpec(spec.shape, spec.dtype, tuple(tensor.stride()), spec.on_host)
            _check_without_gaps(name, spec, self._device)


def check_dense(programs: Iterable[Program], device: Device) -> None:
    """Looks whether values can be brought to another device as they are captured.

    Args:
        programs: A device's parts of programs whose blocks are dealt; others bring nothing.
        device: Where they are.

    Raises:
        ExecuteError: If one has gaps between its elements.
    """
    for program in programs:
        if isinstance(program, DealtProgram):
            for name in (*program.comes, *program.goes):
                _check_without_gaps(name, program.values[name].spec, device)


def _check_without_gaps(name: str, spec: TensorSpec, device: Device) -> None:
    if device.is_host or spec.on_host or spec.stride is None:
        return
    nbytes = span_bytes(spec)
    if nbytes is None or nbytes > spec.nbytes:
        raise ExecuteError(
            f"`{name}`, or its gradient, has gaps between its elements on {device}: {spec}.\n"
            "  Between devices go tensors without gaps, whose memory is what their elements take.\n"
            '  Call contiguous() on it in the model, or train with across_devices="replicate".'
        )


def _by_device(program: DealtProgram, what: str, *, takes: bool) -> dict[int, dict[int, list[str]]]:
    """The values that each block's op moves, by the other device."""
    found: dict[int, dict[int, list[str]]] = {}
    comes: Mapping[str, Sequence[Crossing]] = {name: (crossing,) for name, crossing in program.comes.items()}
    for name, crossings in (comes if takes == (what == "X") else program.goes).items():
        for crossing in crossings:
            block = crossing.forward if what == "X" else crossing.backward
            if block is not None:
                found.setdefault(block, {}).setdefault(crossing.device, []).append(name)
    return {block: dict(sorted(moved.items())) for block, moved in found.items()}


def _rooms(programs: Sequence[DealtProgram]) -> dict[Way, Rooms]:
    """The rooms of all ways from and to this device: as large as the largest message, for each micro-batch one."""
    sizes: dict[Way, int] = {}
    for program in {id(each): each for each in programs}.values():
        me = program.device_number
        for what in "XD":
            for takes in (True, False):
                for by_device in _by_device(program, what, takes=takes).values():
                    for device, names in by_device.items():
                        way = (device, me) if takes else (me, device)
                        sizes[way] = max(sizes.get(way, 0), _message_bytes([program.values[n].spec for n in names]))
    return {way: Rooms(len(programs), nbytes) for way, nbytes in sizes.items()}


def _message_bytes(specs: Sequence[TensorSpec]) -> int:
    return aligned(_WORD * sum(1 + len(spec.shape) for spec in specs)) + sum(aligned(spec.nbytes) for spec in specs)


def _head(mail: Mail, moved: Sequence[tuple[str, TensorSpec]]) -> tuple[list[torch.Tensor], int]:
    """The words of each tensor, and where the first tensor's elements are."""
    sizes = [1 + len(spec.shape) for _, spec in moved]
    words = mail.content[: _WORD * sum(sizes)].view(torch.int64)
    return list(words.split(sizes)), aligned(_WORD * sum(sizes))


def _stride(spec: TensorSpec) -> tuple[int, ...]:
    return spec.stride if spec.stride is not None else torch.empty(spec.shape, device="meta").stride()


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that lie apart: of expanded dimensions the first."""
    found = carried_shape(tensor.shape, tensor.stride())
    assert found is not None
    return tensor.as_strided(*found)


def _flat(carried: torch.Tensor) -> torch.Tensor | None:
    """The same elements in the order of their memory; None if there are gaps between them."""
    if span(carried.shape, carried.stride()) != carried.numel():
        return None
    return carried.as_strided((carried.numel(),), (1,))


CROSSING: dict[tuple[str, str], Callable[[Any, Taken, Instruction], None]] = {
    (Stream.RECEIVE, "X"): lambda operations, *work: operations.dealt.come(*work),
    (Stream.RECEIVE, "D"): lambda operations, *work: operations.dealt.gradients_come(*work),
    (Stream.SEND, "X"): lambda operations, *work: operations.dealt.go(*work),
    (Stream.SEND, "D"): lambda operations, *work: operations.dealt.gradients_go(*work),
}
"""The handlers of `Operations` for what crosses."""
