"""Records every torch call of a running forward as a node of one fx graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megatrain.torch_private import DisableTorchFunction
from megatrain.tracer.attempt import Attempt, MakeFakeError, WrittenInputError
from megatrain.tracer.guards import PLAIN, is_metadata_read
from megatrain.tracer.observer import Observer
from megatrain.tracer.opaque_call import OpaqueCall
from megatrain.tracer.refusals import (
    RUN_AGAIN,
    HookSite,
    Obstacle,
    call_on_fakes,
    check_call,
    check_transforms,
    refuse,
    refuse_read,
)
from megatrain.tracer.rng import GeneratorWatch
from megatrain.tracer.source import user_line
from megatrain.tracer.state import StateValues
from megatrain.tracer.tape import Tape, place_of
from megatrain.tracer.targets import as_call, call_name, is_property_get, is_property_set
from megatrain.tracer.watch import EffectWatch, storage_key

_RECORDED_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}


# Calls that hand the contents of a tensor to Python and that fake tensors answer with errors of their own.
_VALUE_READS = {"numpy", "__array__", "__dlpack__", "__format__", "__repr__"}


class Recorder(TorchFunctionMode):
    """Runs each torch call with itself switched off and appends what it saw to the graph of `tape`.

    Calls that hang on inputs and constants alone run for real. State is fake, and so is what hangs on it or on random
    numbers; or, where the attempt uses values, a call runs on the values behind the fake state. Modules hold fake
    state in either case, so that questions about it (device, shape) have one answer.

    Args:
        fake_mode: Mode of the fake tensors.
        state: Where the values behind fake state come from.
        originals: Fake state by the id of the real tensor it replaces.
        attempt: What this run may do.
        earlier: The recorder of a first run of which this is the repetition.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        state: StateValues,
        originals: dict[int, torch.Tensor],
        attempt: Attempt,
        earlier: Recorder | None = None,
    ):
        super().__init__()
        self._generator = GeneratorWatch()
        self.effects = EffectWatch(self._check_read, self._check_write, self._generator.draw)
        self.tape = Tape(
            self.effects, uses_values=attempt.uses_values, earlier=None if earlier is None else earlier.tape
        )
        self.is_recording = False
        self._fake_mode = fake_mode
        self._state = state
        self._originals = originals
        self._attempt = attempt
        # What opaque modules and observing hooks changed in Python: their code does it again at each step.
        self.changed_by_users: set[tuple[Any, Any]] = set()
        self._operands: set[int] = set()
        self._reads_graph = False
        self._runs_on_fakes = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Switches the mode off around a call that is recorded by hand."""
        with DisableTorchFunction():
            yield

    # -- recording ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = call_name(func)
        # `prim` holds questions (the device of a fake tensor) that C++ asks where it can't bear an error.
        if self.is_recording or getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        if is_property_get(func) and name not in _RECORDED_PROPERTIES:
            with self._located():
                check_call(func, args, kwargs)
            return func(*args, **kwargs)
        return self.record(func, args, kwargs)

    @contextmanager
    def _located(self) -> Generator[None]:
        """Notes on an obstacle which modules the model was in when it met it."""
        try:
            yield
        except Obstacle as obstacle:
            obstacle.calls = obstacle.calls or self.tape.calls()
            raise

    def over(self) -> list[tuple[torch.Tensor, str]]:
        """Lets go of all tensors; lists the fake ones, with the place that made each."""
        made = [(tensor, place_of(node)) for tensor, node in self.tape.table.made()]
        self.tape.table.forget()
        self._state.forget()
        return made

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor is the fake that stands for a parameter or buffer."""
        return self._state.has(tensor)

    def let_go(self) -> None:
        """Frees the weights that a capture on values has brought to the device: a block's run is over."""
        self._state.let_go()

    def refuse(self, what: str, rule: str, way_out: str) -> NoReturn:
        """Raises the obstacle for something that the running module does, which may run its own code instead."""
        with self._located():
            refuse(what, rule, way_out, remedy=RUN_AGAIN)

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call and appends its node; used directly for calls that no mode can see."""
        with self._located():
            return self._record(func, args, kwargs)

    def record_forward(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        run: Callable[..., Any],
        has_history: Callable[[torch.Tensor], bool],
    ) -> Any:
        """Records the call of an `autograd.Function` from inside, where torch has asked for its forward.

        Args:
            func: What the node calls.
            args: Its arguments.
            run: The forward.
            has_history: Tells of a result whether torch will give it a history when the forward is over.
        """
        with self._located():
            result = self._record(func, args, {}, run)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and has_history(tensor):
                self.tape.node_of(tensor).meta.update(requires_grad=True, has_history=True)
        return result

    def _record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None = None,
    ) -> Any:
        self.tape.site = (user_line(), call_name(func))
        check_call(func, args, kwargs)
        if is_property_set(func):
            return None  # nothing that would change anything passes the check
        is_question = is_metadata_read(self.tape.site[1])
        if not is_question:
            args, kwargs = self._as_recorded(args, kwargs)
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        nodes = [] if is_question else [self.tape.used(x) for x in operands]
        result = self._run(run or func, args, kwargs, operands)
        has_tensors = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
        if has_tensors or self.effects.written:
            if self.effects.is_random and not self._attempt.uses_values:
                result = pytree.tree_map_only(torch.Tensor, self._as_fake, result)
            self.tape.append(func, args, kwargs, nodes, result)
        elif not is_question:
            self._read(func, args, kwargs, nodes, result)
        return result

    def record_module(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Records the call of an opaque module as one node; returns the module's result."""
        self.tape.site = (user_line(), name)
        with self._located(), self.unrecorded():
            check_transforms()
            args, kwargs = self._as_recorded(args, kwargs)
            calls = (*self.tape.calls(), name)
            call = OpaqueCall(name, self._attempt.opaque[name], module, args, kwargs, calls)
            operands = [self._value(x) for x in call.operands]
            nodes = [self.tape.used(x) for x in operands]
            fakes = {id(x) for x in call.operands}
            more = {key: self._value(fake) for key, fake in self._originals.items() if id(fake) in fakes}

            def run(*tensors: torch.Tensor) -> Any:
                return call.run(tensors, more, self.tape.escapes)

            with self._generator.free():
                result, results, rebound = self._run(run, tuple(operands), {}, operands)
            self.changed_by_users |= call.changed
            self.tape.append_opaque(call.opaque, nodes, results)
            for (holder, kind, label), tensor in rebound:
                vars(holder)[kind][label] = tensor
        return result

    def record_hook(self, site: HookSite, hooks: frozenset[HookSite], module: nn.Module, hook: Any, args: Any) -> None:
        """Records a hook that only looks as one node, and runs it once, so that what it leaves is seen.

        Args:
            site: The hook.
            hooks: All that are the same function.
            module: Its module.
            hook: The hook itself.
            args: What it is given behind the module, positional and keyword arguments.
        """
        self.tape.site = (user_line(), site[0])
        with self._located(), self.unrecorded():
            check_transforms()
            args = self._as_recorded(*args)
            observer = Observer(site[0], module, hook, args)
            operands = [self._value(x) for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            nodes = [self.tape.node_of(x) for x in operands]

            def look(*tensors: torch.Tensor) -> None:
                observer.first_run(tensors, lambda tensor: self.tape.escapes.note(tensor, self.tape.calls(), hooks))

            self._run(look, tuple(operands), {}, operands)
            if self.effects.written:
                refuse("writes into a tensor in a hook", "The graph must see it.", "Return it.", remedy=RUN_AGAIN)
            self.tape.append_observer(observer, nodes)

    @contextmanager
    def unrecorded(self) -> Generator[None]:
        """Lets torch functions pass while the recorder itself works, or runs a call."""
        was_recording, self.is_recording = self.is_recording, True
        try:
            yield
        finally:
            self.is_recording = was_recording

    def _as_recorded(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Puts stand-ins where real state stands, and the integers that tensors stand for inside slices."""

        def recorded(x: Any) -> Any:
            if isinstance(x, slice):
                bounds = (x.start, x.stop, x.step)
                return slice(*(self._index(b) if isinstance(b, torch.Tensor) else b for b in bounds))
            return self._value(self._originals.get(id(x), x)) if isinstance(x, torch.Tensor) else x

        return pytree.tree_map(recorded, (args, kwargs))

    def _index(self, tensor: torch.Tensor) -> int:
        return self.record(torch.Tensor.__index__, (tensor,), {})

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
        has_fakes = any(isinstance(x, FakeTensor) for x in operands)
        if has_fakes and self.tape.site[1] in _VALUE_READS:
            refuse_read(*self.tape.site)
        self._operands = {storage_key(x) for x in operands if x.layout == torch.strided}
        # A backward reads what the graph behind its arguments saved.
        self._reads_graph = func is torch.autograd.grad
        self.effects.clear()
        self._runs_on_fakes = False
        with self.unrecorded():
            if not has_fakes and (self._attempt.uses_values or self.tape.site not in self._attempt.make_fake):
                with self.effects:
                    result = func(*args, **kwargs)
            else:
                self._runs_on_fakes = True
                for operand in operands:
                    self._follow_copy(operand)
                with self._fake_mode, self.effects:
                    result = call_on_fakes(func, args, kwargs, *self.tape.site)
            return result

    def _follow_copy(self, tensor: torch.Tensor) -> None:
        """Makes the fake that stands for a real tensor among fakes count as that tensor's memory, for writes."""
        if not isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
            fake = self._fake_mode.from_tensor(tensor)
            self.tape.table.stand_in_memory(fake, tensor)
            self._operands.add(storage_key(fake))

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor with the values of fake state, where the attempt uses them."""
        if not self._attempt.uses_values or not self._state.has(tensor):
            return tensor
        with self.unrecorded():
            value = self._state.value(tensor)
        if self.tape.table.node(value) is None:
            self.tape.table.stand_in(value, tensor)
        return value

    def _check_read(self, tensor: torch.Tensor) -> None:
        storage = storage_key(tensor)
        if self.tape.table.knows_storage(storage) and storage not in self._operands and not self._reads_graph:
            refuse(
                f"reads a tensor inside `{self.tape.site[1]}` that isn't among its arguments",
                "What a call reads must be visible in the graph; this would become a constant.",
                "Pass the tensor as an argument.",
                remedy=RUN_AGAIN,
            )

    def _check_write(self, tensor: torch.Tensor) -> None:
        for node, known in self.tape.table.names(storage_key(tensor)):
            if node.op == "placeholder" and known.requires_grad:
                refuse(
                    f"writes into its input `{node.name}` in place, which requires a gradient",
                    "The gradient of what was there before would be another tensor's.",
                    "Clone the input first.",
                )
            if node.op == "placeholder":
                raise WrittenInputError(str(node.name))
            is_real = not isinstance(known, FakeTensor)
            if node.op == "get_attr" and (is_real or self._state.is_shared(known)):
                refuse(
                    "writes into a tensor that isn't a buffer",
                    "Only buffers are written back after a step.",
                    "Register the tensor with register_buffer.",
                )
            turns_unknown = self._runs_on_fakes or self.effects.is_random
            if turns_unknown and not self._attempt.uses_values and is_real and node in self.tape.made_by:
                raise MakeFakeError(self.tape.made_by[node])

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with self.unrecorded(), self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _read(self, func: Any, args: Any, kwargs: Any, operands: list[fx.Node], result: Any) -> None:
        """Takes note of what Python code read from tensors."""
        if operands and not all(isinstance(x, PLAIN) for x in pytree.tree_leaves(result)):
            refuse(
                f"calls `{self.tape.site[1]}`, which returns neither tensors nor plain values",
                "Its effect is invisible, so no graph can repeat it.",
                "Do it outside the forward.",
                remedy=RUN_AGAIN,
            )
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.tape.node_of, (args, kwargs))
        # The user may go on to change the list or array that was read.
        self.tape.fix(*as_call(func), node_args, node_kwargs, copy.deepcopy(result))
