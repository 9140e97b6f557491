"""Collects what a capture assumes about Python state while the forward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatrain.tracer.assumptions import Assumption, Assumptions, ClassAttribute, OwnAttribute, Unset
from megatrain.tracer.equal import is_equal
from megatrain.tracer.keeper import Keeper
from megatrain.tracer.kept import MISSING
from megatrain.tracer.named import Named, named_variables
from megatrain.tracer.reads import Read, Reads, recorded_reads
from megatrain.tracer.refusals import RUN_AGAIN, Obstacle
from megatrain.tracer.tree import ModuleTree


class Assuming:
    """Collects what a forward that is about to run will assume about Python state.

    Args:
        model: The model, before anything in it was swapped.
        is_opaque: Tells of a name in the model whether it belongs to a module that runs its own code at each step:
            that code reads what there is then.
    """

    def __init__(self, model: nn.Module, is_opaque: Callable[[str], bool]) -> None:
        self._model = model
        self._opaque = {id(module) for name, module in model.named_modules() if is_opaque(f"{name}.")}
        self._tree = ModuleTree.of(model)
        # More than the forward will turn out to read: afterwards it may hold something else.
        self._start = {variable.key: variable.now() for variable in named_variables(model)}
        self._reads = Reads()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Notes what the body reads."""
        with recorded_reads(self._model) as self._reads:
            yield

    def assumptions(self, constants: Iterable[torch.Tensor]) -> Assumptions:
        """Returns what was assumed, once the modules are again as they were.

        Args:
            constants: Tensors that are constants of the graph.

        Raises:
            Obstacle: If the forward counts in a global variable.
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
        values += self._of_variables(keeper)
        return Assumptions(tuple(values), tuple(unset), self._tree)

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

    def _of_variables(self, keeper: Keeper) -> Iterator[Assumption]:
        read: dict[type, set[str]] = {}
        for module, names in self._own_reads():
            read.setdefault(type(module), set()).update(names)
        for variable in named_variables(self._model, read):
            now = variable.now()
            before = self._start.get(variable.key, now)
            if type(now) in (int, float) and type(before) is type(now) and not is_equal(now, before):
                self._refuse_counter(variable)
            yield Assumption(variable.path, variable, keeper.keep(before))

    def _own_reads(self) -> Iterator[tuple[nn.Module, dict[str, Read]]]:
        return ((module, names) for module, names in self._reads.items() if id(module) not in self._opaque)

    def _refuse_counter(self, variable: Named) -> None:
        raise Obstacle(
            f"changes the global variable `{variable.path}` (now {variable.now()!r}) in its forward",
            "A capture would freeze it at its first value.",
            "Keep counters in a buffer.",
            remedy=RUN_AGAIN,
            place=variable.source,
            calls=self._calls_of(variable),
        )

    def _calls_of(self, variable: Named) -> tuple[str, ...]:
        """Names a module whose code names the variable, and those around it, outermost first."""
        for name, module in self._model.named_modules():
            methods = (value for kind in type(module).__mro__ for value in vars(kind).values())
            if any(getattr(method, "__code__", None) is variable.code for method in methods):
                parts = name.split(".") if name else []
                return tuple(".".join(parts[:i]) for i in range(len(parts) + 1))
        return ("",)
