"""Takes tensors out of nested Python objects and puts others in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megatrain.errors import TraceError


class _OnDeepCopy(TorchFunctionMode):
    """Decides what a tensor becomes while the object that holds it is deep-copied."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__deepcopy__":
            return self._replace(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """An object of any type (tuple, dict, dataclass, model output, cache) with its tensors numbered.

    Args:
        skeleton: The object, holding placeholder tensors.
        placeholders: The distinct tensors in it, in the order a deep copy meets them.
    """

    skeleton: Any
    placeholders: tuple[torch.Tensor, ...]

    @staticmethod
    def of(value: Any) -> Structure:
        """Finds the tensors in `value`.

        Raises:
            TraceError: If an object in it can't be copied, so that no call could return a fresh one.
        """
        found: dict[int, torch.Tensor] = {}
        try:
            with _OnDeepCopy(lambda t: found.setdefault(id(t), t)):
                skeleton = copy.deepcopy(value)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise TraceError(
                f"the model returns an object that can't be copied ({type(value).__qualname__}: {error}).\n"
                "  Every call must return fresh objects around its own tensors.\n"
                "  Return tensors, containers, dataclasses or objects that copy.deepcopy accepts."
            ) from error
        return Structure(skeleton, tuple(found.values()))

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns a fresh copy of the object with `tensors` in place of the placeholders, in order."""
        if len(self.placeholders) == 1 and self.skeleton is self.placeholders[0]:
            return tensors[0]
        by_id = {id(p): t for p, t in zip(self.placeholders, tensors, strict=True)}
        with _OnDeepCopy(lambda t: by_id[id(t)]):
            return copy.deepcopy(self.skeleton)


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of a call: tensors in order, and a key for all else."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Flattens the arguments of one call; containers are those that `torch.utils._pytree` knows."""
        paths, tree = pytree.tree_flatten_with_path((args, kwargs))
        names = [_path_name(path) for path, _ in paths]
        leaves = tuple(leaf for _, leaf in paths)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return Arguments(tuple(leaves[i] for i in at), tuple(names[i] for i in at), leaves, tree)

    @property
    def literals(self) -> tuple[Any, ...]:
        """The leaves with every tensor replaced by None."""
        return tuple(None if isinstance(x, torch.Tensor) else x for x in self.leaves)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns `(args, kwargs)` with other tensors in the places of these."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.tree)


def _path_name(path: tuple[Any, ...]) -> str:
    """Names an argument by its path: `input_ids`, `arg0`, `batch_labels`."""
    parts: list[str] = []
    for key in path[1:]:
        inner = getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
        parts.append(f"arg{inner}" if isinstance(inner, int) and not parts else str(inner))
    text = "_".join(parts) or "arg"
    return text if text.isidentifier() else "".join(c if c.isalnum() else "_" for c in f"arg_{text}")
