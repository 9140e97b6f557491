"""Completion: takes the updates that are due before anybody reads or writes what they change."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

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
    """Completes a step, as long as the step exists, when it is called or a marked tensor is used.

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
        self._classes: dict[type[torch.Tensor], type[torch.Tensor]] = {}
        self._marked: list[tuple[torch.Tensor, type[torch.Tensor]]] = []

    def __call__(self, *_: object) -> None:
        """Takes the updates that are due."""
        complete = None if self._complete is None else self._complete()
        if complete is not None:
            complete()

    def __reduce__(self) -> tuple[type[Completion], tuple[()]]:
        return Completion, ()

    def __deepcopy__(self, _: object) -> Completion:
        return Completion()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Lets the body use the tensors as they are, and marks those that are to change after it."""
        self.unmark()
        try:
            yield
        finally:
            self._mark()

    def _mark(self) -> None:
        """Gives them a subclass of their own class, as torch's lazy parameters have one until they have a shape."""
        changing = None if self._changing is None else self._changing()
        for tensor in () if changing is None else changing():
            own = type(tensor)
            if own not in self._classes:
                self._classes[own] = type(f"{own.__name__}WithUpdateDue", (_Due, own), {"completion": self})
            self._marked.append((tensor, own))
            tensor.__class__ = self._classes[own]

    def unmark(self) -> None:
        """Makes all marked tensors ordinary ones."""
        while self._marked:
            tensor, own = self._marked.pop()
            tensor.__class__ = own


class _Due:
    """What a class of marked tensors does before its own."""

    completion: Completion

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
        cls._complete()
        return func(*args, **kwargs or {})

    @classmethod
    def _complete(cls) -> None:
        cls.completion()
        cls.completion.unmark()  # by now they are, unless the step is gone

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._complete()
        return copy.deepcopy(self, memo)  # of its own class by now

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._complete()
        return self.__reduce_ex__(protocol)
