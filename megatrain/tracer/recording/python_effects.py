"""Effects: what a forward changed in Python state, told apart by whose code did it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from megatrain.errors import TraceError
from megatrain.tracer.python.names import Outer
from megatrain.tracer.python.python_values import GeneratorState, ModuleClass, Named, ObjectSlots, leaves_of
from megatrain.tracer.python.snapshot import Change, Snapshot
from megatrain.tracer.recording.obstacles import OBSERVE, RUN_AGAIN, USE_VALUES, Attempt, HookSite, Obstacle
from megatrain.tracer.recording.recorder import Recorder


class PythonEffects:
    """Judges what a model's forward has changed.

    Snapshot:
        changed_by: The captured hook that changed something, by `Change.where`.
    """

    def __init__(self, model: nn.Module, attempt: Attempt, outer: Outer) -> None:
        self._model = model
        self._attempt = attempt
        self._outer = outer
        self._of_hooks = {id(holder) for _, holder in outer.objects}
        self.changed_by: dict[Any, HookSite] = {}

    def now(self) -> Snapshot:
        """Reads all that may change."""
        return Snapshot(self._model, self._outer)

    def own(self, changes: Iterable[Change], recorder: Recorder) -> list[Change]:
        """Lists which changes are the captured code's, not those of code that runs again at each step.

        Raises:
            TraceError: If both changed one list or set: their turns would be lost.
        """
        theirs = recorder.changed_by_users
        changes = [change for change in changes if not self._is_opaque(change)]
        holders = {change.where[0] for change in changes if change.where in theirs}
        own = [change for change in changes if change.where not in theirs]
        for change in own:
            if change.where[0] in holders and not isinstance(change.holder, dict | ObjectSlots):
                raise TraceError(
                    f"`{change.name}` is changed both by captured code and by code that runs again at each step.\n"
                    "  The order of the two kinds of changes to one list or set would be lost.\n"
                    "  Use a separate list for each."
                )
        return own

    def refuse_unregistered(self, changes: Iterable[Change]) -> None:
        """Refuses a forward that leaves a module with another class, or without one of its parameters.

        What is back at the end of the forward (a parametrization that it removes) has only made other calls.
        """
        for change in changes:
            is_class = isinstance(change.holder, ModuleClass)
            is_gone = change.place.labels == (("_parameters", 0),) and change.now is None
            if (is_class or is_gone) and not self._is_opaque(change):
                name = change.name.replace("_parameters.", "").removesuffix("__class__").rstrip(".") or "the model"
                what = (
                    f"of class {type(change.holder.module).__qualname__}"
                    if is_class
                    else "not a parameter of its module"
                )
                raise TraceError(
                    f"after the forward, `{name}` is {what}.\n"
                    "  Parameters stay in host memory, under the names that they have before the first call.\n"
                    "  Register a parametrization before the first call, or remove it in the same forward."
                )

    def refuse_any(self, changes: Iterable[Change]) -> None:
        """Raises the obstacle for the first of `changes`, which a graph would freeze."""
        for change in changes:
            self._refuse(change)

    def _refuse(self, change: Change) -> NoReturn:
        root = change.place.root
        kind = "global variable" if isinstance(root, Named) else "Python attribute"
        draws = isinstance(change.holder, GeneratorState)
        does = "draws from" if draws else "changes"
        now = "" if draws else f" (now {change.now!r})"
        raise Obstacle(
            f"{does} the {kind} `{change.name}`{now} in its forward",
            "A capture would keep its first value in every call.",
            "Draw with torch from the default generator." if draws else "Keep counters in a buffer.",
            remedy=RUN_AGAIN,
            place=root.source if isinstance(root, Named) else None,
            calls=self._calls_of(change),
        )

    def _is_opaque(self, change: Change) -> bool:
        is_outer = isinstance(change.place.root, Named) or id(change.place.root) in self._of_hooks
        return not is_outer and self._attempt.runs_again(change.name)

    def _calls_of(self, change: Change) -> tuple[str, ...]:
        """Names the modules around the code that changed something, outermost first."""
        site = self.changed_by.get(change.where)
        if site is not None:
            return _path(site[0])
        names = {name: module for name, module in self._model.named_modules()}
        if isinstance(change.place.root, Named):
            return _path(_module_that_names(change.place.root, names))
        return tuple(p for p in _path(change.name)[:-1] if p in names)


def _module_that_names(variable: Named, modules: Mapping[str, nn.Module]) -> str:
    for name, module in modules.items():
        methods = (value for kind in type(module).__mro__ for value in vars(kind).values())
        if any(getattr(method, "__code__", None) is variable.code for method in methods):
            return name
    return ""


def _path(name: str) -> tuple[str, ...]:
    """Names everything on the way to a module or attribute, and itself, outermost first."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:i]) for i in range(len(parts) + 1))


_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")


