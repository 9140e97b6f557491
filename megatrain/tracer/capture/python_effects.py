"""Effects: what a forward changed in Python state, told apart by whose code did it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import nn

from megatrain.errors import TraceError
from megatrain.tracer.python.contents import GeneratorState, ObjectSlots
from megatrain.tracer.python.holders import Attributes, Change, ModuleClass
from megatrain.tracer.python.named import Named
from megatrain.tracer.python.outer import Outer
from megatrain.tracer.recording.attempt import Attempt
from megatrain.tracer.recording.obstacles import RUN_AGAIN, HookSite, Obstacle
from megatrain.tracer.recording.recorder import Recorder


class PythonEffects:
    """Judges what a model's forward has changed.

    Args:
        model: The model.
        attempt: Which of its code runs again at each step.
        outer: What its code reaches besides its modules.

    Attributes:
        changed_by: The captured hook that changed something, by `Change.where`.
    """

    def __init__(self, model: nn.Module, attempt: Attempt, outer: Outer) -> None:
        self._model = model
        self._attempt = attempt
        self._outer = outer
        self._of_hooks = {id(holder) for _, holder in outer.objects}
        self.changed_by: dict[Any, HookSite] = {}

    def now(self) -> Attributes:
        """Reads all that may change."""
        return Attributes(self._model, self._outer)

    def own(self, start: Attributes, recorder: Recorder) -> list[Change]:
        """Lists what the captured code changed since, not the code that runs again at each step.

        Raises:
            TraceError: If both changed one list or set: their turns would be lost.
        """
        theirs = recorder.changed_by_users
        changes = [change for change in start.changes() if not self._is_opaque(change)]
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

    def refuse_unregistered(self, start: Attributes) -> None:
        """Refuses a forward that leaves a module with another class, or without one of its parameters.

        What is back at the end of the forward (a parametrization that it removes) has only made other calls.

        Raises:
            TraceError: If it does: no later call would begin as this one did.
        """
        for change in start.changes():
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
