"""Engine: the parts that all compiled variants of one model share: streams, host store, device arena, templates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import nn

from megatrain.base.checks import Rule, checked, one_of
from megatrain.device import Device, LaunchGraphs, is_on_host, usable
from megatrain.device.bus import Bus
from megatrain.device.device_budget import DeviceBudget, MemoryFigures
from megatrain.errors import ExecuteError
from megatrain.files.weight_files import Maps
from megatrain.passes.canonicalize import template_key
from megatrain.passes.program import Program, Template
from megatrain.runtime.block import BlockRunner
from megatrain.runtime.gradients import GradientMemory
from megatrain.runtime.replays import Replays
from megatrain.runtime.stores.device_memory import Meter, Segments
from megatrain.runtime.stores.host_store import HostStore
from megatrain.runtime.stores.offload_buffers import BufferCopies, OffloadPool
from megatrain.runtime.stores.slots import DeviceArena
from megatrain.runtime.stores.weights import Weights
from megatrain.runtime.streams.events import Turn
from megatrain.runtime.streams.stream_set import Chaos, Recording, StreamSet
from megatrain.tracer.block_image import BlockImage, image, state_image
from megatrain.tracer.inventory import StateEntry, inventory
from megatrain.tracer.spec import DEVICE, TensorSpec


class Runners:
    """Makes runners, and finds those that are there."""

    def __init__(self, device: Device, kernels: str) -> None:
        self._device, self._kernels = device, kernels
        self._graphs = device.launch_graphs() if kernels == "graphs" else None
        self.why_unrecorded = ""
        # What recordings of each template hold on the device.
        self._recorded_bytes: dict[Any, int] = {}
        # It grows only with new captures: a dropped capture drops its runners.
        self._there: weakref.WeakValueDictionary[Any, BlockRunner] = weakref.WeakValueDictionary()

    @property
    def records_all(self) -> bool:
        """Whether all kernels are to be recorded, so that it is told where they can't be."""
        return self._kernels == "graphs"

    def of(self, template: Template, recorded_bytes: int | None = None) -> BlockRunner:
        """Returns the runner of a template; if `recorded_bytes` of the device are given, its kernels are recorded."""
        graphs = None if recorded_bytes is None else self._recording()
        key = _key(template), graphs is not None
        runner = self._there.get(key)
        if runner is None:
            kernels = "inductor" if self._kernels == "inductor" else "eager"
            replays = None if graphs is None else Replays(template, self._device, graphs, warns=self.records_all)
            runner = self._there[key] = BlockRunner(template, self._device, kernels, replays)
        if graphs is not None and recorded_bytes is not None:
            self._recorded_bytes[_key(template)] = recorded_bytes
        return runner

    def _recording(self) -> LaunchGraphs | None:
        if self._graphs is None and not self.why_unrecorded:
            try:
                self._graphs = self._device.launch_graphs()
            except ExecuteError as error:
                self.why_unrecorded = str(error).partition("\n")[0]
        return self._graphs

    def are_in_the_way(self, runners: Collection[BlockRunner], left: int) -> bool:
        """Tells whether recordings of other schedules hold memory that one needs."""
        if sum(self._recorded_bytes.values()) <= left:
            return False
        own = set(map(id, runners))
        return not {key for key, runner in self._recorded() if id(runner) in own}.issuperset(self._recorded_bytes)

    def make_room(self, runners: Collection[BlockRunner]) -> None:
        """Drops all recordings, of which none runs; only those of a schedule are made again.

        With `"auto"`, plans with eager's kernels take the place of the others, so that shapes which take turns don't
        record again and again.
        """
        assert self._graphs is not None
        own, kept = set(map(id, runners)), dict[Any, int]()
        for key, runner in self._recorded():
            is_own = id(runner) in own
            runner.forget_recordings("" if is_own or self.records_all else _GAVE_WAY)
            if is_own:
                kept[key] = self._recorded_bytes[key]
        self._graphs.release()
        self._recorded_bytes = kept

    def _recorded(self) -> list[tuple[Any, BlockRunner]]:
        return [(key, runner) for (key, is_recorded), runner in self._there.items() if is_recorded]

    def on_eager_kernels(self, program: Program) -> dict[str, str]:
        """Names the templates that run on eager's kernels though others were asked for, with the reasons."""
        there = {
            name: self._there.get((_key(template), is_recorded))
            for name, template in program.templates.items()
            for is_recorded in (False, True)
            if (_key(template), is_recorded) in self._there
        }
        return {name: runner.why_eager for name, runner in there.items() if runner is not None and runner.why_eager}


