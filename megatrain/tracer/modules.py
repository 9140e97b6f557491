"""Follows module calls during a capture, and knows which modules are repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import autograd, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from megatrain.tracer.recorder import Recorder


def repeated_modules(root: nn.Module) -> frozenset[str]:
    """Returns the names of modules that stand twice or more, by class, in one ModuleList or Sequential."""
    found: set[str] = set()
    for prefix, container in root.named_modules(remove_duplicate=False):
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        counts = Counter(type(child) for child in container.children())
        # Not `children()`, which lists a module that stands twice only once.
        distinct = Counter(map(type, container._modules.values()))
        for name, child in container.named_children():
            if max(counts[type(child)], distinct[type(child)]) > 1:
                found.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(found)


@contextmanager
def followed_modules(recorder: Recorder, root: nn.Module) -> Generator[None]:
    """Keeps `recorder.module_stack` equal to the calls that the running code is in."""
    names = {id(module): name for name, module in reversed(list(root.named_modules()))}
    calls: Counter[int] = Counter()

    def enter(module: nn.Module, _: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            recorder.module_stack.append((name, calls[id(module)]))
            calls[id(module)] += 1

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and recorder.module_stack:
            recorder.module_stack.pop()

    handles = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_functions(recorder: Recorder) -> Generator[None]:
    """Makes `autograd.Function.apply` one node each, so that the user's own backward is kept.

    No torch-function mode sees `apply`; without this its forward would be recorded and its backward lost.
    """
    original: Any = autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        if recorder.is_recording:
            return bound(*args, **kwargs)
        if cls is CheckpointFunction:
            # A reentrant checkpoint hides the parameters of what it runs; blocks are recomputed anyway.
            function, _, *rest = args
            return function(*rest)
        with recorder.paused():
            return recorder.record(bound, args, kwargs)

    autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        autograd.Function.apply = original
