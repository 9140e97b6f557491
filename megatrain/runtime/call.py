"""Call: the tensors that one call of the model holds between its forward and its backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import nn

from megatrain.device import Device, is_on_host
from megatrain.errors import DeviceMemoryWarning, ExecuteError
from megatrain.passes.kept_results import KeptResults
from megatrain.passes.program import Block
from megatrain.runtime.accumulation import ParameterGradient
from megatrain.runtime.block import LocalGraph, Tensors
from megatrain.runtime.engine import Engine
from megatrain.runtime.exchange import Exchange
from megatrain.runtime.loaded import Loaded
from megatrain.runtime.random_calls import MicroBatchGenerators, RngState
from megatrain.runtime.stores.device_memory import Meter, Storages
from megatrain.runtime.stores.offload_buffers import BufferCopies, OffloadBuffer
from megatrain.runtime.versions import Handed, Sample, Start, check_handed, version
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.block_image import BlockImage, stored_stride
from megatrain.tracer.spec import TensorSpec

OPEN, DONE, FAILED = "open", "done", "failed"


class Call:
    """Values, gradients, retained graphs, parked activations and generator states of one call.

    Every tensor goes in and out through `hold` and `drop`, so that the meter sees what is really on the device.

    Args:
        state: Returns some bytes of the state that the backward reads, as it is in the store, by key.
        generators: Random generators of its own; None if it draws from the global ones.
        can_repeat: A backward may be attempted again, so that each block notes the generators' state.

    Attributes:
        start: Kept, small as it is, while an output may be differentiated again; then None.
        differentiated: Blocks whose gradients are added.
    """

    def __init__(
        self,
        meter: Meter,
        offload: OffloadBuffer,
        start: Start,
        loaded: Loaded,
        state: Callable[[], Mapping[str, torch.Tensor]],
        *,
        generators: MicroBatchGenerators,
        can_repeat: bool = False,
    ):
        self._meter = meter
        self.loaded = loaded
        self._state = state
        self.generators = generators
        self.can_repeat = can_repeat
        self.start: Start | None = start
        self._spent: set[int] = set()
        self.offload = offload
        self.values: dict[str, torch.Tensor] = {}
        # Parked values that come back to the device, for the backward; the shapes of those that left.
        self.returned: dict[str, torch.Tensor] = {}
        self._left: dict[str, TensorSpec] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.parameter_gradients: dict[int, list[ParameterGradient]] = {}
        self.graphs: dict[int, LocalGraph] = {}
        self.differentiated: set[int] = set()
        self.state_of: dict[int, Bytes | None] = {}
        self.rng: dict[int, RngState | None] = {}
        self._kept: dict[int, tuple[KeptResults, Sequence[str]]] = {}
        self._lacking: set[str] = set()
        self.outputs: list[torch.Tensor] = []
        self.status = OPEN
        self._registries: dict[str, dict[Any, Any]] = {
            "returned": self.returned,
            "value": self.values,
            "gradient": self.gradients,
            "parameters": self.parameter_gradients,
            "saved": self.graphs,
        }
        self._home: dict[str, torch.Tensor] | None = None
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._sample, self._handed = Sample({}), Handed({})

    def begin(self, copies: BufferCopies | None) -> None:
        """Takes inputs and constants as they are, and copies buffers that the forward writes to the device.

        Args:
            copies: Copies these buffers; None for a later micro-batch, which gets them from the one before.
        """
        assert self.start is not None
        for name, tensor in self.start.inputs.items():
            self.set_value(name, tensor)
        for name, buffer in copies.upload(self.start.buffers).items() if copies is not None else ():
            self.set_value(name, buffer)
        for name, constant in self.loaded.program.constants.items():
            self.set_value(name, constant)

    @torch.no_grad()
    def write_buffers(self, engine: Engine) -> None:
        """Writes buffers as the forward left them into the model's own, once: what others write there later stays."""
        if self._home is None:
            engine.bind_anew(self.loaded.program.rebinds)
            self._home = {key: engine.tensors[key] for key, _ in self.loaded.program.commits}
            engine.buffers.download([(self._home[key], self.values[name]) for key, name in self.loaded.program.commits])

    @contextmanager
    def showing_buffers(self, copies: BufferCopies) -> Generator[None]:
        """Has buffers in the body as this call's forward left them, though later micro-batches have written them."""
        assert self._home is not None, "a backward comes after its forward"
        places = {key: tensor.data for key, tensor in self._home.items()}  # whose versions are their own
        kept = {key: place.clone() for key, place in places.items()}
        copies.download([(places[key], self.values[name]) for key, name in self.loaded.program.commits])
        try:
            yield
        finally:
            for key, place in places.items():
                place.copy_(kept[key])

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Undoes `write_buffers`, and what others have written there since."""
        if self._home is not None and self.start is not None:
            for name, key in self.loaded.program.buffers:
                self._home[key].copy_(self.start.buffers[name])

    @property
    def written(self) -> list[str]:
        """Keys of the buffers that the forward writes."""
        return [key for key, _ in self.loaded.program.commits]

    def hold(self, kind: str, name: str | int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Counts tensors as held until `drop` of the same kind and name."""
        present = [t for t in tensors if t is not None]
        self._meter.hold((id(self), kind, name), present, is_private=kind == "saved")

    def set_value(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps a value, wherever it is."""
        self.values[name] = tensor
        self.hold("value", name, [tensor])

    def pass_on(self, names: Iterable[str], later: Call) -> None:
        """Gives new values of buffers to the next micro-batch, whose forward begins with them."""
        written, entering = self.loaded.written, later.loaded.entering
        for name in names:
            for buffer in written.get(name, ()) if name in self.values else ():
                later.set_value(entering[buffer], self.values[name])

    def keep_results(self, block: int, kept: KeptResults | None, names: Sequence[str]) -> None:
        """Keeps the results of a block's forward as values of these names; None if there are none, after all."""
        if kept is None:
            self._lacking.update(names)
            return
        for name, tensor in zip(names, kept.tensors, strict=True):
            self.set_value(name, tensor)
        self._kept[block] = kept.without_tensors(), names

    def results(self, block: int) -> KeptResults | None:
        """The results of a block's forward; None if it kept none."""
        if block not in self._kept:
            return None
        kept, names = self._kept[block]
        return kept.with_tensors(self.backward_inputs(names))

    def lacks(self, name: str) -> bool:
        """Whether a value is a result that its block couldn't keep."""
        return name in self._lacking

    def take(self, name: str, device: Device) -> None:
        """Takes memory for a parked value that will come back, from the allocator of the calling thread's stream."""
        if name in self.returned or self.lacks(name):
            return  # taken by a run that failed, which is now completed
        spec = self._left[name] if name in self._left else TensorSpec.of(self.values[name])
        tensor = torch.empty_strided(spec.shape, stored_stride(spec), dtype=spec.dtype, device=device.torch_device)
        self.returned[name] = tensor
        self.hold("returned", name, [tensor])

    def backward_inputs(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The values that a backward reads: what came back, or never left."""
        return [self.returned[name] if name in self.returned else self.values[name] for name in names]

    def set_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Keeps the gradient of a value; replaces the partial sum it continues."""
        self.gradients[name] = gradient
        self.hold("gradient", name, [gradient])

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Adds to the gradient of an output."""
        known = self.gradients.get(name)
        self.set_gradient(name, gradient if known is None else known + gradient)

    def set_sums(self, block: int, sums: list[ParameterGradient], storages: Storages | None = None) -> None:
        """Keeps the sums so far of a block's gradients of parameters; with their storages, if they are known."""
        self.parameter_gradients[block] = sums
        if storages is None:
            self.hold("parameters", block, [gradient for gradient, _ in sums])
        else:
            self._meter.hold_storages((id(self), "parameters", block), storages)

    def drop(self, kind: str, name: str | int) -> None:
        """Drops the tensors of a `hold`; an `original` is the value of that name, which was parked."""
        if kind == "original":
            kind = "value"
            if isinstance(name, str) and name in self.values:
                self._left[name] = TensorSpec.of(self.values[name])
        self._registries[kind].pop(name, None)
        self._meter.release((id(self), kind, name))

    def take_outputs(self) -> list[torch.Tensor]:
        """Returns the model's output tensors, in order, once."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def remember_versions(self, names: Collection[str]) -> None:
        """Notes how often the values `names`, and what graphs saved, were written; the caller gets hold of some."""
        kept = [(n, t) for n, t in self.values.items() if n in names]
        kept += [("saved", t) for graph in self.graphs.values() for t in graph.saved_tensors()]
        self._versions = [(name, tensor, version(tensor)) for name, tensor in kept]

    def remember_bytes(self) -> None:
        """Notes some bytes of inputs, outputs and state, for writes that torch doesn't count."""
        assert self.start is not None
        outputs = zip(self.loaded.program.outputs, self.outputs, strict=True)
        self._sample = Sample(self._state())
        self._handed = Handed({**self.start.inputs, **{ref.name: each for ref, each in outputs if ref.kind == "value"}})

    def check_bytes(self) -> Callable[[], None]:
        """Checks them before a backward, as far as that doesn't wait for the device.

        Returns:
            Checks the rest; to be called after the backward.
        """
        assert self.start is not None
        self.start.check_sample(self._sample, self._state())
        written = self._handed.look()
        if is_on_host(self.loaded.program.device):
            check_handed(written())
        return lambda: check_handed(written())

    def check_open(self, outputs: Collection[int]) -> Start:
        """Returns the call's starting state, if these outputs may be differentiated (again)."""
        if self.status == FAILED:
            raise ExecuteError(_FAILED)
        if self.start is None or self._spent.intersection(outputs):
            raise ExecuteError(_SPENT)
        return self.start

    def spend(self, outputs: Collection[int], all_outputs: Collection[int]) -> None:
        """Notes that these outputs can't be differentiated again; with the last of them, the start is let go of."""
        self._spent.update(outputs)
        if self._spent.issuperset(all_outputs):
            self.start = None

    def check_versions(self) -> None:
        """Checks that nobody wrote into a value between forward and backward."""
        for name, tensor, before in self._versions:
            if version(tensor) != before:
                raise ExecuteError(
                    f"value `{name}` was modified in place between forward and backward.\n"
                    "  The backward needs the value that the forward left.\n"
                    "  Clone inputs and outputs before writing into them."
                )
        self._versions = []

    def forget(self) -> None:
        """Ends a call that will have no backward."""
        if self.status == OPEN:
            self.close(DONE)

    def __del__(self) -> None:
        self.forget()  # the caller dropped the outputs without a backward

    def close(self, status: str) -> None:
        """Ends the call and releases everything that it held."""
        self.status = status
        if status == FAILED:
            self.start = None
        for kind, registry in self._registries.items():
            for name in list(registry):
                self.drop(kind, name)
        self.rng.clear()
        self._kept.clear()
        self._versions = []
        self.offload.give()


def forward_without_graph(
    call: Call, block: Block, inputs: Tensors, state: Tensors, *, keeps: bool
) -> Sequence[torch.Tensor]:
    """Runs a forward whose backward will repeat it, and keeps the results that the schedule wants.

    If other kernels run than those that were planned, nothing is kept: the backward computes all of it again.
    """
    runner, needs_grad = call.loaded.runners[block.index], call.loaded.facts.needs_grad[block.index]
    names = call.loaded.results.get(block.index, ()) if keeps else ()
    notes = runner.noting() if names else None
    if notes is None:
        outputs = runner.forward(inputs, state, needs_grad)
    else:
        outputs = runner.forward(inputs, state, needs_grad, notes=notes)
    kept = None if notes is None else runner.kept(notes)
    if names and kept is None:
        warnings.warn(_OTHER_KERNELS.format(block.index, block.name), DeviceMemoryWarning, stacklevel=2)
    call.keep_results(block.index, kept, names)
    return outputs


_OTHER_KERNELS = (
    "block {} ({}) ran other kernels of attention than it was planned with, and keeps no results: its backward "
    "computes attention again, and may take more memory than the plan says.\n"
    "  Which kernels run depends on torch.backends and torch.nn.attention.sdpa_kernel.\n"
    "  Have the same kernels allowed when a step is planned and when it runs."
)


class Versions:
    """How often some of the model's state was written before the user's code runs in a step."""

    def __init__(self, engine: Engine, keys: Iterable[str]):
        self._engine = engine
        self._known = _stamps(engine.tensors, [key for key in keys if key in engine.tensors])

    @contextmanager
    def allowing(self, key: str) -> Generator[None]:
        """Lets the body write one of them, because nothing of the step reads it any more."""
        tensor = self._engine.tensors[key]
        is_known = {key: self._known.get(key)} == _stamps(self._engine.tensors, [key])
        yield
        if is_known:
            self._known |= _stamps({key: tensor}, [key])

    def check(self, writer: str) -> None:
        """Checks that nobody has written or replaced any since."""
        if self._known:
            self._engine.find_replaced()
        now = _stamps(self._engine.tensors, self._known)
        for key, known in self._known.items() if now != self._known else ():
            if now[key] != known:
                kind = "parameter" if isinstance(self._engine.tensors[key], nn.Parameter) else "buffer"
                raise ExecuteError(
                    f"{writer} writes {kind} `{key}`, which the rest of the step reads.\n"
                    "  All micro-batches run through a block before the next block does, and some blocks are computed\n"
                    "  again in the backward, so some would read the old values and some the new ones.\n"
                    "  Write it in the model's forward, or when the call of the step has returned."
                )


def _stamps(tensors: Mapping[str, torch.Tensor], keys: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Of each tensor: which object it is, how often it was written, and its address."""
    names = [*keys]
    found = [tensors[key] for key in names]
    return dict(zip(names, zip(map(id, found), map(version, found), map(_address, found), strict=True), strict=True))


_address = methodcaller("data_ptr")


class StepTrainer(Protocol):
    """The trainer of a step: computes losses from outputs, takes gradients, and updates."""

    has_loss: bool
    """Whether the user's code makes losses."""
    exchange: Exchange
    """Who else has gradients of the step's blocks."""

    def before_compute(self, micro_batch: int) -> None:
        """Called before each F and B, on the caller's thread; an error in it stops the step."""

    def before_backward(self) -> None:
        """Called before the first B of all, on the caller's thread, before what the B waits for."""

    def differentiate(self, micro_batch: int, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of a micro-batch's outputs, in their order; on the caller's thread."""
        ...

    def begin_backward(self, state: Versions) -> None:
        """All losses are made. `state` is what the rest of the step reads of the model: hooks may not write it."""

    def receive(self, key: str, gradient: torch.Tensor) -> None:
        """Takes a parameter's whole gradient, on the host; on a transfer's thread."""

    def hear_norm(self, key: str, norm: torch.Tensor) -> None:
        """Takes the norm of the gradient that `receive` gets next of this parameter, where the device has taken it."""

    def squares(self, keys: Sequence[str]) -> None:
        """Sums the squares of some whole gradients; on the host stream's thread, like `norm` and `update`."""

    def norm(self) -> None:
        """Takes the norm of all gradients, from their squares."""

    def update(self, block: int) -> None:
        """Updates the parameters that belong to a block."""

    def norm_there(self, key: str, gradient: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Takes the norm of a parameter's whole gradient that stays there, None if sparse; on a transfer's thread."""

    def bring(self, layout: BlockImage, where: Bytes, *, stays: bool) -> None:
        """Has weights of a block that the device updates in the arena, with the optimizer's state behind them.

        What is frozen of them `stays` if it is there.
        """

    def update_there(self, block: int, layout: BlockImage, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates a block on the device, as work of the thread's stream; with gradients in the order of the layout."""

    def read_moments(self, block: int) -> None:
        """Has the optimizer's state of a block read from its file; on a thread of its own, like `write_moments`."""

    def write_moments(self, block: int) -> None:
        """Has it written, once it is updated."""

    def wait(self, block: int, go_on: Callable[[], object]) -> None:
        """Waits until all processes have updated their parts of a block; on a thread of its own."""


def turn(calls: Sequence[Call], micro_batch: int, trainer: StepTrainer, engine: Engine) -> None:
    """Hands the trainer a micro-batch's outputs, and takes their gradients, before its first B.

    Raises:
        ExecuteError: If the loss writes what the rest of the step reads.
    """
    call = calls[micro_batch]
    call.write_buffers(engine)
    # The trainer may use outputs freely, but not write into them.
    facts = call.loaded.facts
    call.remember_versions({*facts.watched, *facts.returned_buffers})
    outputs = call.loaded.program.outputs
    call.generators.check()
    is_only, is_last = len(calls) == 1, call is calls[-1]
    read = Versions(engine, _read_later(call, is_last=is_last) if trainer.has_loss else ())
    with call.generators.drawing(None):
        gradients = trainer.differentiate(micro_batch, [_output(call, engine, ref.kind, ref.name) for ref in outputs])
    call.check_versions()
    if trainer.has_loss:
        read.check("the loss")
    if is_last:
        trainer.begin_backward(Versions(engine, _read_later(call, is_last=is_only)))
    for ref, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            call.add_gradient(ref.name, gradient)


def showing(calls: Sequence[Call], micro_batch: int, block: int, engine: Engine) -> AbstractContextManager[None]:
    """Has buffers in the body, a block's B, as the micro-batch's forward left them, if hooks may look at them.

    Raises:
        ExecuteError: If the body writes one: the forwards of later micro-batches are over.
    """
    call = calls[micro_batch]
    return nullcontext() if call is calls[-1] or block not in call.loaded.looking else _showing(call, engine)


@contextmanager
def _showing(call: Call, engine: Engine) -> Generator[None]:
    with call.showing_buffers(engine.buffers):
        shown = Versions(engine, call.written)
        yield
        shown.check("a hook in the backward")


def _read_later(call: Call, *, is_last: bool) -> Iterable[str]:
    """Keys of the model's state that a step still reads; with other micro-batches all that their forwards read too."""
    if is_last:
        return call.loaded.facts.read_backward
    return dict.fromkeys([*(entry.owner for entry in call.loaded.program.state.values()), *call.written])


def _output(call: Call, engine: Engine, kind: str, name: str) -> torch.Tensor:
    key = call.loaded.facts.returned_buffers.get(name) if engine.device.is_host else None
    if kind == "value" and key is None:
        return call.values[name].detach()
    return engine.tensors[key or name].to(engine.device.torch_device).detach()


_SPENT = (
    "backward ran a second time on the same output of a call.\n"
    "  As in eager, the graph is gone after the first backward, unless it had retain_graph=True.\n"
    "  Pass retain_graph=True to the first backward, add the losses and call backward once, or call the model again."
)
_FAILED = "backward ran on a call that failed.\n  The values that the backward needs are gone.\n  Call the model again."
