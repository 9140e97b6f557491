"""LatestCapture: what a compiled model tells of the capture that its latest call used."""

from __future__ import annotations

from megatrain.compiled.variants import Variant
from megatrain.errors import ExecuteError
from megatrain.passes.program import Program
from megatrain.scheduler.schedule import Schedule
from megatrain.tracer.traced import TracedModule


class LatestCapture:
    """The part of `Compiled` that users look at."""

    def __init__(self) -> None:
        self._latest: Variant | None = None

    @property
    def variant(self) -> Variant:
        """The variant that the latest call used.

        Raises:
            ExecuteError: Before the first call, unless example arguments were given.
        """
        if self._latest is None:
            raise ExecuteError(
                "nothing is compiled yet.\n  A capture needs inputs.\n"
                "  Call the model once, or give compile(example_args=..., example_kwargs=...)."
            )
        return self._latest

    @property
    def traced(self) -> TracedModule:
        """The capture: a flat graph of torch calls."""
        return self.variant.traced

    @property
    def program(self) -> Program:
        """The blocks and their templates."""
        return self.variant.program

    @property
    def schedule(self) -> Schedule:
        """The operations of a call, tick by tick."""
        return self.variant.schedule

    @property
    def guards(self) -> str:
        """Values that the latest call relied on besides its signature: of inputs, attributes, globals; a line each."""
        guards = [f"guard {guard}" for guard in self.traced.guards]
        return "\n".join([*guards, str(self.traced.assumptions)])

    @property
    def recompiled_because(self) -> tuple[str, ...]:
        """Why earlier captures of the same signature didn't fit the latest call, when its capture was made."""
        return self.variant.reasons
