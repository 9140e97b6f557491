"""Completion: takes the updates that are due before anybody reads or writes what they change."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatrain.torch_private import DisableTorchFunctionSubclass

# What an update doesn't change. All other operations of torch on a tensor whose update is due take the update first.
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


class Completion:
    """Completes a step, as long as the step exists, when it is called, or what is marked is used.

    It serves as a hook; copied or pickled it does nothing.

    Args:
        complete: Takes the updates that are due. Like `changing` a method, whose object is not kept alive.
        changing: Says which tensors the updates that are due will change.
    """

    def __init__(
        self,
        complete: Callable[[], object] | None = None,
        changing: Callable[[], Iterable[torch.Tensor]] | None = None,
    ):
        self._complete = None if complete is None else weakref.WeakMethod(complete)
        self._changing = None if changing is None else weakref.WeakMethod(changing)
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._classes: dict[type, type] = {}
        self._marked: list[object] = []

    def __call__(self, *_: object) -> None:
        """Takes the updates that are due."""
        complete = None if self._complete is None else self._complete()
        if complete is not None:
            complete()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks after the state of an optimizer, too."""
        self._optimizer = weakref.ref(optimizer)
        self._hooks = (
            optimizer.register_state_dict_pre_hook(self),
            optimizer.register_load_state_dict_pre_hook(self),
        )

    def detach(self) -> None:
        """Leaves nothing with the optimizer; it may live longer."""
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[type[Completion], tuple[()]]:
        return Completion, ()

    def __deepcopy__(self, _: object) -> Completion:
        return Completion()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Lets the body use tensors and optimizer as they are, and marks those that are to change after it."""
        # Twice: Ctrl-C may come at any line, and what is due must not look as if it weren't.
        try:
            try:
                self.unmark()
                yield
            finally:
                self.mark()
        finally:
            self.mark()

    def mark(self) -> None:
        """Gives them a subclass of their own class, as torch's lazy parameters have one until they have a shape."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None and self._is_marked(optimizer):
            return  # it is the last to be marked, and the first not to be any more
        changing = None if self._changing is None else self._changing()
        for tensor in () if changing is None else changing():
            self._mark(tensor, _DueTensor, f"{type(tensor).__name__}WithUpdateDue")
        if optimizer is not None and self._marked:
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
        """Makes all that is marked ordinary again."""
        while self._marked:
            _make_ordinary(self._marked[-1], self)
            self._marked.pop()


def _make_ordinary(thing: object, completion: Completion) -> None:
    found: Any = type(thing)
    if vars(found).get("completion") is completion:
        thing.__class__ = found.own


class _Due:
    """What a class of things that are marked does before its own."""

    completion: Completion
    own: type

    def _take(self) -> None:
        """Takes the updates; this is of its own class then."""
        completion = type(self).completion
        completion()
        completion.unmark()  # by now all are, unless the step is gone
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
        cls.completion()
        cls.completion.unmark()
        return func(*args, **kwargs or {})


class _DueOptimizer(_Due):
    """An optimizer whose state an update will change: whoever looks at it wants to read, drop or replace something."""

    @property
    def state(self) -> Any:
        """Of the optimizer, complete."""
        self._take()
        return self.state

    @state.setter
    def state(self, value: Any) -> None:
        self._take()
        self.state = value
