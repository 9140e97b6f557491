"""What a capture assumed about Python state: attributes, hooks, globals, and the modules themselves."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.base.counts import counted
from megatrain.base.patches import original_of, replaced_here
from megatrain.errors import UnwatchedWarning
from megatrain.tracer.python.names import REGISTRIES, NamedVariables
from megatrain.tracer.python.python_values import MISSING, Missing, Named
from megatrain.tracer.python.snapshot import Contents, Keeper, Kept, KeptValue, Same, value_text
from megatrain.tracer.python.watch import ModuleTree, Watch
from megatrain.tracer.source_line import OURS, SourceLine, user_line

_TORCH_MODULE_FILE = sys.modules["torch.nn.modules.module"].__file__


@dataclass(frozen=True, slots=True, eq=False)
class Assumption:
    """A value of Python state that the forward read; prints as `` model.scale == 2.0 at model.py:41: `...` ``."""

    place: Named
    kept: Kept

    @property
    def is_code(self) -> bool:
        """Tells whether it says which function, class or module a name stands for, rather than a value."""
        return isinstance(self.kept, Same) or (
            isinstance(self.kept, KeptValue) and isinstance(self.kept.value, Missing)
        )

    @property
    def _at(self) -> str:
        source = self.place.source
        return f" at {source}" if source else ""

    def __str__(self) -> str:
        return f"{self.place.path} {self.kept}{self._at}"

    def failure(self, seen: set[tuple[int, int]]) -> str | None:
        """Returns what is different now, or None."""
        found = self.kept.difference(self.place.now(), seen)
        if found is None:
            return None
        return f"{self.place.path}{found.path} {found.expected}{self._at}; now {value_text(found.now)}"

    def parts(self, met: set[int]) -> Iterator[tuple[str, Kept]]:
        """Yields what was kept and whatever that holds, with their paths, each at its first mention."""
        stack = [(self.place.path, self.kept)]
        while stack:
            path, kept = stack.pop()
            yield path, kept
            if isinstance(kept, Contents) and id(kept) not in met:
                met.add(id(kept))
                stack += reversed([(path + step, inner) for step, inner in kept.parts()])


@dataclass(frozen=True, slots=True, eq=False)
class Unset:
    """Names that a module was asked for and doesn't hold itself: its class or its registries gave the answer."""

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
        unset: Names that were asked for in vain.
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
            for path, kept in value.parts(met):
                if isinstance(kept, Same) and kept.is_iterator:
                    yield f"`{path}`" + (f" at {value.place.source}" if value.place.source else "")

    def __str__(self) -> str:
        lines: dict[str, None] = {}
        cut: dict[str, None] = {}
        met = set[int]()
        for value in self.values:
            parts = list(value.parts(met))
            if not value.is_code:
                lines |= dict.fromkeys([str(value), *_attribute_lines(parts)])
            cut |= {f"{path} ({str(kept)[3:]})": None for path, kept in parts if isinstance(kept, Same) and kept.is_cut}
        hidden = len(self.values) - self.count
        known = f"{counted(len(self.tree.nodes), 'module')}, their hooks, and {hidden} names of code as they were"
        left_out = {"not watched inside": tuple(cut), "not watched": self.skipped}
        listed = [f"{what}: {', '.join(names)}" for what, names in left_out.items() if names]
        return "\n".join([*lines, known, *listed])


def _attribute_lines(parts: list[tuple[str, Kept]]) -> Iterator[str]:
    """Yields a line per attribute of a plain object."""
    (path, _), *others = parts
    for name, kept in others:
        if "[" not in name[len(path) :] and not isinstance(kept, Same):
            yield f"  {name} {kept}"


class AssumptionCheck:
    """Compares what a capture assumed about Python state with what there is now."""

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
        tables: dict[int, Any] = {}
        for place in (value.place for value in self._assumptions.values):
            if isinstance(place.holder, type):
                tables |= {id(kind): vars(kind) for kind in place.holder.__mro__[:-1]}
            elif isinstance(place.holder, dict):
                watch.add_name(place.holder, place.name)
            elif (module := place.module) is not None:
                watch.add_name(vars(module), place.name)
            else:
                watch.add(place)
        for unset in self._strays:
            if (module := unset.module()) is not None:
                tables[id(module)] = vars(module)
        for table in tables.values():
            watch.add(table)
        watch.add_parts((value.kept, value.place.now()) for value in self._assumptions.values)
        return watch


def _first(failures: Iterable[str | None]) -> str | None:
    return next((failure for failure in failures if failure is not None), None)


# How a capture collects them.


