"""Completion: runs due updates before any read or write of the tensors that they change."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.base.torch_private import DisableTorchFunctionSubclass, pytree
from megatrain.errors import ExecuteError, TrainStepWarning
from megatrain.optim.blockwise import OwnHook

# Properties that an update doesn't change. All other torch operations on a tensor with a due update run the update
# first.
_UNCHANGED = (
    "shape dtype device layout requires_grad grad grad_fn is_leaf ndim itemsize nbytes is_meta is_cpu is_cuda "
    "is_sparse is_quantized _version"
).split()
_UNCHANGED_CALLS = (
    "size numel nelement dim ndimension stride storage_offset element_size is_contiguous is_floating_point is_complex"
).split()
_PASSING: set[Callable[..., Any]] = {
    *(getattr(torch.Tensor, name).__get__ for name in _UNCHANGED),
    *(getattr(torch.Tensor, name) for name in _UNCHANGED_CALLS),
}

Looked = Sequence[torch.Tensor] | None
"""Marked tensors that somebody looks at; None for everything."""


class Completion:
    """Completes a step when it is called, or when a marked object is used, as long as the step exists.

    It serves as a hook; copied or pickled it does nothing.

    Args:
        complete: Runs the due updates. A method whose object is not kept alive, like `changing`.
        changing: Returns the tensors that due updates will change.

    Attributes:
        has_stepped: A step was taken, so that `optimizer.step()` has nothing left to do.
        heir: Takes the part of `complete` when the step is gone, because the host had no room for what the device has.
            Held by the compiled model: a class of tensors would keep it for good.
        is_saving: A checkpoint is being written, which takes what the device has from there: hooks do nothing.
    """

    def __init__(
        self,
        complete: Callable[[Looked], object] | None = None,
        changing: Callable[[], Iterable[torch.Tensor]] | None = None,
    ):
        self._complete = None if complete is None else weakref.WeakMethod(complete)
        self._changing = None if changing is None else weakref.WeakMethod(changing)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._hooks: list[RemovableHandle] = []
        self._classes: dict[type, type] = {}
        self._marked: list[object] = []
        self.has_stepped = self.is_saving = False
        self.heir: weakref.WeakMethod[Callable[[Looked], object]] | None = None

    def __call__(self, *_: object) -> None:
        """Runs the due updates, and has all values on the host."""
        self.look(None)

    def look(self, looked: Looked) -> None:
        """Runs the due updates, and has the values of some marked tensors on the host; None for all."""
        if looked is None and self.is_saving:
            return
        complete = None if self._complete is None else self._complete()
        if complete is not None:
            complete(looked)
        elif self.heir is not None:
            heir = self.heir()
            if heir is None:
                raise ExecuteError(_GONE)
            with self.suspended():
                heir(looked)
        if looked is None or (complete is None and self.heir is None):
            self.unmark()  # by now all are, unless the step is gone
        for tensor in looked or ():
            _make_ordinary(tensor, self)

    @contextmanager
    def saving(self) -> Generator[None]:
        """Lets the body take the optimizers' states as they are, with marked tensors in them."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Looks after the state of optimizers, too, and after calls of their `step`."""
        for optimizer in optimizers:
            self._optimizers.append(weakref.ref(optimizer))
            self._hooks.append(optimizer.register_state_dict_pre_hook(self))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self))
            self._hooks.append(optimizer.register_step_pre_hook(_StepHook(self)))

    def detach(self) -> None:
        """Leaves nothing with the optimizers; they may live longer."""
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[type[Completion], tuple[()]]:
        return Completion, ()

    def __deepcopy__(self, _: object) -> Completion:
        return Completion()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Lets the body use tensors and optimizers unmarked; afterwards marks tensors with due updates."""
        # Twice: Ctrl-C may come at any line, and due updates must not look done.
        try:
            try:
                self.unmark()
                yield
            finally:
                self.mark()
        finally:
            self.mark()

    @contextmanager
    def marked(self) -> Generator[None]:
        """Marks tensors of which the host has old values in the body, which is the user's code within a step."""
        try:
            self.mark()
            yield
        finally:
            self.unmark()

    def mark(self) -> None:
        """Gives them a subclass of their own class, as torch's lazy parameters have one until they have a shape."""
        optimizers = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        if optimizers and self._is_marked(optimizers[-1]):
            return  # it is the last to be marked, and the first not to be any more
        changing = None if self._changing is None else self._changing()
        for tensor in () if changing is None else changing():
            self._mark(tensor, _DueTensor, f"{type(tensor).__name__}WithUpdateDue")
        for optimizer in optimizers if self._marked else ():
            self._mark(optimizer, _DueOptimizer, type(optimizer).__name__)

    def _mark(self, thing: object, due: type[_Due], name: str) -> None:
        if self._is_marked(thing):
            return
        own = type(thing)
        if own not in self._classes:
            bases = (own,) if issubclass(own, due) else (due, own)
            place = {"__module__": own.__module__, "__qualname__": name}
            self._classes[own] = type(name, bases, {"completion": self, "own": own, **place})
        self._marked.append(thing)
        thing.__class__ = self._classes[own]

    def _is_marked(self, thing: object) -> bool:
        return vars(type(thing)).get("completion") is self

    def unmark(self) -> None:
        """Makes all marked objects ordinary again."""
        while self._marked:
            _make_ordinary(self._marked[-1], self)
            self._marked.pop()


