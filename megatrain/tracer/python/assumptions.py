"""What a capture assumed about Python state: attributes, hooks, globals, and the modules themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatrain.counts import counted
from megatrain.tracer.python.attributes import ModuleTree
from megatrain.tracer.python.contents import MISSING, Missing, Named
from megatrain.tracer.python.snapshot import Contents, Kept, KeptValue, Same, value_text
from megatrain.tracer.python.unchanged import Watch
from megatrain.tracer.source_line import SourceLine


@dataclass(frozen=True, slots=True, eq=False)
class OwnAttribute:
    """What a module's own `__dict__` holds under a name; the module isn't kept alive."""

    module: weakref.ref[nn.Module]
    name: str
    source: SourceLine | None

    def now(self) -> Any:
        """Reads it; missing where the module is gone."""
        module = self.module()
        return MISSING if module is None else vars(module).get(self.name, MISSING)


@dataclass(frozen=True, slots=True, eq=False)
class ClassAttribute:
    """What a class or its bases hold under a name."""

    kind: type
    name: str
    source: SourceLine | None

    def now(self) -> Any:
        """Reads it, without running any descriptor."""
        return next((vars(k)[self.name] for k in self.kind.__mro__ if self.name in vars(k)), MISSING)


@dataclass(frozen=True, slots=True, eq=False)
class Assumption:
    """A value of Python state that the forward read; prints as `` model.scale == 2.0 at model.py:41: `...` ``.

    Args:
        path: Its name.
        place: Where it is read again.
        kept: What it was.
    """

    path: str
    place: OwnAttribute | ClassAttribute | Named
    kept: Kept

    @property
    def source(self) -> SourceLine | None:
        """The user's line that read it first."""
        return self.place.source

    @property
    def is_code(self) -> bool:
        """Tells whether it says which function, class or module stands behind a name, rather than a value."""
        return isinstance(self.kept, Same) or (
            isinstance(self.kept, KeptValue) and isinstance(self.kept.value, Missing)
        )

    def __str__(self) -> str:
        return f"{self.path} {self.kept}" + (f" at {self.source}" if self.source else "")

    def failure(self, seen: set[tuple[int, int]]) -> str | None:
        """Returns what is different now, or None."""
        found = self.kept.difference(self.place.now(), seen)
        if found is None:
            return None
        at = f" at {self.source}" if self.source else ""
        return f"{self.path}{found.path} {found.expected}{at}; now {value_text(found.now)}"


@dataclass(frozen=True, slots=True, eq=False)
class Unset:
    """Names that a module was asked for and doesn't hold itself: its class or its registries gave the answer.

    Args:
        path: The module's name.
        module: The module, which isn't kept alive.
        names: What was asked for.
    """

    path: str
    module: weakref.ref[nn.Module]
    names: frozenset[str]

    def failure(self) -> str | None:
        """Returns the first of the names that the module holds itself now, or None."""
        module = self.module()
        found = () if module is None else sorted(self.names.intersection(vars(module)))
        return f"{self.path}.{found[0]} isn't set; now {value_text(vars(module)[found[0]])}" if found else None


