"""DeviceUpdates: blocks whose weights, masters and moments stay on the device, which updates them."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.base.host_limits import available_bytes
from megatrain.base.sizes import format_bytes
from megatrain.device import DeviceEvent
from megatrain.device.host_pages import give_back, gives_back
from megatrain.device.unshared import held_elsewhere
from megatrain.errors import ExecuteError, OptimizerError
from megatrain.optim.block_update import check_names
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.optim.fast.on_device import Kernel, StateThere, kernel_on
from megatrain.optim.masters.halves import (
    SplitMaster,
    WholeMaster,
    in_memory,
    laid_out_like,
    memory_order,
    out_of_memory_order,
)
from megatrain.optim.masters.registry import Masters
from megatrain.optim.proxy import Optimizer
from megatrain.optim.updates import Updates
from megatrain.runtime.engine import Engine
from megatrain.runtime.stores.host_store import HostStore
from megatrain.runtime.versions import version
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.block_image import BlockImage, optimizer_image, views


@dataclass(slots=True, eq=False)
class _Updated:
    """One parameter whose state is on the device.

    Attributes:
        parameter: The user's.
        optimizer: Which updates it.
        there: Its state.
        versions: Of what the host has, as it was when the state was copied.
    """

    parameter: torch.Tensor
    optimizer: Optimizer
    there: StateThere
    versions: tuple[tuple[int, int], ...] = ()

    def on_host(self) -> list[torch.Tensor]:
        """What of the host is behind the device: the parameter, and its moments once it has some."""
        return [self.parameter, *self.moments]

    @property
    def moments(self) -> list[torch.Tensor]:
        """Those of the host, once there are some."""
        return [self.state[name] for name in _PATH.moments if name in self.state]

    @property
    def state(self) -> dict[str, Any]:
        """What its optimizer keeps; empty before its first update."""
        return self.optimizer.state.get(self.parameter) or {}

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes with each write into the host's tensors that torch counts, and where one is replaced."""
        return tuple((id(tensor), version(tensor)) for tensor in self.on_host())


@dataclass(slots=True, eq=False)
class _BlockThere:
    """One block that is on the device.

    Attributes:
        layout: Of its weights, the first bytes of `where`.
        where: Bytes of the arena.
        keys: Of what is trained, in the order of the layout.
        parameters: The same.
        copied: When the device has them; None once the host's memory is given back.
        is_ahead: The host has no values, or old ones.
        is_torn: An update has ended in the middle.
    """

    layout: BlockImage
    where: Bytes
    keys: Sequence[str]
    parameters: Sequence[_Updated]
    copied: DeviceEvent | None
    is_ahead: bool = False
    is_torn: bool = False


