"""Follows module calls during a capture, and knows which modules are repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megatrain.tracer.recorder import Recorder
from megatrain.tracer.sandbox import HostRng


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
    repeated = repeated_modules(root)
    calls: Counter[int] = Counter()
    stack = recorder.tape.module_stack

    def enter(module: nn.Module, _: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            stack.append((name, calls[id(module)]))
            calls[id(module)] += 1

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and stack and stack.pop()[0] in repeated:
            recorder.let_go()

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
def opaque_modules(recorder: Recorder, root: nn.Module, opaque: Collection[str]) -> Generator[None]:
    """Makes each call of the modules named in `opaque` one node, hooks on them included."""
    original: Any = nn.Module.__call__
    names = {id(root.get_submodule(name)): name for name in opaque}

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording or id(module) not in names:
            return original(module, *args, **kwargs)
        return recorder.record_module(module, names[id(module)], args, kwargs)

    if not names:
        yield
        return
    nn.Module.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextmanager
def kept_dtypes(recorder: Recorder) -> Generator[None]:
    """Lets modules convert themselves (`self.head.to(x.dtype)`) where that changes nothing."""
    original: Any = nn.Module._apply

    def convert(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if recorder.is_recording or not any(map(recorder.is_state, tensors)):
            return original(module, fn, recurse)
        with recorder.unrecorded():
            changes = any(fn(tensor) is not tensor for tensor in tensors)
        if changes:
            recorder.refuse(
                f"converts the weights of a {type(module).__qualname__}",
                "Weights keep their dtype and their place: they live in host memory, and the device borrows them.",
                "Convert the module before training, or its input in the forward.",
            )
        return module

    nn.Module._apply = convert  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module._apply = original


def with_backward_hooks(root: nn.Module) -> dict[str, str]:
    """Names the modules that carry backward hooks: these see autograd's graph, not the forward."""
    return {
        name: f"has backward hooks on `{name or type(module).__name__}`"
        for name, module in root.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    }


@contextmanager
def host_drawer(root: nn.Module) -> Generator[Callable[[], tuple[str, ...]]]:
    """Looks for the innermost module call that draws from Python's or NumPy's generators; yields the way to ask."""
    names = {id(module): name for name, module in root.named_modules()}
    stack: list[tuple[str, HostRng]] = []
    found: list[tuple[str, ...]] = []

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            stack.append((names[id(module)], HostRng.now()))

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and stack:
            calls = tuple(name for name, _ in stack)
            before = stack.pop()[1]
            if not found and before != HostRng.now():
                found.append(calls)

    handles = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield lambda: found[0] if found else ()
    finally:
        for handle in handles:
            handle.remove()
