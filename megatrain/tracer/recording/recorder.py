"""Records every torch call of a running forward as a node of one fx graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx, nn

from megatrain.device import used_device
from megatrain.interrupts import Interrupts
from megatrain.torch_private import DisableTorchFunction, disable_current_modes, pytree
from megatrain.tracer.calls import as_call, call_name, is_property_get, is_property_set
from megatrain.tracer.guards import PLAIN, is_metadata_read
from megatrain.tracer.packed_state import check_run, unpacked_result
from megatrain.tracer.packing import UnfollowedError
from megatrain.tracer.python.followed_numbers import (
    Followed,
    Following,
    OnNumbers,
    held_tensors,
    is_followed,
    refuse_followed,
)
from megatrain.tracer.python.python_values import VALUES, GeneratorState
from megatrain.tracer.recording.observer import Observer
from megatrain.tracer.recording.obstacles import (
    RUN_AGAIN,
    HookSite,
    Obstacle,
    check_call,
    check_strided,
    check_transforms,
    refuse,
    refuse_flag,
)
from megatrain.tracer.recording.opaque import Escapes, Holder, Opaque, tensors_in, without_history
from megatrain.tracer.recording.random_numbers import kept_rng
from megatrain.tracer.recording.runner import CallRunner
from megatrain.tracer.recording.tape import place_of
from megatrain.tracer.source_line import user_line

# Arguments that are at each step what they were at the capture, whatever the module does with them.
_LASTING = (*VALUES, torch.Size, np.generic, Enum, type, BuiltinFunctionType)


class OpaqueCall:
    """One call of an opaque module during a capture.

    Args:
        name: Fully qualified name of the module.
        reason: Why it is opaque.
        module: The module, holding fake state.
        args: Positional arguments.
        kwargs: Keyword arguments.
        calls: Names of the module calls around it and itself, outermost first.

    Attributes:
        has_drawn: Whether its run moved a random generator: torch's on the CPU, Python's, NumPy's, or one of its own.
    """

    def __init__(self, name: str, reason: str, module: nn.Module, args: Any, kwargs: Any, calls: tuple[str, ...]):
        self._name = name
        self._place = f"`{name}`" if name else "the model"
        self._calls = calls
        self._arguments = (args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        strange = [x for x in leaves if not isinstance(x, (torch.Tensor, *_LASTING))]
        if strange:
            self._refuse(f"is given a {type(strange[0]).__qualname__}, which may contain tensors or change")
        state = _state_of(module)
        self._num_state = len(state)
        self.operands = [*(x for x in leaves if isinstance(x, torch.Tensor)), *(tensor for tensor, _ in state)]
        self.opaque = Opaque(name, reason, module, (args, kwargs), [places for _, places in state], calls)
        self._attributes = self.opaque.python_state()
        self.changed: set[tuple[Any, Any]] = set()
        self.has_drawn = False

    def run(
        self, tensors: Sequence[torch.Tensor], more: Mapping[int, torch.Tensor], escapes: Escapes
    ) -> tuple[Any, tuple[torch.Tensor, ...], list[tuple[Holder, torch.Tensor]]]:
        """Runs the module.

        Args:
            tensors: Stand-ins for the operands.
            more: Further stand-ins, by the id of what they replace.
            escapes: Gets to know what the module's own code computes.

        Returns:
            The module's result, the tensors that its node gives, and the buffers that it re-assigned.

        Raises:
            Obstacle: If the module does something that would be lost, or wrong, when it runs again.
        """
        memory = [_memory(t) for t in tensors]
        state = tensors[len(tensors) - self._num_state :]
        flags = [t.requires_grad for t in state]
        before = pytree.tree_flatten(self._arguments)
        cpu = _cpu_state()
        with kept_rng(used_device(tensors)) as moved:
            results, result, rebound = self.opaque.capture(
                tensors, dict(more), lambda tensor: escapes.note(tensor, self._calls)
            )
            self.has_drawn = cpu != _cpu_state()
        self.has_drawn |= bool(moved)
        after = pytree.tree_flatten(self._arguments)
        if before[1] != after[1] or any(a is not b for a, b in zip(before[0], after[0], strict=True)):
            self._refuse("changes a container that it is given")
        for change in self._attributes.changes():
            self.changed.add(change.where)
            self.has_drawn |= isinstance(change.holder, GeneratorState)
            if any(t.requires_grad for t in tensors_in(change.now)):
                self._refuse(f"keeps a tensor with a history in the attribute `{change.name}`")
        if any(now != then for now, then in zip(map(_memory, tensors), memory, strict=True)):
            raise Obstacle(
                f"gives a parameter other memory in the forward of {self._place}",
                "The parameter stays in host memory; the module gets a stand-in.",
                "Change parameters outside the forward.",
            )
        if [t.requires_grad for t in state] != flags:
            refuse_flag(f" in the forward of {self._place}")
        if any(t.is_leaf and t.grad is not None for t in tensors):
            raise Obstacle(
                f"runs a backward in the forward of {self._place}",
                "The gradients that this backward leaves in `.grad` would be lost.",
                "Use torch.autograd.grad, or run the backward outside the model.",
            )
        return result, results, rebound

    def _refuse(self, what: str) -> None:
        raise Obstacle(
            f"runs the module `{self._name}` again at each step, which {what},",
            "All tensors that enter or leave such a module must be in its arguments or its result.",
            "Pass and return tensors.",
            remedy=RUN_AGAIN,
            place=user_line(),
            calls=self._calls,
        )


def _cpu_state() -> bytes:
    """The state of torch's generator on the CPU."""
    with disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _state_of(module: nn.Module) -> list[tuple[torch.Tensor, list[Holder]]]:
    """Lists the state of a module with every place that holds it, tied tensors once."""
    found: dict[int, tuple[torch.Tensor, list[Holder]]] = {}
    for child in module.modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(child)[kind].items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((child, kind, name))
    return list(found.values())


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_RECORDED_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}