_GAVE_WAY = "another shape, or a call, needed the memory of recordings"


def _key(template: Template) -> Any:
    cost = template.cost
    return template_key(template), () if cost is None else (cost.held_state, cost.results)


_DEVICE = Rule(
    "a torch.device on this machine, or a Device",
    '{name}=torch.device("cpu")',
    lambda value: DEVICE.fault(value) if isinstance(value, torch.device | Device) else "is no torch.device",
)


class Engine:
    """The mutable half of a compiled model.

    Args:
        model: The model; its parameters become views of the host store.
        device: Compute device.
        chaos: Random delays, poisoned slots and injected faults, for tests.
        recording: Log of the issued operations and their waits, for tests.
        weights: Files that hold the model's state; read once, when the first program is adopted.
        moving: Entered while parameters get other memory, and while the user's changes are taken over.
        turn: Of the model.
        budget: The bound of the device memory that schedules take; for errors.
        kernels: What computes a block: `"auto"`, `"eager"`, `"graphs"` or `"inductor"`.

    Attributes:
        weights: Files whose values no program has needed yet, or that couldn't be read; None once they are.
        maps: What of the optimizers' state is used in the files of a checkpoint; None for nothing.
        why_no_backward: Why `loss.backward()` is refused; empty if it isn't.
    """

    @checked(device=_DEVICE, kernels=one_of("auto", "eager", "graphs", "inductor"))
    def __init__(
        self,
        model: nn.Module,
        device: Device | torch.device,
        *,
        chaos: Chaos | None = None,
        recording: Recording | None = None,
        weights: Weights | None = None,
        moving: Callable[[], AbstractContextManager[None]] = nullcontext,
        turn: Turn | None = None,
        budget: DeviceBudget | None = None,
        kernels: str = "eager",
    ):
        self._model = model
        self.why_no_backward = ""
        self._budget = budget
        self._moving = moving
        self.weights = weights
        self.maps: Maps | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._holders: list[tuple[dict[str, Any], str, str]] = []
        self._has_replaced = False
        self.device = usable(device)
        self._recording = recording
        self.set_chaos(chaos)
        self.meter = Meter(counts_host=self.device.is_host)
        self.arena = DeviceArena(self.device)
        self.store: HostStore | None = None
        self.bus = Bus(self.device)
        self.offload = OffloadPool(self.bus)
        self.buffers = BufferCopies(self.bus)
        self.gradients = GradientMemory(self.bus)
        self.segments = Segments(self.device)
        # The call whose forward last used the slots; only its backward may find weights in them.
        self._slot_owner: weakref.ref[Any] | None = None
        self.turn = turn or Turn()
        self.runners = Runners(self.device, kernels)
        # It grows only with new captures.
        self._images: dict[BlockImage, BlockImage] = {}

    @property
    def has_unread_weights(self) -> bool:
        """Whether there are `weights`."""
        return self.weights is not None

    @property
    def in_files(self) -> frozenset[str]:
        """Keys of frozen parameters that are used in the files of `weights`, or will be."""
        if self.weights is None:
            return frozenset() if self.store is None else self.store.in_files
        return frozenset(self.weights.staying(inventory(self._model)[1])) if self.weights.stay else frozenset()

    def leave_in_files(self) -> bool:
        """Decides, for want of memory, that frozen parameters stay in their files; returns whether some can.

        Nothing is decided once the files are read.
        """
        if self.weights is None or self.weights.stay:
            return False
        self.weights.stay = bool(self.weights.staying(inventory(self._model)[1]))
        return self.weights.stay

    def memory_figures(self, scheduled: int) -> MemoryFigures:
        """What is known of the device's memory, for a schedule that takes so many bytes."""
        budget = None if self._budget is None else self._budget.nbytes
        return MemoryFigures(self.device, budget, scheduled, self.meter.peak)

    def give_slots(self, owner: Any) -> None:
        """Notes whose weights the slots hold now; None for nobody's."""
        self._slot_owner = None if owner is None else weakref.ref(owner)

    def has_slots(self, owner: Any) -> bool:
        """Tells whether the slots are as `owner`'s forward left them."""
        return self._slot_owner is not None and self._slot_owner() is owner

    def reserve_slots(self, nbytes: int, scheduled: int, runners: Collection[BlockRunner] = ()) -> None:
        """Makes the arena large enough for the slots of a schedule, and counts it.

        An arena that another schedule left larger stays, unless the rest of this schedule needs the memory. So do
        recordings.

        Args:
            nbytes: Bytes of the slots.
            scheduled: Device bytes of the schedule, with the slots.
            runners: Of its blocks.
        """
        held = self.arena.nbytes
        budget = None if self._budget is None else self._budget.nbytes
        is_in_the_way = held > nbytes and budget is not None and held + scheduled - nbytes > budget
        is_resized = held < nbytes or is_in_the_way
        needs_room = budget is not None and self.runners.are_in_the_way(runners, budget - scheduled)
        if is_resized or needs_room:
            # Its memory goes back to the stream on which it was allocated, and another stream may still read it.
            self.streams.settle()
        if needs_room:
            self.runners.make_room(runners)
        if is_resized:
            self.arena.resize(nbytes)
        self.meter.set_arena(self.arena.nbytes)

    def is_tight(self, scheduled: int) -> bool:
        """Tells whether holes between tensors could take more memory than a schedule leaves of the budget.

        A hole that a tensor leaves in a segment is smaller than the tensor, or another would have gone into it.
        """
        budget = None if self._budget is None or self.device.is_host else self._budget.nbytes
        return budget is not None and 2 * scheduled > budget

    def refresh(self) -> None:
        """Takes over the user's changes to the model's state since the last call.

        Values changed in place need nothing: the parameters *are* the store. New memory (`p.data = x`) and new
        objects (`load_state_dict(assign=True)`) are copied in.
        """
        self.find_replaced()
        assert self.store is not None
        if self.maps is not None:
            self.maps.check()
        with self._moving():
            self.store.refresh(self.tensors if self._has_replaced else None)
        self._has_replaced = False

    def find_replaced(self) -> None:
        """Finds new objects in the places of the model's parameters and buffers."""
        # Each step asks several times, so a loop of C comes first.
        found = [holder.get(name) for holder, name, _ in self._holders]
        if all(map(is_, found, [self.tensors[key] for _, _, key in self._holders])):
            return
        for tensor, (_, _, key) in zip(found, self._holders, strict=True):
            if tensor is not None and tensor is not self.tensors[key]:
                self.tensors[key] = tensor
                self._has_replaced = True

    def bind_anew(self, keys: Collection[str]) -> None:
        """Puts new tensors, still without values, in the places of buffers: who holds the earlier ones keeps those."""
        fresh = {key: torch.empty_like(self.tensors[key]) for key in keys}
        for registry, name, key in self._holders:
            if key in fresh:
                registry[name] = fresh[key]
        self.tensors |= fresh
        self._has_replaced = self._has_replaced or bool(fresh)

    def rebind(self) -> None:
        """Looks up the model's state anew, after modules or their registries have changed between calls."""
        self.tensors = inventory(self._model)[1]
        self._holders = _holders(self._model, self.tensors)
        assert self.store is not None
        with self._moving():
            self.store.refresh(self.tensors)

    def set_chaos(self, chaos: Chaos | None) -> None:
        """Replaces the streams by new ones, disturbed by `chaos` or not at all; for tests, between calls."""
        self.chaos = chaos
        self.streams = StreamSet(self.device, chaos=chaos, recording=self._recording)

    def adopt(self, program: Program) -> list[BlockImage]:
        """Brings the state of a program's blocks into the host store and returns each block's image.

        Raises:
            ExecuteError: If a tensor of state is on the wrong device or has no storage (meta).
            WeightsError: If the files can't be read any more, or the tensors that they would fill were changed.
        """
        self.tensors = inventory(self._model)[1]
        self._holders = _holders(self._model, self.tensors)
        self._check_state(program)
        states = ([program.state[key] for key in block.binding] for block in program.blocks)
        layouts = (state_image(state, program.alignment) for state in states)
        images = [self._images.setdefault(layout, layout) for layout in layouts]
        self._bring(images)
        return images

    def adopt_state(self) -> dict[str, StateEntry]:
        """Brings all of the model's state into the host store, as it is now; returns its entries.

        State that no program has adopted gets an image for each tensor.

        Raises:
            ExecuteError: As for `adopt`.
            WeightsError: As for `adopt`.
        """
        entries, self.tensors = inventory(self._model)
        self._holders = _holders(self._model, self.tensors)
        for entry in entries.values():
            self._check_entry(entry)
        alignment = self.device.alignment
        fresh = [key for key in entries if self.store is None or not self.store.has(key)]
        self._bring([image([(key, entries[key].spec)], alignment) for key in fresh])
        self.refresh()
        return entries

    def release_slots(self) -> None:
        """Gives the memory of the slots back to torch's allocator, until the next run."""
        self.give_slots(None)
        self.streams.settle()
        self.arena.release()
        self.meter.set_arena(0)

    def _bring(self, images: list[BlockImage]) -> None:
        with self._moving():
            if self.weights is not None:
                self._load(images, self.weights)
            elif self.store is None:
                self.store = HostStore(images, self.tensors, self.bus)
            else:
                self.store.forget_resized(self.tensors)
                self.store.extend(images, self.tensors)
                # A comparison with this inventory can't find tensors that were replaced before it.
                self._has_replaced = True
            assert self.store is not None
            self.store.lock()

    def _load(self, images: list[BlockImage], weights: Weights) -> None:
        """Reads the files into the store, including state that no block uses: the model needs all of its state."""
        weights.check_unchanged(self._model)
        used = {entry.owner for layout in images for entry in layout.entries}
        unused = image([(key, TensorSpec.of(self.tensors[key])) for key in weights.keys if key not in used])
        try:
            self.store = HostStore([*images, unused], self.tensors, self.bus, weights)
        finally:
            weights.remember(self._model)  # after a failure the next call reads everything again
        self.weights = None

    def _check_state(self, program: Program) -> None:
        for entry in program.state.values():
            if entry.kind == "constant":
                continue
            if entry.owner not in self.tensors:
                raise ExecuteError(
                    f"the model has no {entry.kind} `{entry.owner}`.\n"
                    "  A program reads the state of the model that it was made from.\n  Give the engine that model."
                )
            self._check_entry(entry)

    def _check_entry(self, entry: StateEntry) -> None:
        key, tensor = entry.owner, self.tensors[entry.owner]
        if tensor.is_meta and self.weights is not None and key in self.weights:
            return
        if tensor.is_meta:
            raise ExecuteError(
                f"{entry.kind} `{key}` is on the meta device and has no values.\n"
                "  A plan needs no weights, but a step does.\n"
                "  Give compile(weights=...) their files, or load them (model.to_empty and load_state_dict) first."
            )
        if not is_on_host(tensor):
            raise ExecuteError(
                f"{entry.kind} `{key}` is on {tensor.device}.\n"
                "  Parameters stay in host memory; the device only borrows them.\n"
                '  Move the model back with model.to("cpu").'
            )


def _holders(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[tuple[dict[str, Any], str, str]]:
    """Lists the registries of the modules that hold each state tensor: `(registry, name there, key)`."""
    keys = {id(tensor): key for key, tensor in tensors.items()}
    return [
        (registry, name, keys[id(tensor)])
        for module in model.modules()
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
        if tensor is not None and id(tensor) in keys
    ]


@contextmanager
def ordinary_tensors() -> Generator[None]:
    """Runs a call made in inference mode without gradients instead: slots are written again after that mode ends."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
