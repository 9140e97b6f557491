"""Collects what a capture assumes about Python state while the forward runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.errors import UnwatchedWarning
from megatrain.tracer.python.assumptions import Assumption, Assumptions, ClassAttribute, OwnAttribute, Unset
from megatrain.tracer.python.attributes import ModuleTree, Read, Reads, recorded_reads
from megatrain.tracer.python.contents import MISSING, Named
from megatrain.tracer.python.globals import Variables, named_variables
from megatrain.tracer.python.snapshot import Keeper


class Assuming:
    """Collects what a forward that is about to run will assume about Python state.

    Args:
        model: The model, before anything in it was swapped.
        is_opaque: Tells of a name in the model whether it belongs to a module that runs its own code at each step:
            that code reads what there is then.
        without: Identities of forward hooks that run their own code too.
        variables: What the model's code and all its hooks name.
    """

    def __init__(
        self, model: nn.Module, is_opaque: Callable[[str], bool], without: Collection[int], variables: Iterable[Named]
    ) -> None:
        self._model = model
        self._without = without
        self._opaque = {id(module) for name, module in model.named_modules() if is_opaque(f"{name}.")}
        self._tree = ModuleTree.of(model)
        # More than the forward will turn out to read: afterwards it may hold something else.
        self._start = {variable.key: variable.now() for variable in variables}
        self._reads = Reads()

    @contextmanager
    def reading(self, instead: Mapping[tuple[int, str], Any]) -> Generator[None]:
        """Notes what the body reads; see `recorded_reads`."""
        with recorded_reads(self._model, instead) as self._reads:
            yield

    def assumptions(self, constants: Iterable[torch.Tensor]) -> Assumptions:
        """Returns what was assumed, once the modules are again as they were.

        Args:
            constants: Tensors that are constants of the graph.
        """
        keeper, paths = Keeper({id(t) for t in constants}), self._tree.paths()
        values: list[Assumption] = []
        unset: list[Unset] = []
        of_classes: dict[tuple[type, str], Read] = {}
        for module, names in self._own_reads():
            path = paths.get(id(module), type(module).__qualname__)
            missing = [name for name, read in names.items() if read.value is MISSING]
            # What the forward makes anew at each call has nothing that was there before.
            if id(module) not in self._reads.made:
                values += self._of_module(keeper, module, names, path, is_inside=id(module) in paths)
                unset.append(Unset(path, weakref.ref(module), frozenset(missing)))
            for name in missing:
                of_classes.setdefault((type(module), name), names[name])
        values += self._of_classes(keeper, of_classes)
        of_code = self._named()
        values += self._of_variables(keeper, of_code.found)
        skipped = tuple(sorted({variable.path for variable in of_code.skipped}))
        found = Assumptions(tuple(values), tuple(unset), self._tree, skipped)
        if (iterator := next(found.iterators(), None)) is not None:
            warnings.warn(
                f"the forward may read an iterator, {iterator}, and the numbers may be others than eager's.\n"
                "  A capture runs Python code a few times, which takes items, and later steps don't run it.\n"
                "  Take the item before the call, and give it to the model as an argument or an attribute.",
                UnwatchedWarning,
                stacklevel=2,
            )
        return found

    def _of_module(
        self, keeper: Keeper, module: nn.Module, names: dict[str, Read], path: str, *, is_inside: bool
    ) -> Iterator[Assumption]:
        own, ref = vars(module), weakref.ref(module)
        for name, read in names.items():
            # A value that the forward had set before it read it says nothing about the start.
            was_there = name in own and read.value is own[name]
            if was_there and not (name == "training" and is_inside):
                place = OwnAttribute(ref, name, read.source)
                yield Assumption(f"{path}.{name}", place, keeper.keep(own[name]))

    def _of_classes(self, keeper: Keeper, found: dict[tuple[type, str], Read]) -> Iterator[Assumption]:
        for (kind, name), read in found.items():
            place = ClassAttribute(kind, name, read.source)
            value = place.now()
            if value is MISSING or value is not vars(nn.Module).get(name):
                yield Assumption(f"{kind.__qualname__}.{name}", place, keeper.keep(value))

    def _named(self) -> Variables:
        read: dict[type, set[str]] = {}
        for module, names in self._own_reads():
            read.setdefault(type(module), set()).update(names)
        return named_variables(self._model, read, without=self._without)

    def _of_variables(self, keeper: Keeper, variables: Iterable[Named]) -> Iterator[Assumption]:
        for variable in variables:
            now = variable.now()
            before = self._start.get(variable.key, now)
            yield Assumption(variable.path, variable, keeper.keep(before))

    def _own_reads(self) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
        return ((module, names) for module, names in self._reads.items() if id(module) not in self._opaque)
