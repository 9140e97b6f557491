"""Moments in a file: where the state of each parameter is, and the buffers that blocks have for their updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatrain.base.counts import counted
from megatrain.base.host_limits import return_free_memory
from megatrain.base.sizes import PAGE, aligned, format_bytes
from megatrain.base.torch_private import FakeTensorMode
from megatrain.device.host_pages import HostPages
from megatrain.errors import OptimizerError, OptionError
from megatrain.files.scratch_file import FileRange, ScratchFile
from megatrain.optim.fast import fast_path
from megatrain.optim.fast.adamw import InOnePass
from megatrain.optim.masters.halves import WholeMaster
from megatrain.optim.proxy import Optimizer, empty
from megatrain.optim.trained_model import TrainedModel
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The state of a parameter in the file.

    Args:
        offset: Its first byte.
        nbytes: A multiple of `PAGE`.
        names: Of all its state, in the order in which the optimizer makes it.
        fields: By the name of the state that is there, its place in the region, and what it is. The rest, the count of
            steps, stays in memory.
    """

    offset: int
    nbytes: int
    names: tuple[str, ...]
    fields: Mapping[str, tuple[int, TensorSpec]]

    def tensors(self, bytes_at: Callable[[int, int], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state as tensors over bytes of the region, from a place on and so many."""
        return {name: _view(bytes_at(start, spec.nbytes), spec) for name, (start, spec) in self.fields.items()}


@dataclass(frozen=True, slots=True)
class MomentLayout:
    """Where a file has the optimizer's state of each parameter; prints a line for each.

    Args:
        regions: By the parameter's key, in the order of the file.
    """

    regions: Mapping[str, StatePlace]

    @staticmethod
    def of(optimizers: Sequence[Optimizer], parameters: Mapping[str, tuple[torch.Tensor, TensorSpec]]) -> MomentLayout:
        """Lays out the state of all parameters that optimizers hold, before they have any.

        Args:
            optimizers: In the order of their steps.
            parameters: Those that are trained, by key, and what they are: fp32, or bf16 with a master of more bits.

        Raises:
            OptimizerError: If the state of one can't be in a file.
        """
        groups = {id(p): (each, group) for each in optimizers for group in each.param_groups for p in group["params"]}
        regions, offset = dict[str, StatePlace](), 0
        known: dict[tuple[InOnePass, TensorSpec], StatePlace] = {}  # a model has few kinds of parameters
        for key, (parameter, spec) in parameters.items():
            if id(parameter) not in groups or not spec.numel:
                continue
            optimizer, group = groups[id(parameter)]
            has_master = spec.dtype in (torch.float32, torch.bfloat16)
            path = fast_path(optimizer, group, is_whole=spec.dtype == torch.float32) if has_master else None
            if not isinstance(path, InOnePass):
                how = "" if path is not None or spec.dtype != torch.float32 else " with fused=True"
                raise OptimizerError(
                    f"the state of `{key}`, {spec}, can't be in a file: {type(optimizer).__name__} updates it.\n"
                    f"  Files have the state of AdamW8bit and of torch's AdamW{how}, without amsgrad and capturable.\n"
                    "  Use one of these, or leave offload out."
                )
            if (path, spec) not in known:
                known[path, spec] = _place(path, spec)
            regions[key] = replace(known[path, spec], offset=offset)
            offset += regions[key].nbytes
        return MomentLayout(regions)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return sum(region.nbytes for region in self.regions.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the regions, by key: what is read and written around an update."""
        return {key: region.nbytes for key, region in self.regions.items()}

    def of_keys(self, keys: Collection[str]) -> MomentLayout:
        """The layout of some parameters."""
        return MomentLayout({key: region for key, region in self.regions.items() if key in keys})

    def bytes_of(self, name: str) -> int:
        """Bytes of all state of a name, such as `exp_avg`."""
        return sum(region.fields[name][1].nbytes for region in self.regions.values() if name in region.fields)

    def __str__(self) -> str:
        lines = [f"moments: {counted(len(self.regions), 'parameter')}, {self.nbytes} B"]
        for key, region in self.regions.items():
            fields = ", ".join(f"{name} {spec} at {start}" for name, (start, spec) in region.fields.items())
            lines.append(f"  {region.offset}+{region.nbytes}  {key}: {fields}")
        return "\n".join(lines)


def _place(path: InOnePass, spec: TensorSpec) -> StatePlace:
    """Where the state of a parameter is from the first byte of its region on."""
    with FakeTensorMode():
        state = path.new_state(empty(spec))
    fields, end = dict[str, tuple[int, TensorSpec]](), 0
    for name in (*path.moments, *path.numbers[1:]):
        fields[name] = end, TensorSpec.of(state[name])
        end = aligned(end + fields[name][1].nbytes)
    return StatePlace(0, aligned(end, PAGE), tuple(state), fields)


def moment_layout(model: TrainedModel) -> MomentLayout:
    """Lays out the state of a model's optimizers in a file.

    Raises:
        OptionError: If there is no optimizer.
        OptimizerError: If the state of a parameter can't be in a file.
    """
    if not model.optimizers:
        raise OptionError(
            "offload without an optimizer says nothing.\n  The optimizer's state is what a file has between updates.\n"
            '  Give optimizer="AdamW", say.'
        )
    trained, parameters = {key: entry.spec for key, entry in model.trained.items()}, model.parameters
    held = {id(p) for each in model.optimizers for group in each.param_groups for p in group["params"]}
    narrow = [key for key, spec in trained.items() if spec.dtype == torch.bfloat16 and id(parameters[key]) in held]
    if model.master is WholeMaster and narrow:
        raise OptimizerError(
            f"the state of `{narrow[0]}`, {trained[narrow[0]]}, can't be in a file: it has no master.\n"
            '  In precision="fp32" the optimizer\'s own code updates bf16 parameters.\n'
            '  Use precision="bf16", or leave offload out.'
        )
    return MomentLayout.of(model.optimizers, {key: (parameters[key], spec) for key, spec in trained.items()})


class Moments:
    """The state of optimizers in a file, and of some blocks in buffers of memory, where their updates change it.

    Between updates `optimizer.state` has tensors that are mapped from the file: a `state_dict` or a checkpoint has the
    values, and user code may write into them. State that others put there instead (`load_state_dict`) is copied into
    the file when a step begins. In an update the state is a view of a buffer. The state of other blocks, those of which
    a step's schedule has no reads and writes, stays in memory, as if there were no file; so it is copied out of the
    file where an earlier step or a checkpoint has put it there.

    A step's schedule reads and writes blocks ahead of and after their updates. An update that nobody has read for, of a
    step that failed or is completed late, reads first; `write_changed` writes what is left then.

    Args:
        layout: Where what is.
        parameters: By key.
        optimizers: Of the parameters.
        folder: Where the file is.

    Raises:
        OptionError: See `ScratchFile`.
    """

    def __init__(
        self,
        layout: MomentLayout,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        folder: Path,
    ) -> None:
        self.layout = layout
        self._optimizers = optimizers
        self.file = ScratchFile(folder, layout.nbytes)
        self._regions = {id(parameters[key]): region for key, region in layout.regions.items()}
        self._parameters = [parameters[key] for key in layout.regions]  # whose identities stay theirs
        # Each has a storage of its own, so that a copy or a pickle has no more than its values.
        self._mapped = {
            key: region.tensors(lambda start, nbytes, r=region: self.file.tensor(r.offset + start, nbytes))
            for key, region in self._regions.items()
        }
        self._blocks: Sequence[Sequence[torch.Tensor]] = ()
        self._buffers: Mapping[int, int] = {}
        self._buffer_of: Mapping[int, int] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._views: dict[int, dict[int, dict[str, torch.Tensor]]] = {}  # by block and parameter
        self._held: dict[int, int] = {}  # the block in each buffer
        self._changed: set[int] = set()
        self._lock = threading.RLock()
        self._adopt(self._parameters)

    def __repr__(self) -> str:
        return f"<Moments: {format_bytes(self.layout.nbytes)} in `{self.file.folder}`, {self.file.how}>"

    # -- between steps --------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the buffers take."""
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def mapped(self) -> frozenset[int]:
        """Identities of the tensors that are mapped from the file."""
        return frozenset(id(tensor) for tensors in self._mapped.values() for tensor in tensors.values())

    def _adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copies their state into the file, unless it is there; state of another shape or dtype stays as it is."""
        for optimizer in self._optimizers:
            for parameter in parameters:
                if state := optimizer.state.get(parameter):
                    self._put(state, self._regions[id(parameter)], self._mapped[id(parameter)])

    def _take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copies their state out of the file into memory."""
        for optimizer in self._optimizers:
            for parameter in parameters:
                state, mapped = optimizer.state.get(parameter) or {}, self._mapped[id(parameter)]
                state.update({name: value.clone() for name, value in mapped.items() if state.get(name) is value})

    def _put(self, state: dict[str, Any], region: StatePlace, places: Mapping[str, torch.Tensor]) -> None:
        for name, (_, spec) in region.fields.items():
            value = state.get(name)
            if value is places[name] or not isinstance(value, torch.Tensor):
                continue
            if (tuple(value.shape), value.dtype, value.layout) == (spec.shape, spec.dtype, torch.strided):
                places[name].copy_(value.detach())
                state[name] = places[name]

    def give_state(self, parameter: torch.Tensor, names: Iterable[str]) -> None:
        """Gives a parameter without state places in the file, for a load to fill, if the load has the same names."""
        region = self._regions.get(id(parameter))
        if region is None or set(names) != set(region.names):
            return
        holder = next(o for o in self._optimizers if any(parameter is p for g in o.param_groups for p in g["params"]))
        if not holder.state.get(parameter):
            holder.state[parameter] = _new_state(region, self._mapped[id(parameter)])

    def begin(
        self, blocks: Sequence[Sequence[torch.Tensor]], buffers: Mapping[int, int], buffer_of: Mapping[int, int]
    ) -> None:
        """Makes the buffers of a step, and moves state to where the step looks for it.

        Args:
            blocks: The parameters that are updated with each block.
            buffers: The bytes of each buffer.
            buffer_of: The buffer of each block whose state is in the file; that of other blocks stays in memory.
        """
        self.write_changed()
        if buffers != self._buffers:
            self._views.clear()
            self._memory.clear()  # not both at a time
            for buffer, nbytes in buffers.items():
                pages = HostPages.of(nbytes)
                pages.keep_from_children()
                self._memory[buffer] = pages.tensor()
        if blocks is not self._blocks or buffer_of != self._buffer_of:
            self._views.clear()
        self._blocks, self._buffers, self._buffer_of = blocks, buffers, buffer_of
        staying = {id(p) for block, each in enumerate(blocks) if block not in buffer_of for p in each}
        self._adopt([p for p in self._parameters if id(p) not in staying])  # first, so that not all is in memory
        self._take([p for p in self._parameters if id(p) in staying])

    # -- in a step ------------------------------------------------------------------------------------------

    def read(self, block: int) -> None:
        """Reads the state of a block into its buffer.

        Raises:
            ExecuteError: If the disk fails.
        """
        buffer = self._buffer_of[block]
        with self._lock:
            other = self._held.get(buffer)
        if other is not None:
            self.write(other)
        self.file.read(self._ranges(block), self._memory[buffer])
        with self._lock:
            self._held[buffer] = block

    def write(self, block: int) -> None:
        """Writes the state of a block, if an update has changed it, and frees its buffer.

        Raises:
            ExecuteError: If the disk fails; the buffer still has the state then.
        """
        buffer = self._buffer_of[block]
        if block in self._changed:
            self.file.write(self._ranges(block), self._memory[buffer])
        with self._lock:
            self._changed.discard(block)
            if self._held.get(buffer) == block:
                del self._held[buffer]

    @property
    def is_behind(self) -> bool:
        """Whether the file has old values of a block: its write has failed, or is to come."""
        return bool(self._changed)

    def changing(self) -> Iterator[torch.Tensor]:
        """The mapped tensors that have old values."""
        for block in [*self._changed]:
            for identity, _ in self._members(block):
                yield from self._mapped[identity].values()

    def write_changed(self) -> None:
        """Writes all that updates have changed.

        Raises:
            ExecuteError: If the disk fails.
        """
        for block in [*self._held.values()]:
            self.write(block)

    @contextmanager
    def holding(
        self,
        block: int,
        held: Sequence[tuple[Optimizer, Sequence[torch.Tensor]]],
        gradients: Mapping[torch.Tensor, torch.Tensor],
    ) -> Generator[None]:
        """Has the state of a block in its buffer in the body, which updates it.

        Args:
            block: The block.
            held: Its parameters, by optimizer.
            gradients: What they are updated with; parameters without a gradient get no new state.

        Raises:
            ExecuteError: If the state must be read, and the disk fails.
        """
        if block not in self._buffer_of:
            yield
            return
        with self._lock:
            is_there = self._held.get(self._buffer_of[block]) == block
        if not is_there:
            self.read(block)
        known = self._views_of(block)
        members, is_first = [(o.state, p) for o, parameters in held for p in parameters if id(p) in known], False
        for states, parameter in members:
            views, mapped = known[id(parameter)], self._mapped[id(parameter)]
            state = states.get(parameter)
            if state:
                state.update({name: views[name] for name in views if state.get(name) is mapped[name]})
            elif parameter in gradients:
                for view in views.values():  # user code may have dropped the state that the file has
                    view.zero_()
                states[parameter], is_first = _new_state(self._regions[id(parameter)], views), True
        self._changed.add(block)
        try:
            yield
        finally:
            for states, parameter in members:
                if state := states.get(parameter):
                    views, mapped = known[id(parameter)], self._mapped[id(parameter)]
                    self._put(state, self._regions[id(parameter)], views)  # what the update has replaced
                    state.update({name: mapped[name] for name in views if state.get(name) is views[name]})
            if is_first:
                return_free_memory()  # as a first update in memory does

    def _members(self, block: int) -> list[tuple[int, StatePlace]]:
        return [(id(p), self._regions[id(p)]) for p in self._blocks[block] if id(p) in self._regions]

    def _ranges(self, block: int) -> list[FileRange]:
        found, at = list[FileRange](), 0
        for _, region in self._members(block):
            found.append(FileRange(region.offset, region.nbytes, at))
            at += region.nbytes
        return found

    def _views_of(self, block: int) -> Mapping[int, Mapping[str, torch.Tensor]]:
        """The state of a block's parameters as views of its buffer: the same tensors in each step."""
        if block not in self._views:
            memory, at, views = self._memory[self._buffer_of[block]], 0, dict[int, dict[str, torch.Tensor]]()
            for identity, region in self._members(block):
                own = memory[at : at + region.nbytes]
                views[identity] = region.tensors(lambda start, nbytes, own=own: own[start : start + nbytes])
                at += region.nbytes
            self._views[block] = views
        return self._views[block]

    def close(self) -> None:
        """Ends the file's threads, and lets go of its handles."""
        self.file.close()


def _new_state(region: StatePlace, places: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """State before a first update, of memory that is zeroed or will be filled, and a count of steps."""
    return {name: places[name] if name in places else torch.tensor(0.0) for name in region.names}


def _view(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Bytes as a tensor."""
    flat = memory.view(spec.dtype)
    if spec.stride is None:
        return flat.view(spec.shape)
    return flat.as_strided(spec.shape, spec.stride)
