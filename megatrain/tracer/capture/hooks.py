"""Follows the user's forward hooks during a capture: some compute, and some only look and keep books."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatrain.tracer.python.contents import leaves_of
from megatrain.tracer.python.holders import Attributes, Change
from megatrain.tracer.python.outer import Outer
from megatrain.tracer.recording.attempt import Attempt
from megatrain.tracer.recording.obstacles import OBSERVE, RUN_AGAIN, USE_VALUES, HookSite, Obstacle
from megatrain.tracer.recording.recorder import Recorder

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

    A hook that returns nothing, and leaves something behind that has no history and that nothing else in the model
    reads, is better run by its own code at each step: a graph would have to be captured anew for each state that it
    finds. It stays in the graph as an observer. All other hooks are captured like the rest of the forward.

    Args:
        model: The model.
        recorder: Of this run.
        attempt: What this run may do.
        outer: What the model's code reaches besides its modules.
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
                wrap(found for found in sites if found[0] in self._attempt.observed)
                mine = {id(hook) for hook in self._hooks.values()}
                self._others = Attributes(self._model, Outer.of(self._model, without=mine)).holders
            wrap(found for found in sites if found[0] not in self._attempt.observed)
            yield
        finally:
            for registry, key, hook, wrapper in put:
                if registry.get(key) is wrapper:
                    registry[key] = hook

    def check(self) -> None:
        """Asks for an attempt in which hooks that keep books of their own are observers.

        Raises:
            Obstacle: If there are any.
        """
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
            before = Attributes(module, self._outer)
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
