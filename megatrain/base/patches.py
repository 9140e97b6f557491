"""Replaces a method or function for one thread; every other thread keeps using the original. Notices its imports."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType
from typing import Any

_MISSING = object()
_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Patch:
    """A function that stands in `owner` while any thread has a replacement for it.

    Args:
        original: The result of a lookup of the name without the patch.
        own: The object that `owner` itself holds under the name, or nothing if it inherits the name.
        by_thread: The replacements.
        elsewhere: The object for all other threads: the original, unless one thread hides something from them.
    """

    original: Callable[..., Any]
    own: Any
    by_thread: dict[int, Callable[..., Any]] = field(default_factory=dict[int, Callable[..., Any]])
    elsewhere: Callable[..., Any] | None = None
    installed: Callable[..., Any] | None = None


_patches: dict[tuple[int, str], _Patch] = {}


@contextmanager
def replaced_here(owner: Any, name: str, replacement: Callable[..., Any]) -> Generator[None]:
    """Makes this thread find `replacement` instead of `owner.name` during the body.

    The owner is changed once, for all threads: the new attribute asks which thread is calling.

    Args:
        owner: A class or a module.
        name: Of a function or method in it.
        replacement: Called with the same arguments.
    """
    thread = get_ident()
    with _lock:
        patch = _installed(owner, name)
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
            _remove_unused(owner, name, patch)


@contextmanager
def replaced_elsewhere(
    owner: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Generator[None]:
    """Makes all other threads find another object as `owner.name` during the body; one thread at a time may do so.

    Args:
        owner: A class or a module.
        name: Of a function or method in it.
        replacement: Makes the new object from the former one.
    """
    with replaced_here(owner, name, original_of(owner, name)):
        with _lock:
            patch = _patches[id(owner), name]
            before = patch.elsewhere
            patch.elsewhere = replacement(before or patch.original)
        try:
            yield
        finally:
            with _lock:
                patch.elsewhere = before


def original_of(owner: Any, name: str) -> Any:
    """Returns the original of `owner.name` for this thread, for a call from a replacement."""
    with _lock:
        patch = _patches.get((id(owner), name))
        return _looked_up(owner, name) if patch is None else patch.by_thread.get(get_ident(), patch.original)


def _looked_up(owner: Any, name: str) -> Any:
    """What code in a module, or code that asks a class, finds under a name."""
    return (
        getattr(owner, name) if not isinstance(owner, ModuleType) or hasattr(owner, name) else getattr(builtins, name)
    )


def _installed(owner: Any, name: str) -> _Patch:
    patch = _patches.get((id(owner), name))
    if patch is not None:
        return patch
    patch = _patches[id(owner), name] = _Patch(_looked_up(owner, name), vars(owner).get(name, _MISSING))
    by_thread, original = patch.by_thread, patch.original

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (by_thread.get(get_ident()) or patch.elsewhere or original)(*args, **kwargs)

    patch.installed = chosen
    setattr(owner, name, chosen)
    return patch


def _remove_unused(owner: Any, name: str, patch: _Patch) -> None:
    if patch.by_thread:
        return
    del _patches[id(owner), name]
    if vars(owner).get(name) is not patch.installed:
        return  # somebody has put a wrapper around it, which goes on to the original
    if patch.own is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, patch.own)


class _Noticing(MetaPathFinder):
    """Finds modules of a package as all other finders do, and has something called once each of them has been read."""

    def __init__(self, package: str, then: Callable[[], object]):
        self._package, self._then = package, then
        self._thread = get_ident()
        self._is_asking = False
        self.is_over = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_meant = get_ident() == self._thread and fullname.partition(".")[0] == self._package
        if self._is_asking or not is_meant:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            read = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                read(module)
                if not self.is_over:
                    self._then()

            loader.exec_module = exec_module
        return spec


@contextmanager
def noticed_imports(package: str, then: Callable[[], object]) -> Generator[None]:
    """Has something called whenever this thread has read another module of a package for the first time, in the body.

    What is imported already costs nothing: an import of it asks no finder.

    Args:
        package: The first part of the modules' names.
        then: Called after each of them.
    """
    finder = _Noticing(package, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.is_over = True
        sys.meta_path.remove(finder)