def running_hooks(model: nn.Module, attempt: Attempt) -> set[int]:
    """Returns the identities of the forward hooks that run by their own code at each step."""
    return {
        id(hook)
        for name, module in model.named_modules()
        for kind in _REGISTRIES
        for key, hook in vars(module)[kind].items()
        if attempt.runs_again(name) or (name, kind, key) in attempt.observed
    }


class Hooks:
    """The user's hooks in one run of a capture.

    A hook that returns nothing, and leaves something that has no history and that nothing else in the model
    reads, is better run by its own code at each step: a graph would have to be captured anew for each state that it
    finds. It stays in the graph as an observer. All other hooks are captured like the rest of the forward.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, attempt: Attempt, outer: Outer) -> None:
        self._model = model
        self._recorder = recorder
        self._attempt = attempt
        self._outer = outer
        self._hooks: dict[HookSite, Any] = {}
        self._others: frozenset[Any] = frozenset()
        self._busy: set[HookSite] = set()
        self._returning: set[HookSite] = set()
        self.changed_by: dict[tuple[Any, Any], HookSite] = {}

    @contextmanager
    def followed(self) -> Generator[None]:
        """Puts a function around each hook, for the body."""
        put: list[tuple[dict[Any, Any], Any, Any, Any]] = []

        def wrap(sites: Iterable[tuple[HookSite, dict[Any, Any], nn.Module]]) -> None:
            for site, registry, module in sites:
                hook = self._hooks[site] = registry[site[2]]
                wrapper = registry[site[2]] = self._wrapped(site, module, hook)
                put.append((registry, site[2], hook, wrapper))

        sites = [
            ((name, kind, key), vars(module)[kind], module)
            for name, module in self._model.named_modules()
            if not self._attempt.runs_again(name)
            for kind in _REGISTRIES
            for key in vars(module)[kind]
        ]
        try:
            if self._attempt.observed:
                running = running_hooks(self._model, self._attempt)
                wrap(found for found in sites if found[0] in self._attempt.observed)
                self._others = Snapshot(self._model, Outer.of(self._model, without=running)).holders
            wrap(found for found in sites if found[0] not in self._attempt.observed)
            yield
        finally:
            for registry, key, hook, wrapper in put:
                if registry.get(key) is wrapper:
                    registry[key] = hook

    def check(self) -> None:
        """Asks for an attempt in which hooks that keep books of their own are observers."""
        busy = self._busy - self._returning
        if busy:
            sites = self._alike(busy) - self._attempt.kept - self._returning
            raise Obstacle(
                f"has forward hooks that change Python state, first on `{min(busy)[0] or 'the model'}`,",
                "A capture would repeat the values that they leave.",
                "Return the collected values from the model.",
                remedy=OBSERVE,
                hooks=sites,
            )

    def _wrapped(self, site: HookSite, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = Snapshot(module, self._outer)
            try:
                if site in self._attempt.observed:
                    self._recorder.record_hook(site, self._alike({site}), module, hook, (args, kwargs))
                    self._check_observed(site, before.changes())
                    return None
                result = hook(module, *args, **kwargs)
            except Obstacle as obstacle:
                if obstacle.remedy in (USE_VALUES, RUN_AGAIN) and not obstacle.hooks:
                    obstacle.hooks = self._alike({site})
                if site[0] not in obstacle.calls:
                    obstacle.calls = (*obstacle.calls, site[0])
                raise
            self._note(site, before.changes(), result)
            return result

        return run

    def _check_observed(self, site: HookSite, changes: list[Change]) -> None:
        self._recorder.changed_by_users.update(c.where for c in changes)
        shared = [c for c in changes if c.where[0] in self._others]
        if shared or any(_has_history(c.now) for c in changes):
            raise Obstacle(
                f"has a forward hook on `{site[0] or 'the model'}` whose Python state matters to the graph",
                "The values that the hook leaves are read elsewhere in the model, or have a history.",
                "Return these values from the model.",
                remedy=RUN_AGAIN,
                hooks=self._alike({site}),
            )

    def _alike(self, sites: Iterable[HookSite]) -> frozenset[HookSite]:
        """Adds the hooks that are the same function, for other modules."""
        alike = {_code(self._hooks[site]) for site in sites}
        return frozenset(site for site, hook in self._hooks.items() if _code(hook) in alike)

    def _note(self, site: HookSite, changes: list[Change], result: Any) -> None:
        self.changed_by.update({c.where: site for c in changes})
        if result is not None:
            self._returning.add(site)
        elif changes and site not in self._attempt.kept and not any(_has_history(c.now) for c in changes):
            self._busy.add(site)


def _has_history(value: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves_of(value))


def _code(hook: Any) -> Any:
    """What tells hooks apart that do the same for several modules: their function, or their class."""
    function = getattr(hook, "func", None) or getattr(hook, "__func__", None) or hook
    return getattr(function, "__code__", None) or type(hook)
