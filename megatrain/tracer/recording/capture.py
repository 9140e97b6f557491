"""Capture: one run of a model's own forward under the recorder."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import FakeTensorMode, pytree
from megatrain.device import find
from megatrain.errors import TraceError
from megatrain.tracer.arguments import Arguments, Structure
from megatrain.tracer.calls import call_text
from megatrain.tracer.inventory import StateEntry, StateValues, fake_state, inventory
from megatrain.tracer.packing import PackedState
from megatrain.tracer.python.assumptions import Assuming, Assumptions
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.python_values import HOLDERS, held_in, put_into
from megatrain.tracer.python.side_outputs import SideOutputs
from megatrain.tracer.python.snapshot import Change, Snapshot
from megatrain.tracer.recording.module_calls import repeated_modules
from megatrain.tracer.recording.obstacles import (
    FOLLOW_HOST,
    RUN_AGAIN,
    Attempt,
    Obstacle,
)
from megatrain.tracer.recording.python_effects import Hooks, PythonEffects, running_hooks
from megatrain.tracer.recording.random_numbers import HOST_GENERATORS, kept_rng
from megatrain.tracer.recording.recorder import Recorder
from megatrain.tracer.recording.sandbox import swapped_state, watching
from megatrain.tracer.recording.tape import place_of
from megatrain.tracer.source_line import user_line
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import ReturnedArgument, TracedModule, WrittenInputs
from megatrain.tracer.user_dicts import attributes, contents


@dataclass(frozen=True, slots=True)
class Containers:
    """The arguments of a call, each with what was in it.

    A call of the capture gives the model's code new containers, so that a change of the caller's would be lost. A
    dictionary (a dict or a UserDict) that is changed and returned is known by the result, and each call changes the
    caller's in the same way.
    """

    held: Sequence[tuple[int | str, Any, Sequence[Any], pytree.TreeSpec]]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Containers:
        """Looks into the arguments."""
        placed: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return Containers([(place, value, *pytree.tree_flatten(contents(value))) for place, value in placed])

    def check(self, result: Any) -> ReturnedArgument | None:
        """Checks that all of them hold what they held, except for a dictionary that is the model's result."""
        returned: ReturnedArgument | None = None
        for name, value, leaves, layout in self.held:
            now, layout_now = pytree.tree_flatten(contents(value))
            if layout_now != layout or not all(map(_is_same, now, leaves)):
                before = pytree.tree_unflatten(leaves, layout)
                entries = _entries(value, before) if value is result else None
                if entries is not None:
                    returned = ReturnedArgument.of(name, *entries)
                    continue
                raise TraceError(
                    f"the model changes its argument `{name}`, a {type(value).__qualname__}.\n"
                    "  In eager, the caller's object would change; a capture knows only the tensors in it.\n"
                    "  Return what is new instead; or, without gradients, call the model in a walk: "
                    "with torch.no_grad(), compiled.megatrain.walk()."
                )
        return returned


def _entries(value: Any, before: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]] | None:
    """The entries of a dictionary before the forward and after it; None if something else of it differs, or is it."""
    if type(value) is dict:  # pyright: ignore[reportUnknownArgumentType]
        return before, value  # pyright: ignore[reportUnknownVariableType]
    others = attributes(value)
    if not isinstance(value, UserDict) or {*others, "data"} != {*before}:
        return None
    is_same = all(_is_same(now, before[name]) for name, now in others.items())
    return (before["data"], value.data) if is_same else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and one == other)


def bind_inputs(
    recorder: Recorder, arguments: Arguments, fake_mode: FakeTensorMode, device: torch.device, attempt: Attempt
) -> tuple[list[torch.Tensor], WrittenInputs]:
    """Makes a placeholder for each input; returns what the forward gets, and which of it are copies for writing."""
    given: list[torch.Tensor] = []
    names: list[str] = []
    indices: list[int] = []
    for index, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True)):
        node = recorder.tape.graph.create_node("placeholder", name, name=name)
        given.append(_copied(tensor, fake_mode, device, uses_values=attempt.uses_values))
        recorder.tape.bind_input(given[-1], node)
        if node.name in attempt.written_inputs:
            names.append(name)
            indices.append(index)
    for index in indices:
        given[index] = recorder.record(torch.Tensor.clone, (given[index],), {})
    return given, WrittenInputs(tuple(names), tuple(indices))


