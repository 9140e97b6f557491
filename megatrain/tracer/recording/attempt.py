"""Attempt: what one run of a capture may do, and which attempt follows a failed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatrain.tracer.recording.obstacles import (
    FOLLOW_HOST,
    OBSERVE,
    RUN_AGAIN,
    USE_VALUES,
    HookSite,
    Obstacle,
    StartAgainError,
)
from megatrain.tracer.source_line import SourceLine

_AS_IN_EAGER = (
    "The forward reads values of its weights and differentiates inside itself.\n"
    "  Its capture takes the device memory that the forward takes in eager, all weights included.\n"
    "  Make the first call with a smaller batch, or compute the gradient outside the model."
)

# A call in the user's code, wherever it stands in a loop: its line and its name.
Site = tuple[SourceLine | None, str]


class MakeFakeError(StartAgainError):
    """A real tensor is written into; the capture starts again with the outputs of this call fake."""

    def __init__(self, site: Site):
        super().__init__(site)
        self.site = site


class WrittenInputError(StartAgainError):
    """The model writes into an input; the capture starts again with a copy of it, written back after each call."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class NeedSavedError(StartAgainError):
    """A call needs what autograd saved in an earlier one; the capture starts again and keeps it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a capture treats the model.

    Args:
        make_fake: Calls whose results are fake although they could be computed from inputs alone.
        written_inputs: Names of the inputs that the model writes into.
        uses_values: Runs on the values of the weights instead of fake ones.
        keeps_saved: On values, keeps what autograd saves for a backward, because the forward itself differentiates.
        computes_large: Runs calls on inputs alone for real even if their results are very large.
        opaque: Modules that run their own code at each step, with the reason; by name.
        follows_host: Looks for the module that draws from Python's or NumPy's generators.
        observed: Forward hooks that run by their own code at each step, beside the graph.
        kept: Forward hooks that can't: they are captured.
        follows_reads: Follows the numbers that Python reads from tensors of one element; with `uses_values`.
    """

    make_fake: frozenset[Site] = frozenset()
    written_inputs: frozenset[str] = frozenset()
    uses_values: bool = False
    keeps_saved: bool = False
    computes_large: bool = False
    opaque: Mapping[str, str] = field(default_factory=dict[str, str])
    follows_host: bool = False
    observed: frozenset[HookSite] = frozenset()
    kept: frozenset[HookSite] = frozenset()
    follows_reads: bool = False

    def runs_again(self, name: str) -> bool:
        """Tells whether a module, or an attribute of one, belongs to an opaque module."""
        return any(not module or name == module or name.startswith(f"{module}.") for module in self.opaque)

    def after_write(self, error: MakeFakeError) -> Attempt:
        """Returns the attempt that follows a write into a tensor that was taken for known."""
        assert error.site not in self.make_fake, "a call that was made fake gave real tensors"
        return replace(self, make_fake=self.make_fake | {error.site})

    def with_written_input(self, error: WrittenInputError) -> Attempt:
        """Returns the attempt that follows a write into an input."""
        assert error.name not in self.written_inputs, "a copy of an input was taken for the input"
        return replace(self, written_inputs=self.written_inputs | {error.name})

    def again(self, error: StartAgainError) -> Attempt:
        """Returns the attempt that follows an error which asks for another."""
        match error:
            case MakeFakeError():
                return self.after_write(error)
            case WrittenInputError():
                return self.with_written_input(error)
            case _:
                return self.with_saved()

    def note_memory(self, error: torch.OutOfMemoryError) -> None:
        """Notes on an error of the device's memory why this attempt takes more of it than others."""
        if self.keeps_saved:
            error.add_note(_AS_IN_EAGER)

    def with_saved(self) -> Attempt:
        """Returns the attempt that follows a call which needs what autograd saved."""
        assert not self.keeps_saved, "what autograd saved was thrown away although it is needed"
        return replace(self, keeps_saved=True)

    def after(self, obstacle: Obstacle, model: nn.Module) -> Attempt | None:
        """Returns the attempt that may get past an obstacle in `model`, or None if there is none."""
        following = self._with_hooks(obstacle)
        if following is not None:
            return following
        if obstacle.remedy == USE_VALUES and obstacle.lacks_large and not self.computes_large:
            return replace(self, computes_large=True)
        if obstacle.remedy == USE_VALUES and not self.uses_values and _has_values(model):
            return replace(self, uses_values=True)
        if obstacle.remedy == FOLLOW_HOST and not self.follows_host:
            return replace(self, follows_host=True)
        if obstacle.remedy == RUN_AGAIN:
            return self.with_opaque(obstacle.calls, obstacle.reason, model)
        return None

    def _with_hooks(self, obstacle: Obstacle) -> Attempt | None:
        """Returns the attempt that treats the hooks that an obstacle is about in another way, or None."""
        if obstacle.remedy not in (OBSERVE, USE_VALUES, RUN_AGAIN):
            return None
        fresh = obstacle.hooks - self.observed - self.kept
        if fresh:
            return replace(self, observed=self.observed | fresh)
        given_up = obstacle.hooks & self.observed if obstacle.remedy == RUN_AGAIN else frozenset[HookSite]()
        return replace(self, observed=self.observed - given_up, kept=self.kept | given_up) if given_up else None

    def with_opaque(self, calls: Sequence[str], reason: str, model: nn.Module) -> Attempt | None:
        """Makes the innermost of `calls` opaque that isn't yet, with the modules that run the same code."""
        name = next((name for name in reversed(calls) if name not in self.opaque), None)
        if name is None:
            return None
        return replace(self, opaque={**self.opaque, **dict.fromkeys(_of_one_class(model, name), reason)})


def _has_values(model: nn.Module) -> bool:
    return not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def _of_one_class(model: nn.Module, name: str) -> list[str]:
    """Lists the modules of a user's class: each would meet the same obstacle, and cost an attempt of its own."""
    kind = type(model.get_submodule(name))
    if not name or kind.__module__.partition(".")[0] == "torch":
        return [name]
    return [other for other, module in model.named_modules() if type(module) is kind]
