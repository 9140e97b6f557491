"""Captures and programs of the models of tests/models.py, made once in a process, for tests that only read them.

And what is found out of optimizers, likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch

from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.optim import need
from megatrain.optim.need import Updated
from megatrain.passes import kept_results
from megatrain.passes.measure import KnownCosts
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program
from megatrain.planning import step_programs as lowering
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule, is_same_capture
from tests.models import MODELS


@functools.cache
def traced(name: str) -> TracedModule:
    """The capture of `MODELS[name]()`; its state is that of a model that nobody trains."""
    return trace(*MODELS[name]())


@functools.cache
def program(name: str) -> Program:
    """That capture, lowered with default options."""
    return lower(traced(name))


LOWERED_ANEW = lowering.lowered
"""For a test that breaks a pass, in a file where others share programs."""

Lowered = dict[tuple[object, ...], list[tuple[TracedModule, Program]]]
"""Programs with their captures, by the model's name and the options."""

COSTS: dict[int, KnownCosts] = {}
"""Costs of the templates of all captures, by what counts as worth keeping, which a fixture changes."""

OF_MANY_FILES: Lowered = {}
"""Of the models of tests/models.py, which the tests of the runtime and of training compile in many ways."""


@contextmanager
def lowered_once(known: Lowered | None = None) -> Generator[None]:
    """While it is open, captures that are the same share a program, as those of one compiled module always do.

    Others share the costs of equal templates. Compiling spends most of its time on lowering. A test that breaks a pass,
    or a part of one, takes `LOWERED_ANEW`.
    """
    real, known = LOWERED_ANEW, {} if known is None else known

    def lowered(
        traced: TracedModule, options: Any, more: Any = None, after_pass: Any = None, costs: Any = None
    ) -> Program:
        key = (traced.name, options.block_bytes, options.passes, options.chunking, str(more), options.device.alignment)
        made = known.setdefault(key, [])
        for other, program in made if after_pass is None else ():
            if is_same_capture(other, traced):
                return program
        costs = COSTS.setdefault(kept_results.LEAST_FLOPS_PER_BYTE, KnownCosts())
        made.append((traced, real(traced, options, more, after_pass, costs)))
        return made[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "lowered", lowered)
        yield


@contextmanager
def rehearsed_once() -> Generator[None]:
    """While it is open, what a new optimizer of torch's own needs is found out once for equal parameters and options.

    Each training step otherwise has the optimizer take steps on stand-ins. Not for tests of what it needs.
    """
    known: dict[Hashable, Any] = {}

    def once(real: Callable[..., Any]) -> Callable[..., Any]:
        def found(optimizer: torch.optim.Optimizer, *members: Sequence[Updated]) -> Any:
            if optimizer.state or not type(optimizer).__module__.startswith("torch.optim"):
                return real(optimizer, *members)
            kinds = [(m.spec, m.master, [m.parameter is p for p in parameters_of(optimizer)]) for m in chain(*members)]
            groups = [
                {**group, "params": [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            key = real, type(optimizer), repr(groups), repr(kinds)
            if key not in known:
                known[key] = real(optimizer, *members)
            return known[key]

        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(need, "_step_on_stand_ins", once(need._step_on_stand_ins))
        yield