class DeviceUpdates:
    """Brings state to the device, updates it there, and gives a block back when somebody looks at something of it.

    From the copy on the host holds nothing of a block: the pages of its parameters, low halves and moments go back to
    the system, except where somebody else holds a tensor's memory as well. `changing` lists these tensors, so that any
    use of them gives their block back first. After that nothing of it on the device counts any more: the next step
    copies it again.

    Args:
        engine: Has the arena and the host store.
        optimizers: Of the parameters.
        masters: Likewise.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[Optimizer], masters: Masters) -> None:
        self._engine, self._optimizers, self._masters = engine, optimizers, masters
        self._kernel: Kernel | None = None
        self._there: dict[int, _BlockThere] = {}  # by the identity of the layout, which an engine keeps for good

    @property
    def is_ahead(self) -> bool:
        """Whether the host lacks the values of some block."""
        return any(block.is_ahead for block in list(self._there.values()))

    def changing(self) -> Iterator[torch.Tensor]:
        """The host's tensors that have no values, or old ones."""
        for block in list(self._there.values()):
            for each in block.parameters if block.is_ahead else ():
                yield from each.on_host()

    @property
    def vacated_bytes(self) -> int:
        """Bytes of the host's tensors that have no values, low halves too."""
        return sum(map(self._host_bytes, list(self._there.values())))

    def _host_bytes(self, block: _BlockThere) -> int:
        """Host bytes that the values of a block take which only the device has."""
        tensors = (t for each in block.parameters for t in (each.parameter, *self._apart(each)))
        return sum(t.nbytes for t in tensors) if block.is_ahead else 0

    def device_tensors(self) -> dict[int, torch.Tensor]:
        """What the device has in place of the host's tensors, low halves too, by their identity; like these in shape.

        Ready to be read by the calling thread, until the next step.
        """
        found: dict[int, torch.Tensor] = {}
        for each in (each for block in self._there.values() if block.is_ahead for each in block.parameters):
            order = memory_order(each.parameter)
            shape = in_memory(each.parameter, order).shape
            pairs = [(each.parameter, each.there.values), *zip(each.moments, each.there.moments, strict=False)]
            if each.there.low is not None:
                pairs.append((self._masters.low_of(each.parameter), each.there.low))
            found |= {id(host): out_of_memory_order(there.view(shape), order) for host, there in pairs}
        if found:
            self._engine.streams.settle()
        return found

    # -- in a step ------------------------------------------------------------------------------------------

    def keep(self, places: Mapping[int, Bytes]) -> None:
        """Gives back all blocks but those that a step has at the same places.

        Args:
            places: By identity of the layout.
        """
        # The arena may live longer.
        give_back = weakref.WeakMethod(self._before_loss)
        self._engine.arena.before_loss = lambda offset, nbytes: (found := give_back()) and found(offset, nbytes)
        for key, block in list(self._there.items()):
            if places.get(key) != block.where:
                self._give_back([block])
                self._store.lock_again(block.layout, block.keys)

    def bring(self, layout: BlockImage, where: Bytes, trained: Mapping[str, torch.Tensor], *, stays: bool) -> None:
        """Has a block's weights and state on the device; copies them unless they are there.

        Args:
            layout: Of its weights.
            where: Bytes of the arena.
            trained: Its trained parameters by key, in the order of the layout.
            stays: What is frozen of it is there, if the rest is.

        Raises:
            ExecuteError: If somebody wrote what the host has while the device was ahead.
            OptimizerError: If the optimizer's state isn't AdamW's.
        """
        known = self._there.get(id(layout))
        if known is not None:
            parameters = [each.parameter for each in known.parameters]
            is_same = stays and known.where == where and [*map(id, parameters)] == [*map(id, trained.values())]
            if is_same and all(each.stamp() == each.versions for each in known.parameters):
                return
            self._give_back([known])  # raises if what was written is lost
        arena, store = self._engine.arena, self._store
        room = arena.write(*where)
        store.prefetch(layout, room[: layout.nbytes])
        owners = {id(p): o for o in self._optimizers for group in o.param_groups for p in group["params"]}
        weights = {entry.key: weight for entry, weight in zip(layout.entries, views(layout, room), strict=True)}
        made = [
            self._brought(parameter, owners[id(parameter)], weights[key], behind)
            for (key, parameter), behind in zip(trained.items(), _behind(layout, room, trained), strict=True)
        ]
        stream = self._engine.device.current_stream()
        assert stream is not None
        self._there[id(layout)] = _BlockThere(layout, where, list(trained), made, stream.record_event())

    def vacate(self) -> None:
        """Gives the host's memory back of blocks that were brought in this step: nothing is updated yet."""
        for block in list(self._there.values()):
            if block.copied is not None:
                self._vacate(block)

    @property
    def _store(self) -> HostStore:
        store = self._engine.store
        assert store is not None
        return store

    def _vacate(self, block: _BlockThere) -> None:
        """Gives the host's memory of a block back to the system, once nothing on the device reads it any more."""
        if block.copied is not None:
            self._engine.device.wait_for(block.copied)
        block.copied, block.is_ahead = None, True
        if not gives_back():
            return
        own = [p for p in block.parameters if not held_elsewhere({"": p.parameter})]
        keys = {key for key, each in zip(block.keys, block.parameters, strict=True) if each in own}
        self._store.give_back(block.layout, keys)
        for tensor in (t for each in block.parameters for t in self._apart(each) if not held_elsewhere({"": t})):
            if not tensor.is_pinned():  # by the user: the device would go on with pages that the host doesn't see
                give_back(tensor.data_ptr(), tensor.nbytes)

    def _apart(self, each: _Updated) -> list[torch.Tensor]:
        """What the host has of a parameter's state outside of the store."""
        low = [] if each.there.low is None else [self._masters.low_of(each.parameter)]
        return [*low, *each.moments]

    def _brought(
        self, parameter: torch.Tensor, optimizer: Optimizer, weight: torch.Tensor, behind: Sequence[torch.Tensor]
    ) -> _Updated:
        master, order = self._masters[parameter], memory_order(parameter)
        *low, mean, square = behind
        copy = self._engine.device.copy
        if isinstance(master, SplitMaster):
            copy(low[0], master.low.view(-1))
        else:
            assert isinstance(master, WholeMaster), "others have no update on the device"
        there = StateThere(in_memory(weight, order).view(-1), low[0] if low else None, mean, square)
        found = _Updated(parameter, optimizer, there)
        if state := found.state:
            check_names(parameter, _PATH, state)
            for name, out in zip(_PATH.moments, (mean, square), strict=True):
                state[name] = laid_out_like(state[name], parameter)
                copy(out, in_memory(state[name], order).view(-1))
        else:
            mean.zero_()
            square.zero_()
        found.versions = found.stamp()
        return found

    def update(self, layout: BlockImage, block: int, gradients: Iterable[Any], updates: Updates) -> None:
        """Updates a block, as work of the current stream.

        Args:
            layout: Of its weights.
            block: Its number.
            gradients: On the device, of the trained parameters; None where there is none.
            updates: The optimizers' step, which has begun; has the factor of clipping.

        Raises:
            OptimizerError: If a gradient is sparse; before anything is written, as other errors.
        """
        there, self._kernel = self._there[id(layout)], self._kernel or kernel_on(self._engine.device)
        assert self._kernel is not None
        pairs = [pair for pair in zip(there.parameters, gradients, strict=True) if pair[1] is not None]
        sparse = next((each for each, gradient in pairs if gradient.layout != torch.strided), None)
        if sparse is not None:
            raise OptimizerError(_SPARSE.format(tuple(sparse.parameter.shape)))
        _check_whole(there)
        options = [updates.options(each.parameter) for each, _ in pairs]
        is_resident = not there.is_ahead  # the loss has looked
        for (each, gradient), own in zip(pairs, options, strict=True):
            flat = in_memory(gradient, memory_order(each.parameter)).contiguous().view(-1)
            there.is_torn = updates.has_updated = True
            step = int(each.state["step"].item()) + 1 if each.state else 1
            self._kernel(each.there, flat, step, own, updates.scale)
            if not each.state:
                is_resident = True  # zeros, in memory as the C library has it
                each.optimizer.state[each.parameter].update(_PATH.new_state(each.parameter))
            each.state["step"].add_(1)
            each.versions = each.stamp()
        there.is_ahead = True
        if is_resident:
            self._vacate(there)
        there.is_torn = False
        updates.note_updated(block)

    # -- between steps --------------------------------------------------------------------------------------

    def write_back(self, looked: Iterable[torch.Tensor] | None = None) -> None:
        """Has the host's values of some tensors within a step, whose checks don't take this for a write of the user's.

        The device's values still count, and the host's are lost with the next update.

        Args:
            looked: Some of `changing`; None for all.

        Raises:
            ExecuteError: As `give_back`.
        """
        self._write_back(self._blocks_of(looked), is_within=True)

    def give_back(self, looked: Iterable[torch.Tensor] | None = None) -> None:
        """Has the host's values of some tensors, and forgets the whole blocks that they are of on the device.

        Args:
            looked: Some of `changing`; None for all.

        Raises:
            ExecuteError: If the host has no room; nothing is changed then. Or if somebody has written what the host
                had meanwhile; that is lost.
        """
        self._give_back(self._blocks_of(looked))

    def _blocks_of(self, looked: Iterable[torch.Tensor] | None) -> list[_BlockThere]:
        blocks = list(self._there.values())
        if looked is None:
            return blocks
        asked = set(map(id, looked))
        return [b for b in blocks if any(id(t) in asked for each in b.parameters for t in each.on_host())]

    def _give_back(self, blocks: Sequence[_BlockThere]) -> None:
        self._write_back(blocks, is_within=False)
        for block in blocks:
            self._there.pop(id(block.layout), None)

    def _write_back(self, blocks: Sequence[_BlockThere], *, is_within: bool) -> None:
        ahead = [block for block in blocks if block.is_ahead]
        if not ahead:
            return
        pairs = [pair for block in ahead for pair in zip(block.keys, block.parameters, strict=True)]
        everything = [each for _, each in pairs]
        _check_room(sum(map(self._host_bytes, ahead)))
        is_written = any(each.stamp() != each.versions for each in everything)
        self._engine.streams.settle()  # another thread, or another stream, may look
        with torch.no_grad():
            for key, each in pairs:
                self._write(each, is_counted=is_written or not is_within)
                self._store.take(key, each.there.values)
        self._engine.device.synchronize()
        for block in ahead:
            block.is_ahead = False
        if is_written:
            raise ExecuteError(_WRITTEN)

    def _write(self, each: _Updated, *, is_counted: bool) -> None:
        parameter, there, order = each.parameter, each.there, memory_order(each.parameter)
        # Through `.data`: torch doesn't count that as a write.
        pairs = [
            (in_memory(out.data, order).view(-1), source)
            for out, source in zip(each.moments, there.moments, strict=False)
        ]
        if there.low is not None:
            pairs.append((in_memory(self._masters.low_of(parameter), order).view(-1), there.low))
        for out, source in pairs:
            self._engine.device.copy(out, source)
        if is_counted:
            torch.autograd.graph.increment_version([parameter, *each.moments])
            self._masters.wrote(parameter)
        each.versions = each.stamp()

    def _before_loss(self, offset: int, nbytes: int) -> None:
        """Bytes of the arena are about to be lost: those who are ahead there go back first."""
        end = offset + nbytes
        gone = [
            b for b in list(self._there.values()) if b.where.offset < end and offset < b.where.offset + b.where.nbytes
        ]
        if gone:
            self._give_back(gone)


