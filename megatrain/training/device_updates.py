"""DeviceUpdates: blocks whose weights, masters and moments stay on the device, which updates them."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.errors import ExecuteError, OptimizerError
from megatrain.optim.block_update import check_names
from megatrain.optim.fast.adamw import AdamWInOnePass
from megatrain.optim.fast.on_device import Kernel, StateThere, kernel_on
from megatrain.optim.masters.halves import SplitMaster, WholeMaster, in_memory, laid_out_like, memory_order
from megatrain.optim.masters.registry import Masters
from megatrain.optim.proxy import Optimizer
from megatrain.optim.updates import Updates
from megatrain.runtime.engine import Engine
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
        return [self.parameter, *(value for value in self.state.values() if value.dim() or value.numel() > 1)]

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
        parameters: Those that are trained, in the order of the layout.
        is_ahead: An update has run since the copy, so the host has old values.
        is_torn: An update has ended in the middle.
    """

    layout: BlockImage
    where: Bytes
    parameters: Sequence[_Updated]
    is_ahead: bool = False
    is_torn: bool = False


class DeviceUpdates:
    """Brings state to the device, updates it there, and gives it back when somebody looks.

    While a block is ahead, the host's tensors have old values: `changing` lists them, so that any use of them gives all
    blocks back first. After that nothing on the device counts any more: the next step copies again.

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
        """Whether the host has old values of some block."""
        return any(block.is_ahead for block in list(self._there.values()))

    def changing(self) -> Iterator[torch.Tensor]:
        """The host's tensors that have old values."""
        for block in list(self._there.values()):
            for each in block.parameters if block.is_ahead else ():
                yield each.parameter
                yield from (value for value in each.state.values() if isinstance(value, torch.Tensor))

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
            self.write_back()  # raises if what was written is lost
        arena, store = self._engine.arena, self._engine.store
        assert store is not None
        room = arena.write(*where)
        store.prefetch(layout, room[: layout.nbytes])
        owners = {id(p): o for o in self._optimizers for group in o.param_groups for p in group["params"]}
        weights = {entry.key: weight for entry, weight in zip(layout.entries, views(layout, room), strict=True)}
        made = [
            self._brought(parameter, owners[id(parameter)], weights[key], behind)
            for (key, parameter), behind in zip(trained.items(), _behind(layout, room, trained), strict=True)
        ]
        self._there[id(layout)] = _BlockThere(layout, where, made)

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
        for (each, gradient), own in zip(pairs, options, strict=True):
            flat = in_memory(gradient, memory_order(each.parameter)).contiguous().view(-1)
            there.is_torn = updates.has_updated = True
            step = int(each.state["step"].item()) + 1 if each.state else 1
            self._kernel(each.there, flat, step, own, updates.scale)
            if not each.state:  # the host's moments are zeros without memory, until somebody writes them
                each.optimizer.state[each.parameter].update(_PATH.new_state(each.parameter))
            each.state["step"].add_(1)
            each.versions = each.stamp()
            there.is_ahead = True
        there.is_torn = False
        updates.note_updated(block)

    # -- between steps --------------------------------------------------------------------------------------

    def write_back(self, *, is_within: bool = False) -> None:
        """Copies all that is ahead to the host; the device's values still count.

        Args:
            is_within: A step is under way: its checks must not take this for a write of the user's.

        Raises:
            ExecuteError: If somebody has written what the host has meanwhile; that is lost.
        """
        ahead = [block for block in list(self._there.values()) if block.is_ahead]
        if not ahead:
            return
        is_written = any(each.stamp() != each.versions for block in ahead for each in block.parameters)
        self._engine.streams.settle()  # another thread, or another stream, may look
        with torch.no_grad():
            for each in (each for block in ahead for each in block.parameters if each.state):
                self._write(each, is_counted=is_written or not is_within)
        self._engine.device.synchronize()
        for block in ahead:
            block.is_ahead = False
        if is_written:
            raise ExecuteError(_WRITTEN)

    def give_back(self) -> None:
        """Copies all that is ahead to the host, and forgets what is on the device.

        Raises:
            ExecuteError: If somebody has written what the host has meanwhile; that is lost.
        """
        self._give_back(list(self._there.values()))

    def _give_back(self, blocks: Sequence[_BlockThere]) -> None:
        self.write_back()
        for block in blocks:
            self._there.pop(id(block.layout), None)

    def _write(self, each: _Updated, *, is_counted: bool) -> None:
        parameter, there, order = each.parameter, each.there, memory_order(each.parameter)
        # Through `.data`: torch doesn't count that as a write.
        pairs = [
            (in_memory(each.state[name].data, order).view(-1), source)
            for name, source in zip(_PATH.moments, (there.mean, there.square), strict=True)
        ]
        master = self._masters[parameter]
        if isinstance(master, SplitMaster) and there.low is not None:
            pairs.append((master.low.view(-1), there.low))
        pairs.append((in_memory(parameter.data, order).view(-1), there.values))
        for out, source in pairs:
            self._engine.device.copy(out, source)
        if is_counted:
            torch.autograd.graph.increment_version([parameter, *(each.state[name] for name in _PATH.moments)])
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