def _copied(
    tensor: torch.Tensor, fake_mode: FakeTensorMode, device: torch.device, *, uses_values: bool
) -> torch.Tensor:
    if not tensor.is_meta and (uses_values or not tensor.requires_grad):
        return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)
    place = device if tensor.is_meta else tensor.device
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    return fake.requires_grad_(tensor.requires_grad)


def check_let_go(made: Iterable[tuple[torch.Tensor, fx.Node]]) -> None:
    """Looks for tensors that Python code holds although the capture is over and has let go of them.

    Raises:
        TraceError: If there are any: the user would find tensors without values, at every later call too.
    """
    followed = [(weakref.ref(tensor), node) for tensor, node in made]
    held = _held(ref for ref, _ in followed)
    if held:
        gc.collect()  # what only refers to itself is nobody's
        held = _held(ref for ref, _ in followed)
    if not held:
        return
    node = next(node for ref, node in followed if id(ref()) in held)
    raise TraceError(
        f"the forward leaves a tensor, made {place_of(node)}, where a capture can't follow it.\n"
        "  A capture follows attributes of modules, and variables and objects that the model's code or its "
        "hooks name.\n"
        "  Keep the tensor in one of these places, or return it from the model."
    )


def _held(made: Iterable[weakref.ref[torch.Tensor]]) -> set[int]:
    """Identities of what is held by those who hold one of the tensors."""
    alive = [tensor for tensor in (ref() for ref in made) if tensor is not None]
    # One look over all objects; autograd, which also keeps tensors, isn't among them.
    holders = gc.get_referrers(*alive) if alive else []
    others = [holder for holder in holders if holder is not alive and not isinstance(holder, FrameType)]
    return {id(item) for holder in others for item in gc.get_referents(holder)}