class _Reads:
    """The attributes that one thread's forward read, by module: the first value of each, and the user's line.

    The value is what the module's own `__dict__` held, or `MISSING`: then its class or a registry gave the answer.
    """

    def __init__(self) -> None:
        self.by_module: dict[int, tuple[nn.Module, dict[str, tuple[Any, SourceLine | None]]]] = {}
        self.made: dict[int, nn.Module] = {}  # by the forward itself, such as a loss of its own at each call

    def note(self, module: nn.Module, name: str) -> None:
        """Keeps the first read of `name`; modules are kept alive, so that their identities stay their own."""
        found = self.by_module.get(id(module))
        if found is None:
            found = self.by_module[id(module)] = module, {}
        if name not in found[1] and name not in REGISTRIES:
            attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
            found[1][name] = attributes.get(name, MISSING), user_line()

    def note_all(self, module: nn.Module) -> None:
        """Notes a read of everything that `module` holds itself, wherever that was."""
        _, names = self.by_module.setdefault(id(module), (module, {}))
        for name, value in vars(module).items():
            if name not in REGISTRIES:
                names.setdefault(name, (value, None))


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
        self._start = {(id(variable.holder), variable.name): variable.now() for variable in variables}
        self._reads = _Reads()

    @contextmanager
    def reading(self, instead: Mapping[tuple[int, str], Any]) -> Generator[None]:
        """Notes what this thread reads from modules, through a hook in `nn.Module` that is there for the body only.

        Classes with an attribute lookup of their own are taken to read everything.

        Args:
            instead: What the thread finds in place of attributes, by module's identity and name; not noted.
        """
        reads, initialize = self._reads, original_of(nn.Module, "__init__")
        for module in self._model.modules():
            kinds = (k for k in type(module).__mro__ if k is not nn.Module and "__getattribute__" in vars(k))
            if next(kinds) is not object:
                reads.note_all(module)

        def look_up(module: Any, name: str) -> Any:
            if name == "__dict__":
                # Torch looks into it for every parameter; anybody else may see all that is in it.
                file = sys._getframe(2).f_code.co_filename  # pyright: ignore[reportPrivateUsage]
                if file != _TORCH_MODULE_FILE and not file.startswith(OURS):
                    reads.note_all(module)
            elif instead and (id(module), name) in instead:
                return instead[id(module), name]
            else:
                reads.note(module, name)
            return object.__getattribute__(module, name)

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            reads.made[id(module)] = module
            initialize(module, *args, **kwargs)

        with replaced_here(nn.Module, "__getattribute__", look_up), replaced_here(nn.Module, "__init__", init):
            yield

    def assumptions(self, constants: Iterable[torch.Tensor]) -> Assumptions:
        """Returns what was assumed, once the modules are again as they were; `constants` are those of the graph."""
        keeper, paths = Keeper({id(t) for t in constants}), {id(node.module()): node.path for node in self._tree.nodes}
        values: list[Assumption] = []
        unset: list[Unset] = []
        of_classes: dict[tuple[type, str], SourceLine | None] = {}
        read: dict[type, set[str]] = {}
        for module, names in self._reads.by_module.values():
            if id(module) in self._opaque:
                continue
            path = paths.get(id(module), type(module).__qualname__)
            read.setdefault(type(module), set()).update(names)
            missing = {name: source for name, (value, source) in names.items() if value is MISSING}
            # What the forward makes anew at each call has nothing that was there before.
            if id(module) not in self._reads.made:
                values += self._of_module(keeper, module, names, path, is_inside=id(module) in paths)
                unset.append(Unset(path, weakref.ref(module), frozenset(missing)))
            for name, source in missing.items():
                of_classes.setdefault((type(module), name), source)
        values += _of_classes(keeper, of_classes)
        of_code = NamedVariables(self._model, read, without=self._without)
        values += [Assumption(v, keeper.keep(self._start.get((id(v.holder), v.name), v.now()))) for v in of_code.found]
        found = Assumptions(
            tuple(values), tuple(unset), self._tree, tuple(sorted({variable.path for variable in of_code.skipped}))
        )
        _warn_of_iterators(found)
        return found

    def _of_module(
        self,
        keeper: Keeper,
        module: nn.Module,
        names: Mapping[str, tuple[Any, SourceLine | None]],
        path: str,
        *,
        is_inside: bool,
    ) -> Iterator[Assumption]:
        own, ref = vars(module), weakref.ref(module)
        for name, (value, source) in names.items():
            # A value that the forward had set before it read it says nothing about the start.
            was_there = name in own and value is own[name]
            if was_there and not (name == "training" and is_inside):
                yield Assumption(Named(f"{path}.{name}", ref, name, line=source), keeper.keep(own[name]))


def _of_classes(keeper: Keeper, found: Mapping[tuple[type, str], SourceLine | None]) -> Iterator[Assumption]:
    for (kind, name), source in found.items():
        place = Named(f"{kind.__qualname__}.{name}", kind, name, line=source)
        value = place.now()
        if value is MISSING or value is not vars(nn.Module).get(name):
            yield Assumption(place, keeper.keep(value))


def _warn_of_iterators(assumptions: Assumptions) -> None:
    if (iterator := next(assumptions.iterators(), None)) is not None:
        warnings.warn(
            f"the forward may read an iterator, {iterator}, and the numbers may be others than eager's.\n"
            "  A capture runs Python code a few times, which takes items, and later steps don't run it.\n"
            "  Take the item before the call, and give it to the model as an argument or an attribute.",
            UnwatchedWarning,
            stacklevel=2,
        )