@dataclass(frozen=True, slots=True, eq=False)
class Assumptions:
    """All that a capture assumed about Python state; printing it lists the values, one a line.

    Args:
        values: Values that were read.
        unset: Names that were asked for in vain.
        tree: The modules, their registries and hooks.
        skipped: Variables of libraries that the code names, which aren't watched.
    """

    values: tuple[Assumption, ...]
    unset: tuple[Unset, ...]
    tree: ModuleTree
    skipped: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many values were read, not counting the functions, classes and modules behind names."""
        return sum(not value.is_code for value in self.values)

    def iterators(self) -> Iterator[str]:
        """The names of iterators, of which nobody knows what they give next."""
        met = set[int]()
        for value in self.values:
            for path, kept in _parts(value.path, value.kept, met):
                if isinstance(kept, Same) and kept.is_iterator:
                    yield f"`{path}`" + (f" at {value.source}" if value.source else "")

    def __str__(self) -> str:
        lines: dict[str, None] = {}
        cut: dict[str, None] = {}
        met = set[int]()
        for value in self.values:
            parts = list(_parts(value.path, value.kept, met))
            if not value.is_code:
                lines |= dict.fromkeys([str(value), *_attribute_lines(value.path, parts)])
            cut |= {f"{path} ({str(kept)[3:]})": None for path, kept in parts if isinstance(kept, Same) and kept.is_cut}
        hidden = len(self.values) - self.count
        known = f"{counted(len(self.tree.nodes), 'module')}, their hooks, and {hidden} names of code as they were"
        left_out = {"not watched inside": tuple(cut), "not watched": self.skipped}
        listed = [f"{what}: {', '.join(names)}" for what, names in left_out.items() if names]
        return "\n".join([*lines, known, *listed])


class AssumptionCheck:
    """Compares what a capture assumed about Python state with what there is now.

    Args:
        assumptions: Of one capture.

    Attributes:
        held: Whether they held when they were last compared.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        inside = {id(node.module()) for node in assumptions.tree.nodes}
        self._unset = [unset for unset in assumptions.unset if id(unset.module()) in inside]
        # Modules that no other module registers: no tree version tells of them.
        self._strays = [unset for unset in assumptions.unset if id(unset.module()) not in inside]
        self._tree_version: int | None = None
        self.held = False
        self._watch: Watch | None = None

    def first_failure(self, tree_version: int) -> str | None:
        """Returns the first assumption that doesn't hold, with what there is instead, or None.

        Args:
            tree_version: A number that is another one whenever the modules, their registries or hooks changed.
        """
        failure = self._first_failure(tree_version)
        self.held = failure is None
        return failure

    def _first_failure(self, tree_version: int) -> str | None:
        if self._tree_version != tree_version:
            failure = self._assumptions.tree.failure() or _first(unset.failure() for unset in self._unset)
            if failure is not None:
                return failure
            self._tree_version = tree_version
        if self._watch is not None and self._watch.is_unchanged():
            return None
        seen: set[tuple[int, int]] = set()
        failure = _first(value.failure(seen) for value in self._assumptions.values)
        failure = failure or _first(unset.failure() for unset in self._strays)
        self._watch = None if failure is not None else self._watched()
        return failure

    def _watched(self) -> Watch:
        watch = Watch()
        kinds: dict[type, None] = {}
        for value in self._assumptions.values:
            place = value.place
            if isinstance(place, OwnAttribute):
                module = place.module()
                assert module is not None, "an attribute of a module that is gone holds"
                watch.add_name(vars(module), place.name)
            elif isinstance(place, ClassAttribute):
                kinds |= dict.fromkeys(place.kind.__mro__[:-1])
            elif isinstance(place.holder, dict):
                watch.add_name(place.holder, place.name)
            elif isinstance(place.holder, type):
                kinds |= dict.fromkeys(place.holder.__mro__[:-1])
            else:
                watch.add_cell(place.holder, place.now())
        for table in (
            *map(vars, kinds),
            *(vars(m) for m in (unset.module() for unset in self._strays) if m is not None),
        ):
            watch.add_container(table)
        watch.add_parts((value.kept, value.place.now()) for value in self._assumptions.values)
        return watch


def _first(failures: Iterable[str | None]) -> str | None:
    return next((failure for failure in failures if failure is not None), None)


def _parts(path: str, kept: Kept, met: set[int]) -> Iterator[tuple[str, Kept]]:
    """Yields a snapshot and whatever it holds, with their paths, each at its first mention."""
    yield path, kept
    if isinstance(kept, Contents) and id(kept) not in met:
        met.add(id(kept))
        for step, inner in kept.parts():
            yield from _parts(path + step, inner, met)


def _attribute_lines(path: str, parts: Iterable[tuple[str, Kept]]) -> Iterator[str]:
    """Yields a line per attribute of a plain object."""
    for name, kept in parts:
        is_item = "[" in name[len(path) :]
        if name != path and not is_item and not isinstance(kept, Same):
            yield f"  {name} {kept}"
