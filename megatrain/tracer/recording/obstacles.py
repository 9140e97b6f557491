"""What a capture can't follow, said with the user's line, the rule and the way out; and what it tries next."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import checkpoint

from megatrain.base.torch_private import (
    MODULE_APPLY,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    are_transforms_active,
    pytree,
)
from megatrain.errors import TraceError
from megatrain.tracer.calls import call_name, is_property_get, is_property_set
from megatrain.tracer.recording.effect_watch import has_users_hooks
from megatrain.tracer.source_line import OURS, SourceLine, user_line

REFUSE, USE_VALUES, RUN_AGAIN, FOLLOW_HOST = "refuse", "use values", "run again", "follow host"
OBSERVE = "observe"

HookSite = tuple[str, str, int]
"""A forward hook: its module's name, the registry that holds it, its key there."""


class StartAgainError(Exception):
    """This attempt at a capture is over, and it is known how the next one begins: `changes` are those of `again`."""

    def __init__(self, **changes: Any):
        super().__init__(changes)
        self.changes = changes


# A call in the user's code, wherever it stands in a loop: its line and its name.
Site = tuple[SourceLine | None, str]


class ValuesNeededError(RuntimeError):
    """A call of the model's that we, not torch, refuse on tensors without values."""

    def __init__(self, rule: str, way_out: str = "Load the weights before compiling.") -> None:
        super().__init__(f"{rule}.\n  {way_out}")
        self.rule = rule
        self.way_out = way_out


class Obstacle(TraceError):
    """Something that this attempt at a capture can't follow; raised to the user if no other attempt can.

    Args:
        what: What the model does, for the error and for the printed program.
        remedy: `REFUSE`; `USE_VALUES`: capture on the values of the weights; `RUN_AGAIN`: let the module that does
            it run its own code at each step, opaque to the graph; `FOLLOW_HOST`: find that module first;
            `OBSERVE`: let hooks run their own code at each step, next to the graph.
        calls: Names of the modules whose calls the model was in, outermost first.
        hooks: The forward hooks that it was met in, if any.
    """

    def __init__(
        self,
        what: str,
        rule: str,
        way_out: str,
        *,
        remedy: str = REFUSE,
        place: SourceLine | None = None,
        calls: tuple[str, ...] = (),
        hooks: frozenset[HookSite] = frozenset(),
    ):
        self.reason = f"{what} at {place}" if place is not None else what
        super().__init__(f"the model {self.reason}.\n  {rule}\n  {way_out}")
        self.remedy = remedy
        self.calls = calls
        self.hooks = hooks
        self.lacks_large = False  # whether this attempt has left out large values that may be what is missing
        self.cause: Exception | None = None


def refuse(what: str, rule: str, way_out: str, *, remedy: str = REFUSE) -> NoReturn:
    """Raises the obstacle for something that the model does at the current line."""
    raise Obstacle(what, rule, way_out, remedy=remedy, place=user_line())


def refuse_read(source: SourceLine | None, name: str) -> NoReturn:
    """Raises the obstacle for a value that isn't known before the step."""
    raise Obstacle(
        "reads the value of a tensor",
        f"`{name}` depends on weights or random numbers, which a model on the meta device doesn't have.",
        "Load the weights first; or use torch.where or masking instead of a Python branch.",
        remedy=USE_VALUES,
        place=source,
    )


def refuse_flag(where: str = "") -> NoReturn:
    """Raises the obstacle for a forward that freezes a parameter or begins to train it."""
    refuse(
        f"changes whether a parameter requires a gradient{where}",
        "Which parameters are trained is known before a call: their gradients and updates are planned.",
        "Call requires_grad_() outside the forward.",
    )


def check_strided(result: Any) -> None:
    """Refuses sparse and nested results."""
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and (tensor.layout != torch.strided or tensor.is_nested):
            refuse(
                "makes a sparse or nested tensor",
                "A schedule plans the memory of each value, and that of such a tensor depends on its content.",
                "Make it inside a module of its own, which returns an ordinary tensor.",
                remedy=RUN_AGAIN,
            )


