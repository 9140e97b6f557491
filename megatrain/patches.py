"""Replaces a method or function of torch for one thread; every other thread goes on with the original."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

_MISSING = object()
_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Patch:
    """A function that stands in `owner` while any thread has a replacement for it.

    Args:
        original: What a lookup of the name gives without the patch.
        own: What `owner` itself holds under the name, or nothing if it inherits the name.
        by_thread: The replacements.
    """

    original: Callable[..., Any]
    own: Any
    by_thread: dict[int, Callable[..., Any]] = field(default_factory=dict[int, Callable[..., Any]])
    installed: Callable[..., Any] | None = None


_patches: dict[tuple[int, str], _Patch] = {}


@contextmanager
def replaced_here(owner: Any, name: str, replacement: Callable[..., Any]) -> Generator[None]:
    """Has this thread find `replacement` instead of `owner.name` for the body.

    The owner is changed once, for all threads: what stands there asks which thread is calling.

    Args:
        owner: A class or a module.
        name: Of a function or method in it.
        replacement: Called with the same arguments.
    """
    key, thread = (id(owner), name), get_ident()
    with _lock:
        patch = _patches.get(key) or _patches.setdefault(key, _install(owner, name))
        outer = patch.by_thread.get(thread)
        patch.by_thread[thread] = replacement
    try:
        yield
    finally:
        with _lock:
            if outer is not None:
                patch.by_thread[thread] = outer
            else:
                del patch.by_thread[thread]
            if not patch.by_thread:
                del _patches[key]
                _remove(owner, name, patch)


def original_of(owner: Any, name: str) -> Any:
    """Returns what `owner.name` is without the replacements of any thread."""
    with _lock:
        patch = _patches.get((id(owner), name))
        return getattr(owner, name) if patch is None else patch.original


def _install(owner: Any, name: str) -> _Patch:
    patch = _Patch(getattr(owner, name), vars(owner).get(name, _MISSING))
    by_thread, original = patch.by_thread, patch.original

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return by_thread.get(get_ident(), original)(*args, **kwargs)

    patch.installed = chosen
    setattr(owner, name, chosen)
    return patch


def _remove(owner: Any, name: str, patch: _Patch) -> None:
    if vars(owner).get(name) is not patch.installed:
        return  # somebody has put a wrapper around it, which goes on to the original
    if patch.own is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, patch.own)