class Capture:
    """One run of a model's forward under the recorder."""

    def __init__(
        self, model: nn.Module, arguments: Arguments, device: torch.device, attempt: Attempt, interrupts: Interrupts
    ):
        self._interrupts = interrupts
        self._model = model
        self._arguments = arguments
        self._device = device
        self._attempt = attempt
        self._stray: Obstacle | None = None
        self._written = WrittenInputs()
        self._followed: dict[tuple[int, str], Any] = {}  # attributes whose numbers are followed, once they are bound
        self._returned: ReturnedArgument | None = None
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entries, self._tensors = inventory(model)
        self._fakes = fake_state(self._tensors, self._fake_mode, device)
        self._by_id = {id(t): self._fakes[key] for key, t in self._tensors.items()}
        self._packed = PackedState(model, self._by_id, self._fake_mode, device)
        self._by_id.update(self._packed.stand_ins)
        self._recorders: list[Recorder] = []
        self._recorder = self._new_recorder()
        self._outer = Outer.of(model)
        self._effects = PythonEffects(model, attempt, self._outer)

    def _new_recorder(self, earlier: Recorder | None = None) -> Recorder:
        values = StateValues(self._fakes, self._tensors, self._entries)
        recorder = Recorder(
            self._fake_mode, values, self._by_id, self._device, self._attempt, earlier, packed=self._packed
        )
        self._recorders.append(recorder)
        return recorder

    @property
    def has_recalled(self) -> bool:
        """Whether the results of a call were made from those of an equal one."""
        return any(recorder.recall.is_used for recorder in self._recorders)

    def check_over(self) -> None:
        """Checks, after the run, that nobody has got hold of tensors that stand for others."""
        self._fakes.clear()
        self._by_id.clear()
        self._packed.forget()
        check_let_go(pair for recorder in self._recorders for pair in recorder.over())

    def run(self) -> TracedModule:
        """Runs the model once, and again where it changes attributes."""
        assuming = Assuming(
            self._model, self._attempt.runs_again, running_hooks(self._model, self._attempt), self._outer.variables
        )
        with (
            kept_rng(find(self._device), others_draw=True) as moved,
            swapped_state(self._model, self._by_id, self._outer) as start,
        ):
            with assuming.reading(self._followed):
                result, given = self._run_forward(self._recorder)
            self._packed.check_unchanged()
            changes = start.changes()
            self._effects.refuse_unregistered(changes)
            rebound = self._rebound_buffers()
            left = self._left(changes)
            self._refuse_kept_state(start, changes)
        if self._attempt.follows_host and not self._recorder.host_drawer and moved == [HOST_GENERATORS]:
            moved.clear()  # no module drew: another thread did
        if moved:
            raise Obstacle(
                f"draws from or seeds `{moved[0]}` in its forward",
                "A capture would repeat the same number in every call.",
                "Draw with torch instead, unseeded.",
                remedy=RUN_AGAIN if self._attempt.follows_host else FOLLOW_HOST,
                calls=self._recorder.host_drawer,
            )
        outputs = Structure.of(result)
        written = [given[index] for index in self._written.indices]
        self._check_written(written)
        everything = (*outputs.placeholders, *left.structure.placeholders, *written)
        self._recorder.tape.graph.output(tuple(self._recorder.tape.used(t) for t in everything))
        assumptions = assuming.assumptions(self._recorder.tape.constants.values())
        return self._finish(outputs, left, assumptions, rebound)

    def _check_written(self, tensors: list[torch.Tensor]) -> None:
        for name, tensor in zip(self._written.names, tensors, strict=True):
            if tensor.requires_grad:
                raise TraceError(
                    f"the model writes a value that requires a gradient into its input `{name}`.\n"
                    "  In eager, the caller's tensor would get a history; a schedule ends with its call.\n"
                    "  Clone the input first, or return the result instead."
                )

    def _left(self, changes: Sequence[Change]) -> SideOutputs:
        own = self._effects.own(changes, self._recorder)
        return SideOutputs.of(own, {id(self._fakes[key]): t for key, t in self._tensors.items()})

    def _run_forward(self, recorder: Recorder) -> tuple[Any, list[torch.Tensor]]:
        """Runs the model; returns its result, and what its inputs were bound to."""
        given, self._written = bind_inputs(recorder, self._arguments, self._fake_mode, self._device, self._attempt)
        following, held = recorder.following, self._arguments.attributes
        for attribute, tensor in zip(held, given[len(given) - len(held) :], strict=True):
            self._followed[id(attribute.module), attribute.name] = following.number(tensor)
        args, kwargs = self._arguments.rebuild(given, following.number)
        containers = Containers.of(args, kwargs)
        for key, fake in self._fakes.items():
            recorder.tape.bind_state(fake, key)
        hooks = Hooks(self._model, recorder, self._attempt, self._outer)
        with watching(recorder, self._model, hooks, self._attempt, self._refuse_stray):
            recorder.recall.begin()
            try:
                with self._interrupts.released():
                    result = self._model(*args, **kwargs)
            except Exception:  # raised again, or the cause of it
                # An interpreter that ran the operation (TorchScript) wraps the refusal in its own error.
                if self._stray is not None:
                    raise self._stray from None
                recorder.check_needs()
                raise
        if following.error is not None:
            raise following.error  # the model's code has caught it
        if self._stray is not None:
            raise self._stray
        recorder.check_needs()  # the model's code may have caught the error
        self._returned = containers.check(result)
        hooks.check()
        self._effects.changed_by.update(hooks.changed_by)
        return result, given

    def _refuse_stray(self, func: Any) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            return  # a tensor is made of a NumPy array or a list: a constant, as its values are
        self._stray = Obstacle(
            f"runs the operation `{func}` outside any torch function",
            "A capture records torch functions; results of TorchScript or C++ extensions would become constants.",
            "Call the operation through torch.ops or a torch.library.custom_op.",
            remedy=RUN_AGAIN,
            place=user_line(),
            calls=self._recorder.tape.calls(),
        )
        raise self._stray

    def _refuse_kept_state(self, start: Snapshot, changes: Sequence[Change]) -> None:
        """Runs a forward that changed attributes again, to see whether the next call would do something else.

        What an opaque module changes in itself doesn't count: its code runs at each step.
        """
        fakes = {id(fake) for fake in self._fakes.values()}
        for change in changes:
            if isinstance(change.before, torch.Tensor) and id(change.before) in fakes:
                has_names = isinstance(change.holder, (dict, *HOLDERS))
                others = {} if has_names else held_in(change.holder)
                put_into(change.holder, {**others, change.label: change.before})
        changes = self._effects.own(start.changes(), self._recorder) if changes else ()
        if not changes:
            return
        between = self._effects.now()
        again = self._new_recorder(self._recorder)
        self._run_forward(again)
        differs = _calls(again) != _calls(self._recorder)
        counted = [c for c in self._effects.own(between.changes(), again) if c.is_plain]
        flags = [c for c in changes if c.is_plain and differs]
        self._effects.refuse_any((*counted, *flags))

    def _rebound_buffers(self) -> dict[str, torch.Tensor]:
        """Finds buffers that the forward re-assigned (`self.ema = ...`) rather than wrote in place."""
        owners = {alias: e.key for e in self._entries.values() for alias in (e.key, *e.ties)}
        held: dict[str, list[torch.Tensor | None]] = {}
        for prefix, module in self._model.named_modules():
            for name, tensor in module._buffers.items():
                key = owners.get(f"{prefix}.{name}" if prefix else name)
                if key is not None:
                    held.setdefault(key, []).append(tensor)
        found: dict[str, torch.Tensor] = {}
        for key, (tensor, *others) in held.items():
            if tensor is None or any(other is not tensor for other in others):
                raise TraceError(
                    f"the forward unties or removes the buffer `{key}`.\n"
                    "  A capture can't change which buffers are registered.\n"
                    "  Write into the buffer in place."
                )
            fake = self._fakes[key]
            if tensor is not fake and not self._recorder.is_value_of(tensor, fake):
                # A copy of its own, in case the new value is an input or another buffer.
                with torch.no_grad():
                    found[key] = self._recorder.record(torch.Tensor.clone, (tensor,), {})
        return found

    def _finish(
        self, outputs: Structure, left: SideOutputs, assumptions: Assumptions, rebound: dict[str, torch.Tensor]
    ) -> TracedModule:
        recorder = self._recorder
        entries = dict(self._entries)
        for key, tensor in recorder.tape.constants.items():
            spec = TensorSpec.of(tensor, self._device)
            entries[key] = StateEntry(key, "constant", spec, False, persistent=False)
        read = {n.target: n for n in recorder.tape.graph.nodes if n.op == "get_attr"}
        return TracedModule(
            name=type(self._model).__name__,
            graph=recorder.tape.graph,
            input_names=self._arguments.names,
            outputs=outputs.emptied(),
            side_outputs=replace(left, structure=left.structure.emptied()),
            written_inputs=self._written,
            returned_argument=self._returned,
            state={k: e for k, e in entries.items() if k in read},
            constants=dict(recorder.tape.constants),
            writes_back=self._written_state(read, rebound),
            guards=tuple(recorder.tape.guards),
            assumptions=assumptions,
            block_modules=repeated_modules(self._model),
            device=self._device,
            gradient_order=recorder.gradient_order.groups(recorder.tape.graph),
            num_numbers=self._arguments.num_held,
            rebinds=frozenset(rebound),
        )

    def _written_state(
        self, read: dict[Any, fx.Node], rebound: dict[str, torch.Tensor]
    ) -> tuple[tuple[str, fx.Node], ...]:
        """Lists state that the forward wrote or re-assigned, with the node that stands for it afterwards."""
        written = {w for node in self._recorder.tape.graph.nodes for w in node.meta.get("writes", ())}
        in_place = {str(key): node for key, node in read.items() if node in written}
        return tuple((in_place | {k: self._recorder.tape.node_of(t) for k, t in rebound.items()}).items())


def _calls(recorder: Recorder) -> list[str]:
    return [call_text(n) for n in recorder.tape.graph.nodes if n.op in ("call_function", "call_method")]
