"""Variant: one capture of a model with its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.passes.program import Program
from megatrain.runtime.executor import Executor
from megatrain.scheduler.table import Schedule
from megatrain.tracer.guards import GuardCheck
from megatrain.tracer.opaque import Opaque
from megatrain.tracer.traced import TracedModule

# Paths through one signature's checks in mid-step that are kept as graphs of their own.
MOST_PATHS = 8


@dataclass(slots=True, eq=False)
class Variant:
    """One capture of the model, for one signature of inputs, with its schedule."""

    traced: TracedModule
    program: Program
    schedule: Schedule
    guards: GuardCheck
    executor: Executor | None = None

    @property
    def opaque(self) -> tuple[Opaque, ...]:
        """Modules that run their own code at each step."""
        return self.program.opaque_calls