_GONE = (
    "the values of this tensor were on the device alone, and are lost with the compiled model.\n"
    "  The host had no room for them when the training step was dropped.\n"
    "  Keep the compiled model, or save a checkpoint with TrainStep.save."
)


class _StepHook(OwnHook):
    """Warns once of an `optimizer.step()` that finds no gradient, because the training step has used it up."""

    def __init__(self, completion: Completion) -> None:
        self._completion = weakref.ref(completion)
        self._is_said = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        completion = self._completion()
        if completion is None or not completion.has_stepped or self._is_said or len(args) > 1 or kwargs:
            return  # a closure computes gradients
        if all(p.grad is None for p in parameters_of(optimizer)):
            self._is_said = True
            warnings.warn(
                "optimizer.step() finds no gradient: the training step before it has made the update.\n"
                "  A TrainStep runs forward, backward, clipping and the update in its one call.\n"
                "  Leave out backward(), clip_grad_norm_() and optimizer.step(); clip with TrainStep(max_grad_norm=).",
                TrainStepWarning,
                stacklevel=3,
            )


def _make_ordinary(thing: object, completion: Completion) -> None:
    found: Any = type(thing)
    if vars(found).get("completion") is completion:
        thing.__class__ = found.own


class _Due:
    """The first base class of marked objects: it runs the due updates first."""

    completion: Completion
    own: type

    def _take(self) -> None:
        """Runs the updates; afterwards this object has its own class again."""
        completion = type(self).completion
        completion.look([self] if isinstance(self, torch.Tensor) else None)
        _make_ordinary(self, completion)  # a copy that was made of the marked class

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._take()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._take()
        return self.__reduce_ex__(protocol)


class _DueTensor(_Due):
    """A tensor whose value an update will change."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _PASSING:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        used: list[Any] = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _DueTensor)]
        # A tensor may be marked for another step over the same model.
        for completion in dict.fromkeys([cls.completion, *(type(each).completion for each in used)]):
            completion.look([each for each in used if vars(type(each)).get("completion") is completion])
        return func(*args, **kwargs or {})


class _DueOptimizer(_Due):
    """An optimizer whose state an update will change: any look at the state may read, drop or replace a part of it."""

    @property
    def state(self) -> Any:
        """Of the optimizer, complete."""
        self._take()
        return self.state

    @state.setter
    def state(self, value: Any) -> None:
        self._take()
        self.state = value
