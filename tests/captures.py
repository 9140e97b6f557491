"""Captures and programs of the models of tests/models.py, made once in a process, for tests that only read them."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from megatrain.compiled import variants
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program
from megatrain.tracer.same_capture import is_same_capture
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule
from tests.models import MODELS


@functools.cache
def traced(name: str) -> TracedModule:
    """The capture of `MODELS[name]()`; its state is that of a model that nobody trains."""
    return trace(*MODELS[name]())


@functools.cache
def program(name: str) -> Program:
    """That capture, lowered with default options."""
    return lower(traced(name))


@contextmanager
def lowered_once() -> Generator[None]:
    """While it is open, captures that are the same share a program, as those of one compiled module always do.

    Compiling spends most of its time on lowering. Not for tests that break a pass, or a part of one.
    """
    known: dict[tuple[object, ...], list[tuple[TracedModule, Program]]] = {}
    real = variants.lowered

    def lowered(traced: TracedModule, options: Any, after_pass: Any = None) -> Program:
        made = known.setdefault((traced.name, options.block_bytes, options.passes), [])
        for other, program in made if after_pass is None else ():
            if is_same_capture(other, traced):
                return program
        made.append((traced, real(traced, options, after_pass)))
        return made[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "lowered", lowered)
        yield
