"""Compiled: a model with its captures, schedules and engine; the object behind a `CompiledModule`."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from megatrain.base.checks import PATH, checked
from megatrain.device.device_budget import Attempts, DeviceBudget, free_frames
from megatrain.errors import ExecuteError
from megatrain.files import Source
from megatrain.optim.masters.narrow_model import MasterWeights, explained, masters_of
from megatrain.optim.masters.registry import Masters
from megatrain.passes.program import Program
from megatrain.planning.options import Limits
from megatrain.ranks.processes import NO_BACKWARD, Group, Ranks, note_apart
from megatrain.runtime.autograd import run_step
from megatrain.runtime.engine import Engine, ordinary_tensors
from megatrain.runtime.executor import Executor
from megatrain.runtime.random_calls import RngState, kept_generators
from megatrain.runtime.streams.events import Turn
from megatrain.runtime.streams.stream_set import Chaos, Recording
from megatrain.scheduler.schedule import Schedule
from megatrain.tracer.arguments import Arguments, are_plain, check_device, naming_inputs
from megatrain.tracer.guards import GuardFailedError
from megatrain.tracer.inventory import inventory
from megatrain.tracer.packing import packing_text
from megatrain.tracer.traced import TracedModule
from megatrain.tracer.user_dicts import in_bf16
from megatrain.training.compiled.captures import Variant, Variants
from megatrain.training.compiled.hand_over import handed_over
from megatrain.training.compiled.length_trial import OwnRun, run_own_code
from megatrain.training.compiled.lengths import Lengths
from megatrain.training.compiled.padding import Padded, refused
from megatrain.training.compiled.printed import compiled_text, dump
from megatrain.training.compiled.walking import Walks


class Compiled:
    """A model bound to its schedules: the attribute `megatrain` of the result of `compile`.

    Args:
        model: The user's model; its own call stays eager, on the host.
        options: The options of `compile`.
        chaos: Random delays, poisoned slots and injected faults, for tests.
        recording: Log of the issued operations and their waits, for tests.
        group: The processes that train the model together; None for one that trains alone.

    Attributes:
        model: The user's model.
        options: The options of `compile`.
        ranks: The group's; None for a process that trains alone.
        has_group: Whether there is a group, also one of a single process.
        budget: The bound of the device memory that schedules take.
        lengths: Pads calls; None if they stay as they are.
    """

    def __init__(
        self, model: nn.Module, options: Limits, chaos: Chaos | None, recording: Recording | None, group: Group
    ):
        self.model = model
        self.has_group = group is not None
        self.ranks = None if group is None or group.size() == 1 else Ranks(group)
        self.options = options
        self._chaos, self._recording = chaos, recording
        self._masters = masters_of(model, options.master_kind)
        files = options.weights
        self._weights = None if files is None else MasterWeights(model, files, self._masters)
        if self._weights is not None:
            # Where weights are used in place, numbers could depend on where in a file they begin. Ranks share a copy.
            self._weights.may_stay = options.transfer == "copy" and self.ranks is None
        self._engine: Engine | None = None
        self.budget = DeviceBudget(options.device, options.device_memory)
        self._variants = Variants(model, options, self.budget)
        self._latest: Variant | None = None
        self._bound_version = 0
        self._turn = Turn()
        self.walks = Walks(model, options, self.budget)
        self.lengths = None if options.lengths is None else Lengths(model, options.lengths, self._try)
        self.heirs: list[object] = []  # of steps that are gone, while only the device has values
        self._before_reads: WeakSet[Callable[[], object]] = WeakSet()

    def __str__(self) -> str:
        """Lists the options of the model and its captures."""
        latest = self._latest, self._engine, self.walks.latest
        return compiled_text(self.options, self.budget, list(self._variants), *latest)

    # -- what was compiled --------------------------------------------------------------------------------

    @property
    def variant(self) -> Variant:
        """The variant that the latest call used.

        Raises:
            ExecuteError: Before the first call, unless example arguments were given.
        """
        if self._latest is None:
            raise ExecuteError(
                "nothing is compiled yet.\n  A capture needs inputs.\n"
                "  Call the model once, or give compile(example_args=..., example_kwargs=...)."
            )
        return self._latest

    @property
    def traced(self) -> TracedModule:
        """The capture: a flat graph of torch calls."""
        return self.variant.traced

    @property
    def program(self) -> Program:
        """The blocks and their templates."""
        return self.variant.program

    @property
    def schedule(self) -> Schedule:
        """The operations of a call, tick by tick."""
        return self.variant.schedule

    @property
    def guards(self) -> str:
        """Values that the latest call relied on besides its signature: of inputs, attributes, globals; a line each."""
        guards = [f"guard {guard}" for guard in self.traced.guards]
        return "\n".join([*guards, str(self.traced.assumptions)])

    @property
    def recompiled_because(self) -> tuple[str, ...]:
        """Why earlier captures of the same signature didn't fit the latest call, when its capture was made."""
        return self.variant.reasons

    @property
    def peak_bytes(self) -> int:
        """The measured peak of device memory over all calls, in bytes: slots, values between blocks, gradients."""
        return max(self.walks.peak_bytes, 0 if self._engine is None else self._engine.meter.peak)

    @checked(folder=PATH)
    def dump(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes every stage of each capture as text: traced, after each pass, program and on; returns the files.

        Args:
            folder: The folder to write. It doesn't exist, is empty, or holds an earlier dump, which is replaced.

        Raises:
            ExecuteError: Before the first call, unless example arguments were given.
            OptionError: If `folder` isn't a path, can't be written, or holds other files.
            LowerError: If a pass doesn't give the same program each time.
        """
        with self.exclusively("dump()"):
            variants = list(self._variants) or [self.variant]
            return dump(folder, variants, self.model, self.options, self._masters)

    @property
    def masters(self) -> Masters:
        """The master weights: each trainable parameter itself if it is fp32; with a low half added if it is bf16."""
        return self._masters

    # -- whole training steps -------------------------------------------------------------------------------

    def before_reads(self, complete: Callable[[], object]) -> None:
        """Registers a function to be called before calls, and before the whole state is read or written.

        Args:
            complete: Runs updates that are still due; returns at once if there are none. Not kept alive.
        """
        self._before_reads.add(complete)

    def complete_updates(self, besides: Callable[[], object] | None = None) -> None:
        """Runs the updates that are due.

        Args:
            besides: A function given to `before_reads` that isn't called, because its owner completes its own updates.
        """
        for complete in list(self._before_reads):
            if complete is not besides:
                complete()

    @contextmanager
    def exclusively(self, what: str = "the model", *, in_child: bool = False) -> Generator[None]:
        """Keeps other threads from calling the model during the body."""
        with self._turn.hold(what, in_child=in_child), ordinary_tensors(), explained(self._masters):
            yield

    def variant_for(
        self, arguments: Arguments, failed: Mapping[Variant, str], before_capture: Callable[[], object]
    ) -> tuple[Variant, Arguments, Padded]:
        """Brings a micro-batch to its capture, which is made now if none fits.

        Args:
            arguments: Of the call, as given.
            failed: Variants that failed in the middle of a step for this call, with the failures.
            before_capture: Called if none fits.

        Returns:
            The variant, the arguments as it takes them, and the call as it was padded.

        Raises:
            ExecuteError: If an input is on another device.
            TraceError: If the call can't be captured.
        """
        padded = self.padded(arguments, runs=False)
        cast = self.cast(padded.arguments)
        check_device(cast, self.options.device)
        variant, given = self._found(cast, failed, before_capture)
        self._check_padded(variant, padded)
        return variant, given, padded

    def _found(
        self,
        arguments: Arguments,
        failed: Mapping[Variant, str] | None = None,
        before_capture: Callable[[], object] = lambda: None,
    ) -> tuple[Variant, Arguments]:
        self._latest, given = self._variants.find(arguments, failed, before_capture)
        return self._latest, given

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The model's, when a capture was last asked for."""
        return self._variants.parameters

    def learn(self, failure: GuardFailedError, arguments: Arguments, failed: Mapping[Variant, str]) -> None:
        """Makes the code around a check opaque after the check has selected too many variants."""
        self._variants.learn(failure, arguments, failed)

    @property
    def written_buffers(self) -> set[str]:
        """Known keys of buffers that forwards write; a checkpoint adds the buffers that it holds."""
        return self._variants.written

    def bind(self) -> None:
        """Looks up the model's state anew, if modules were changed since."""
        if self._bound_version != self._variants.tree_version:
            self.engine.rebind()
            self._bound_version = self._variants.tree_version

    # -- calls --------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Variant:
        """Compiles for the signature of these arguments without running."""
        with self.exclusively("prepare()"):
            padded = self.padded(Arguments.of(self.model, args, kwargs), runs=False)
            variant, _ = self._found(self.cast(padded.arguments))
            assert variant.schedule  # planned now
            return variant

    def cast(self, arguments: Arguments) -> Arguments:
        """Returns the arguments of a call with fp32 tensors as bf16, if the model was fp32 and computes in bf16."""
        return arguments.converted(torch.float32, torch.bfloat16) if self._masters.casts_inputs else arguments

    # -- any length ---------------------------------------------------------------------------------------

    def padded(self, arguments: Arguments, *, runs: bool = True) -> Padded:
        """Brings a call to a multiple of `lengths` tokens; as it is without that option.

        Args:
            arguments: Of the call.
            runs: Whether the model's own code may run, to try padding for a new kind of call.

        Raises:
            TraceError: If the model notices padding, or an argument isn't understood.
        """
        if self.lengths is None:
            return Padded(arguments, {})
        if runs and (self.has_unread_weights or not any(p.is_meta for p in nn.Module.parameters(self.model))):
            self.lengths.learn(arguments)
        return self.lengths.padded(arguments)

    def _check_padded(self, variant: Variant, padded: Padded) -> None:
        """Looks whether a capture of padded arguments leaves tensors elsewhere than in its result."""
        if self.lengths is not None:
            self.lengths.check(variant.traced, padded)

    def _try(self, arguments: Arguments, replaces: bool) -> OwnRun:
        """Runs the model's own code for the trial of `lengths`; see `run_own_code`."""
        what, latest = "the trial of lengths=", self.walks.latest
        packed = (name for name, p in nn.Module.named_parameters(self.model) if packing_text(p) is not None)
        if self.options.transfer != "bind" and (name := next(packed, None)):
            raise refused(
                f"the model has packed (quantized) weights (`{name}`)",
                "Padding is tried by the model's own code, which can't read those on the device.",
            )
        try:
            if self.has_unread_weights:
                with self._walk(what):
                    pass  # reads them
            cast = self.cast(arguments)
            args, kwargs = cast.rebuild(cast.tensors)
            with kept_generators(self.options.device):
                device = self.options.device.torch_device
                return run_own_code(self.model, args, kwargs, device, self._walk(what), replaces=replaces)
        finally:
            self.walks.latest = latest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; the result has the model's own output structure.

        Raises:
            ExecuteError: If an input is on another device, or a parameter has no values or isn't on the host.
            WeightsError: If this call has to read the weights and can't.
            TraceError: If this signature of inputs can't be captured.
        """
        if not torch.is_grad_enabled() and not are_plain(args, kwargs):
            return self.walked("the call", self.model, args, kwargs)
        padded = self.padded(Arguments.of(self.model, args, kwargs))
        own = padded.arguments
        arguments = self.cast(own)
        with self.exclusively():
            self.complete_updates()
            check_device(arguments, self.options.device)
            with naming_inputs(self.model, arguments.tensors):
                variant, tensors = self._run(arguments, padded)
            if not self.has_group:
                note_apart(self.model, tensors)
            variant.traced.leave(tensors, own.tensors)
        result, returned = variant.traced.result(padded.cut(tensors), own.tensors), variant.traced.returned_argument
        return result if returned is None else returned.put(args, kwargs, result)

    def walk(self) -> AbstractContextManager[None]:
        """Runs the body as one walk: the model's own code, without gradients, with its state streamed as it is read.

        Calls of the compiled model, and of the model and its modules, compute on the device, without a schedule.
        """
        return self._walk("walk()")

    def walked(self, what: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function of the model in a walk, with inputs cast as for calls of the model."""
        with self._walk(what):
            if self._masters.casts_inputs:
                args, kwargs = in_bf16((args, kwargs))
            return function(*args, **kwargs)

    def _walk(self, what: str) -> AbstractContextManager[None]:
        return self.walks.walk(what, lambda: self.engine, self._for_walk(what))

    @contextmanager
    def _for_walk(self, what: str) -> Generator[None]:
        with self.exclusively(what):
            self.complete_updates()
            with self._turn.run(what):
                yield

    def _run(self, arguments: Arguments, padded: Padded) -> tuple[Variant, list[torch.Tensor]]:
        """Runs the variant whose assumptions hold; some are checked in the middle of the step, before any commit."""
        device = self.options.device
        failed: dict[Variant, str] = {}
        attempts = Attempts("the call", device)
        while True:
            variant, given = self._found(arguments, failed)
            self._check_padded(variant, padded)
            variant.lowered.note_call()
            executor = self._executor(variant)
            start = RngState.now(device, variant.opaque)
            try:
                found = run_step(executor, variant.traced.written_inputs.given(given.tensors))
            except GuardFailedError as failure:
                free_frames(failure)
                start.restore(device)
                failed[variant] = str(failure)
                self._variants.learn(failure, given, failed)
            except Exception as error:  # a lack of memory gets a second attempt; all else is raised
                if not attempts.may_repeat(error, executor.memory_figures):
                    raise
                start.restore(device)
            else:
                attempts.over(executor.memory_figures)
                return variant, found

    @property
    def has_unread_weights(self) -> bool:
        """Whether the files of `compile(weights=...)` are still to be read."""
        return self._weights is not None or (self._engine is not None and self._engine.has_unread_weights)

    def load_weights(self) -> None:
        """Reads the files of `compile(weights=...)` now instead of at the first call.

        The model's parameters stay the same objects. Without `weights` they are only moved into the host store.

        Raises:
            ExecuteError: If nothing is compiled yet: the plan says where each tensor goes.
            WeightsError: If the files can't be read any more, or the model was changed since `compile`.
        """
        with self._turn.hold("load_weights()"), ordinary_tensors():
            self._executor(self.variant)

    def check_files(self) -> None:
        """Refuses frozen weights that are used in files, if somebody has changed these since.

        Raises:
            WeightsError: Naming the file.
        """
        if self._engine is not None and self._engine.store is not None:
            self._engine.store.check_files()

    def _executor(self, variant: Variant) -> Executor:
        lowered = variant.lowered
        if lowered.executor is None:
            lowered.executor = Executor(lowered.program, lowered.schedule, self.engine)
        self.bind()
        return lowered.executor

    @property
    def engine(self) -> Engine:
        """Streams, host store and slots; made at the first use, shared by all variants."""
        if self._engine is None:
            self._engine = Engine(
                self.model,
                self.options.device,
                chaos=self._chaos,
                recording=self._recording,
                weights=self._weights,
                moving=self._masters.moving,
                turn=self._turn,
                budget=self.budget,
                kernels=self.options.kernels,
            )
            self._engine.why_no_backward = "" if self.ranks is None else NO_BACKWARD
            self._weights = None
        return self._engine

    # -- state ----------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Generator[None]:
        """Within the body, the model's `load_state_dict` sets masters exactly; the next call streams the new values."""
        self.complete_updates()
        with self._masters.loading():
            yield

    def weights(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yields the model's weights for an inference engine on the same card (`engine.load_weights(...)`), by name.

        Updates that are due are made first, and the device's memory for weights is given back (see `release`). From
        the first tensor to the last, calls and training steps of this model are refused, and other threads wait.

        Yields:
            Names and tensors of all parameters and saved buffers, tied ones once, in their own dtypes (bf16 with
            `precision="bf16"`). A tensor is the model's own memory of the host, page-locked where a GPU computes:
            copy it, and don't write to it. A layer with adapters of peft comes merged, as its `merge()` does it, in
            new memory of the device, one layer at a time, under the name that it has without adapters.

        Raises:
            ExecuteError: If parameters have no values or are packed, or a layer can't be merged.
        """
        with self._turn.hold("weights()"):
            with ordinary_tensors():  # not while the caller's code runs
                self.release()
                entries, tensors = inventory(self.model)
                is_bound = self.options.transfer == "bind" and not any(tensor.is_meta for tensor in tensors.values())
                if not is_bound or self.engine.has_unread_weights:
                    entries, tensors = self.engine.adopt_state(), dict(self.engine.tensors)
            with self._turn.run("weights()"):
                device = self.options.device.torch_device
                yield from handed_over(self.model, entries, tensors, device, self.budget.nbytes)

    def release(self) -> None:
        """Gives the device's memory that holds weights between calls and steps back, for others on the card.

        The next call or step takes it again, and copies weights that stayed there once more. Kernels that were
        recorded, and optimizer state that stays on the device, keep theirs.
        """
        with self.exclusively("release()"):
            self.complete_updates()
            self.engine.release_slots()
            self.options.device.empty_cache()

    def master_state_dict(self) -> dict[str, Source]:
        """The model's `state_dict` in fp32: exact masters; all other bf16 tensors are converted.

        Each value is a `megatrain.files.Source`, made piece by piece when it is read: `megatrain.files.save` takes
        them as weights. Extra states of modules that aren't tensors are left out.

        Raises:
            ExecuteError: If parameters have no values yet.
        """
        self.complete_updates()
        return self._masters.state_sources()
