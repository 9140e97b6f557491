"""Records every torch call of a running forward as a node of one fx graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import DisableTorchDispatch, DisableTorchFunction, FakeTensor, pytree
from megatrain.tracer.calls import as_call, call_name, is_property_get, is_property_set
from megatrain.tracer.guards import PLAIN, is_metadata_read
from megatrain.tracer.python.followed_numbers import (
    Followed,
    Following,
    OnNumbers,
    held_tensors,
    is_followed,
    refuse_followed,
)
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
from megatrain.tracer.recording.opaque import Observer, OpaqueCall, without_history
from megatrain.tracer.recording.packed_calls import check_opaque, check_run, packed_call, unpacked_result
from megatrain.tracer.recording.recall import ComparedCall, Recipe
from megatrain.tracer.recording.runner import CallRunner
from megatrain.tracer.source_line import user_line

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# What a tensor without values answers itself.
_QUESTIONS = "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"
_OF_SHAPE = {name: getattr(torch.Tensor, name) for name in _QUESTIONS}
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
            self._locate(obstacle)
            raise

    def _locate(self, obstacle: Obstacle) -> None:
        obstacle.calls = obstacle.calls or self.tape.calls()
        obstacle.lacks_large |= self._left_out_large

    def over(self) -> list[tuple[torch.Tensor, fx.Node]]:
        """Lets go of all tensors; lists the fake ones, with the node of each."""
        made = list(self.tape.table.made())
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
        try:
            return self._record(func, args, kwargs)
        except Obstacle as obstacle:
            self._locate(obstacle)
            raise

    def record_forward(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        run: Callable[..., Any],
        has_history: Callable[[torch.Tensor], bool],
    ) -> Any:
        """Records the call of an `autograd.Function` from inside, where torch has asked for its forward.

        Args:
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
        asked = None if run is not None else self.recall.asked(func, args, kwargs)
        if asked is not None and asked.recipe is not None:
            return self._recalled(asked, asked.recipe)
        if _OF_SHAPE.get(self.tape.site[1]) is func and type(args[0]) is FakeTensor:
            with self.unrecorded(), DisableTorchDispatch():
                return func(*args, **kwargs)
        if any(map(is_followed, pytree.tree_leaves((args, kwargs)))):
            return self._record_on_numbers(func, args, kwargs, run)
        if self._attempt.follows_reads and self.tape.site[1] == "item":
            [tensor], _ = self._as_recorded(args, kwargs)
            if tensor.dtype.is_floating_point or (tensor.dtype in _INTEGERS and not self.tape.is_known(tensor)):
                return self.read_number(tensor)
        return self._record_plain(func, args, kwargs, run, asked)

    def _recalled(self, asked: ComparedCall, recipe: Recipe) -> Any:
        """Records a call that equals an earlier one; makes its results without running it."""
        self.effects.clear()
        self.effects.is_random = recipe.is_random
        self.runs_on_fakes = True
        if recipe.is_random:
            self._generator.check_straight()
        with self.unrecorded():
            results = self.recall.made(recipe, asked)
        node = self.tape.append_equal(recipe.node, asked.args, asked.kwargs, asked.autocast)
        self.recall.bind(recipe, asked, node, results, self.tape.append_part)
        if recipe.ready is not None:
            ready = [[None if i is None else asked.nodes[i] for i in each] for each in recipe.ready]
            self.gradient_order.note_equal(node, ready)
        return results[0] if recipe.kind is None else recipe.kind(results)

    def read_number(self, tensor: torch.Tensor, kind: Callable[..., Any] | None = None) -> Followed:
        """Records the read of a tensor's only element, as a float or an int if `kind` is one of these; follows it."""
        with torch.no_grad():  # a copy, because the next call may write into the tensor
            held = self.record(torch.Tensor.clone, (tensor,), {})
        if kind is None:
            self.tape.node_of(held).meta["is_read"] = True
        with self.unrecorded():
            return self.following.number(held, kind)

    def _record_plain(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        run: Callable[..., Any] | None = None,
        asked: ComparedCall | None = None,
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
            packed = packed_call(self._packed, func, args, kwargs, self._originals)
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
                asked = asked if given is None and packed is None else None
                self.recall.note(asked, node, result, self.effects, self.gradient_order.ready(node))
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
            check_opaque(self._packed, name, module, self._attempt.opaque[name])
            refuse_followed((args, kwargs))
            args, kwargs = self._as_recorded(args, kwargs)
            calls = (*self.tape.calls(), name)
            call = OpaqueCall(name, self._attempt.opaque[name], module, args, kwargs, calls)
            operands = [self._value(x, is_leaf=True) for x in call.operands]
            nodes = [self.tape.used(x) for x in operands]
            fakes = {id(x) for x in call.operands}
            more = {key: self._value(fake, is_leaf=True) for key, fake in self._originals.items() if id(fake) in fakes}

            def run(*tensors: torch.Tensor) -> Any:
                return call.run(tensors, more, lambda tensor: self.tape.escapes.note(tensor, calls))

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
        """Records a hook that only looks as one node, and runs it once, so that what it leaves is seen."""
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