def check_call(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuses calls whose effect no node of a graph can repeat."""
    check_everywhere(func, kwargs)
    name = call_name(func)
    is_leaf = isinstance(args[0], nn.Parameter) if args else False
    if is_property_get(func) and name == "grad_fn" and not is_leaf and not _asks_checkpoint():
        refuse(
            "reads `.grad_fn` of a tensor",
            "A hook on a node of autograd's graph isn't a call on a tensor, so a capture doesn't see it.",
            "Hook the tensor, or the module.",
            remedy=RUN_AGAIN,
        )
    if is_property_set(func) and not _changes_nothing(name, *args):
        refuse(
            f"assigns to `.{name}` of a tensor",
            "A capture sees calls, but not assignments that bypass autograd.",
            "Use an in-place operation under torch.no_grad().",
            remedy=RUN_AGAIN,
        )
    if has_users_hooks():
        refuse(
            "runs under saved_tensors_hooks",
            "The tensors of the backward then depend on Python code that no graph can repeat.",
            "Change saved tensors in a torch.autograd.Function instead.",
            remedy=RUN_AGAIN,
        )
    check_transforms()


def _asks_checkpoint() -> bool:
    """Tells whether torch's checkpointing asks: of a tensor of its own, whether anything in it needs a gradient."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == checkpoint.__file__


def _changes_nothing(name: str, tensor: torch.Tensor, value: Any) -> bool:
    """Tells whether an assignment to a property leaves everything as it is."""
    if name == "_backward_hooks":  # torch clears those of a tensor that an autograd.Function has written
        return value is None and not tensor._backward_hooks  # pyright: ignore[reportPrivateUsage]
    return (name == "data" and value is tensor) or (name == "requires_grad" and value == tensor.requires_grad)


def check_transforms() -> None:
    """Refuses what runs inside a transform of torch.func."""
    if are_transforms_active():
        refuse(
            "uses a transform of torch.func",
            "Calls inside a transform run on wrapped tensors that no graph can name.",
            "Write the batched computation out, or put it into a torch.library.custom_op.",
            remedy=RUN_AGAIN,
        )


def check_everywhere(func: Any, kwargs: dict[str, Any]) -> None:
    """Refuses calls that have no meaning in a step, neither in a graph nor in a module that runs again."""
    if is_property_get(func) and call_name(func) == "grad" and not _is_applied():
        refuse(
            "reads `.grad` of a tensor",
            "Gradients are not part of the captured forward.",
            "Read gradients after the backward, outside the model.",
        )
    if kwargs.get("generator") is not None:
        refuse(
            "draws from a generator of its own",
            "A recompute restores only the default generators.",
            "Draw from the default generator.",
        )


def _is_applied() -> bool:
    """Tells whether `Module.to` and the like ask: they treat a gradient as they treat the parameter."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not MODULE_APPLY.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def unprinted_failures() -> Generator[None]:
    """Keeps exceptions of fake kernels that torch logs in this thread from being printed: the caller gets past them."""
    log, thread = logging.getLogger(FakeTensor.__module__), get_ident()

    def note(record: logging.LogRecord) -> bool:
        return record.exc_info is None or get_ident() != thread

    log.addFilter(note)
    try:
        yield
    finally:
        log.removeFilter(note)


def call_on_fakes(func: Any, args: Any, kwargs: Any, line: SourceLine | None, name: str) -> Any:
    """Calls `func` on fake tensors.

    Usually an error is the model's own mistake. But some rules refuse what their kernels accept, with any type
    of error, and only a call on values can tell.

    Raises:
        Obstacle: With the error as its `cause`, noting that the call ran without data; without a cause if we refused.
    """
    try:
        with unprinted_failures():
            return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        refuse_read(line, name)
    except (TraceError, StartAgainError):
        raise
    except Exception as error:
        is_ours = isinstance(error, ValuesNeededError)
        rule, way_out = (
            (error.rule + ".", error.way_out) if is_ours else (str(error), "Load the weights before compiling.")
        )
        obstacle = Obstacle(
            f"calls `{name}`, which fails on tensors without values", rule, way_out, remedy=USE_VALUES, place=line
        )
        if not is_ours:
            error.add_note(f"`{name}` was captured on fake tensors, at {line}")
            obstacle.cause = error
        raise obstacle from error


_AS_IN_EAGER = (
    "The forward reads values of its weights and differentiates inside itself.\n"
    "  Its capture takes the device memory that the forward takes in eager, all weights included.\n"
    "  Make the first call with a smaller batch, or compute the gradient outside the model."
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a capture treats the model.

    Args:
        make_fake: Calls whose results are fake although they could be computed from inputs alone.
        uses_values: Runs on the values of the weights instead of fake ones.
        keeps_saved: On values, keeps what autograd saves for a backward, because the forward itself differentiates.
        computes_large: Runs calls on inputs alone for real even if their results are very large.
        opaque: Modules that run their own code at each step, with the reason; by name.
        follows_host: Looks for the module that draws from Python's or NumPy's generators.
        observed: Forward hooks that run by their own code at each step, next to the graph.
        kept: Forward hooks that can't: they are captured.
        follows_reads: Follows the numbers that Python reads from tensors of one element; with `uses_values`.
        recalls: Makes the results of a call from those of an equal one; see `Recall`.
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
    recalls: bool = True

    def runs_again(self, name: str) -> bool:
        """Tells whether a module, or an attribute of one, belongs to an opaque module."""
        return any(not module or name == module or name.startswith(f"{module}.") for module in self.opaque)

    def again(self, **changes: Any) -> Attempt:
        """Returns the attempt with other values of some fields; a set is added to the one that is there."""
        for name, value in changes.items():
            if isinstance(value, frozenset):
                changes[name] = getattr(self, name) | value
        following = replace(self, **changes)
        assert following != self, f"an attempt asks for what it has: {', '.join(changes)}"
        return following

    def note_memory(self, error: torch.OutOfMemoryError) -> None:
        """Notes on an error of the device's memory why this attempt takes more of it than others."""
        if self.keeps_saved:
            error.add_note(_AS_IN_EAGER)

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