_PATH = AdamWInOnePass()


def _check_room(nbytes: int) -> None:
    """Refuses to bring state to the host that it has no room for.

    Raises:
        ExecuteError: With the bytes.
    """
    if nbytes > (available := available_bytes()):
        raise ExecuteError(_NO_ROOM.format(format_bytes(nbytes), format_bytes(available)))


def _check_whole(block: _BlockThere) -> None:
    """Refuses a block of which an unknown part is updated.

    Raises:
        ExecuteError: Always, for such a block.
    """
    if block.is_torn:
        raise ExecuteError(_TORN)


def _behind(layout: BlockImage, room: torch.Tensor, trained: Container[str]) -> Iterator[list[torch.Tensor]]:
    """Per trained parameter, what lies behind a block's weights: a low half if it is bf16, and both moments, flat."""
    behind = optimizer_image(layout, trained)
    assert room.numel() == layout.nbytes + behind.nbytes, "planned for as much"
    made = iter(views(behind, room[layout.nbytes :]))
    for entry in (entry for entry in layout.entries if entry.key in trained):
        yield [next(made) for _ in range(3 if entry.spec.dtype == torch.bfloat16 else 2)]


_WRITTEN = (
    "a parameter, or a moment of the optimizer, was written through another tensor of the same memory.\n"
    "  The device had updated it, and the host has its values again when somebody uses the parameter or\n"
    "  optimizer.state itself. This write came before, and is lost: all is as the latest step left it.\n"
    "  Write through the parameter: `with torch.no_grad(): parameter.copy_(...)`."
)
_NO_ROOM = (
    "to have parameters and moments on the host that the device updates takes {} of host memory, {} are available.\n"
    "  The host has no room for these blocks, so their state is on the device alone, and a use brings a block back.\n"
    "  TrainStep.save writes all of it straight from the device. Use fewer tensors between two steps, which take\n"
    "  the memory back; prepare steps of other shapes, and evaluate from a checkpoint, before or apart."
)
_TORN = (
    "an update on the device has failed in the middle of a block.\n"
    "  Parts of its parameters and moments are updated, and others aren't.\n"
    "  Load a checkpoint."
)
_SPARSE = (
    "the gradient of a {} parameter is sparse.\n"
    "  An update takes dense tensors of the parameter's shape.\n"
    "  Check hooks on gradients, and embeddings with sparse=True."
)