class Recorder(CallRunner):
    """Appends what it saw of each torch call to the graph of `tape`."""

    @contextmanager
    def paused(self) -> Generator[None]:
        """Switches the mode off around a call that is recorded by hand."""
        with DisableTorchFunction():
            yield

    # -- recording ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = call_name(func)
        # `prim` holds questions (the device of a fake tensor) that C++ asks where an error ends the process.
        if self.is_recording or getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        if is_property_get(func) and name not in _RECORDED_PROPERTIES:
            with self._located():
                check_call(func, args, kwargs)
            with Interrupts():
                return func(*args, **kwargs)
        return self.record(func, args, kwargs)

    @contextmanager
    def _located(self) -> Generator[None]:
        """Notes on an obstacle which modules the model was in when it met it."""
        try:
            yield
        except Obstacle as obstacle:
            obstacle.calls = obstacle.calls or self.tape.calls()
            obstacle.lacks_large |= self._left_out_large
            raise
        except UnfollowedError as error:
            place = None if error.is_placed else self.tape.site[0]
            raise Obstacle(*error.args, place=place, calls=self.tape.calls()) from None

    def over(self) -> list[tuple[torch.Tensor, str]]:
        """Lets go of all tensors; lists the fake ones, with the place that made each."""
        made = [(tensor, place_of(node)) for tensor, node in self.tape.table.made()]
        self.effects.clear()
        self.tape.table.forget()
        self.effects.clear()
        self._state.forget()
        return made

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor is the fake that stands for a parameter or buffer."""
        return self._state.has(tensor)

    def is_value_of(self, tensor: torch.Tensor, fake: torch.Tensor) -> bool:
        """Tells whether a tensor holds the values of a parameter or buffer, in a capture on values."""
        return self._state.is_value(tensor, fake)

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
        if any(map(is_followed, pytree.tree_leaves((args, kwargs)))):
            return self._record_on_numbers(func, args, kwargs, run)
        if self._attempt.follows_reads and self.tape.site[1] == "item":
            [tensor], _ = self._as_recorded(args, kwargs)
            if tensor.dtype.is_floating_point or (tensor.dtype in _INTEGERS and not self.tape.is_known(tensor)):
                return self.read_number(tensor)
        return self._record_plain(func, args, kwargs, run)

    def read_number(self, tensor: torch.Tensor, kind: Callable[..., Any] | None = None) -> Followed:
        """Records the read of a tensor's only element, as a float or an int if `kind` is one of these; follows it."""
        with torch.no_grad():  # a copy, because the next call may write into the tensor
            held = self.record(torch.Tensor.clone, (tensor,), {})
        if kind is None:
            self.tape.node_of(held).meta["is_read"] = True
        with self.unrecorded():
            return self.following.number(held, kind)

    def _record_plain(
        self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[..., Any] | None = None
    ) -> Any:
        if is_property_set(func):
            return None  # nothing that would change anything passes the check
        if self.tape.site[1] == "requires_grad_":
            if _is_flag_kept(*args, **kwargs):
                return args[0]
            if self.is_state(args[0]):
                refuse_flag()
        is_question = is_metadata_read(self.tape.site[1])
        packed = None
        if not is_question:
            packed = self._packed.call(func, args, kwargs, self._originals)
            args, kwargs = self._as_recorded(args, kwargs)
        if packed is not None:
            check_run(run)
            func, run = packed, packed.first_result
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._value, packed.apart(args, kwargs))
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        nodes = [] if is_question else [self.tape.used(x) for x in operands]
        with self.unrecorded():
            ends = self.gradient_order.ends(operands, nodes) if nodes else {}
        result = self._run(run or func, args, kwargs, operands)
        result, given = unpacked_result(result, is_random=self.effects.is_random)
        has_tensors = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result))
        if has_tensors or self.effects.written:
            if self.effects.is_random and not self._attempt.uses_values:
                result = pytree.tree_map_only(torch.Tensor, self._as_fake, result)
            check_strided(result)
            node = self.tape.append(func, args, kwargs, nodes, result)
            with self.unrecorded():
                self.gradient_order.note(node, ends, result)
        elif not is_question:
            self._read(func, args, kwargs, nodes, result)
        return result if given is None else given

    def _record_on_numbers(self, func: Any, args: Any, kwargs: Any, run: Any) -> Any:
        """Records a call that is given followed numbers."""
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = [x for x in leaves if isinstance(x, Followed)]
        following = numbers[0].following if numbers else Following()
        if run is not None or not numbers or any(type(x) is slice and is_followed(x) for x in leaves):
            following.decide()
        if is_property_set(func) or is_metadata_read(self.tape.site[1]):
            following.decide()
        args, kwargs = self._as_recorded(args, kwargs)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given += [tensor for number in numbers for tensor in held_tensors(number)]
        operands = tuple({id(tensor): tensor for tensor in given}.values())
        call = OnNumbers(*as_call(func), (args, kwargs), operands, self.tape.calls())
        result = self._record_plain(call, operands, {}, call.first_run)
        # How much is drawn, or which shapes there are, may depend on the number.
        if self.effects.is_random or self.effects.is_value_dependent or not self._is_alike(call, operands):
            following.decide()
        return result

    def _is_alike(self, call: OnNumbers, operands: Sequence[torch.Tensor]) -> bool:
        """Tells whether a call returns the same shapes and memory for another number, tried without values."""
        with self.unrecorded(), self._fake_mode, torch.no_grad():
            made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in operands]
            return call.is_alike(made)

    def record_module(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Records the call of an opaque module as one node; returns the module's result."""
        self.tape.site = (user_line(), name)
        with self._located(), self.unrecorded():
            check_transforms()
            self._packed.check_opaque(name, module, self._attempt.opaque[name])
            refuse_followed((args, kwargs))
            args, kwargs = self._as_recorded(args, kwargs)
            calls = (*self.tape.calls(), name)
            call = OpaqueCall(name, self._attempt.opaque[name], module, args, kwargs, calls)
            operands = [self._value(x, is_leaf=True) for x in call.operands]
            nodes = [self.tape.used(x) for x in operands]
            fakes = {id(x) for x in call.operands}
            more = {key: self._value(fake, is_leaf=True) for key, fake in self._originals.items() if id(fake) in fakes}

            def run(*tensors: torch.Tensor) -> Any:
                return call.run(tensors, more, self.tape.escapes)

            ends = self.gradient_order.ends(operands, nodes)
            with self._generator.free():
                result, results, rebound = self._run(run, tuple(operands), {}, operands, is_users=True)
            made = results
            if self._drops_saved:
                result, results = without_history(result, results, operands, self._refuse_saved)
            self.changed_by_users |= call.changed
            has_drawn = call.has_drawn or self.effects.is_random
            node = self.tape.append_opaque(call.opaque, nodes, results, has_drawn=has_drawn)
            self.gradient_order.note(node, ends, made)
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
            refuse_followed(args)
            args = self._as_recorded(*args)
            observer = Observer(site[0], module, hook, args)
            operands = [self._value(x) for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            nodes = [self.tape.node_of(x) for x in operands]

            def look(*tensors: torch.Tensor) -> None:
                observer.first_run(tensors, lambda tensor: self.tape.escapes.note(tensor, self.tape.calls(), hooks))

            self._run(look, tuple(operands), {}, operands, is_users=True)
            if self.effects.written:
                refuse("writes into a tensor in a hook", "The graph must see it.", "Return it.", remedy=RUN_AGAIN)
            if self.effects.is_random:  # a recompute leaves the hook out, and would draw the hook's numbers elsewhere
                refuse("draws random numbers in a hook", "The graph must see it.", "Draw outside.", remedy=RUN_AGAIN)
            self.tape.append_observer(observer, nodes)

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

    def _read(self, func: Any, args: Any, kwargs: Any, operands: list[fx.Node], result: Any) -> None:
        """Takes note of what Python code read from tensors."""
        if operands and not all(isinstance(x, PLAIN) for x in pytree.tree_leaves(result)):
            refuse(
                f"calls `{self.tape.site[1]}`, which returns neither tensors nor plain values",
                "The effect of this call is invisible, so no graph can repeat it.",
                "Make this call outside the forward.",
                remedy=RUN_AGAIN,
            )
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.tape.node_of, (args, kwargs))
        # The user may go on to change the list or array that was read.
        self.tape.fix(*as_call(func), node_args, node_kwargs, copy.deepcopy(result))


def _is_flag_kept(tensor: torch.Tensor, requires_grad: bool = True) -> bool:
    return tensor.requires_grad == requires_grad
