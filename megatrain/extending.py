"""Your own kinds of ops: a row of the table of effects, a handler of the runtime, a rule of the checker; and marks.

A schedule with such ops is printed, parsed, checked, simulated and run like any other. megatrain's builder doesn't
place these ops: your own function puts them into a table. docs/extending.md adds one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from megatrain.base.checks import Rule, checked
from megatrain.base.checks import function as callable_with
from megatrain.errors import OptionError
from megatrain.passes.measured_runs import recordable
from megatrain.runtime.operations import HANDLERS, Handler, Operations, Run
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.schedule_rules import further_rules
from megatrain.scheduler.effects import BUILT_IN, KINDS, Effects, OpKind, register_kind, unregister_kind
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Effect, Item, Stream
from megatrain.scheduler.table import Op, Position, Tick

__all__ = [
    "Case",
    "Effect",
    "Effects",
    "Instruction",
    "Item",
    "Op",
    "OpKind",
    "Operations",
    "Position",
    "Run",
    "Stream",
    "Tick",
    "mark_recordable",
    "register_op",
    "unregister_op",
]

_Marked = TypeVar("_Marked", bound=type[torch.autograd.Function] | str)


def _mark_fault(value: object) -> str | None:
    if isinstance(value, str):
        return None if re.fullmatch(r"\w+::\w+", value) else "has no namespace"
    is_function = isinstance(value, type) and issubclass(value, torch.autograd.Function)
    return None if is_function else "can't be marked"


_RECORDABLE = Rule(
    "a class of torch.autograd.Function, or the name of an operator", '{name}="mine::scale"', _mark_fault
)


@checked(function=_RECORDABLE)
def mark_recordable(function: _Marked) -> _Marked:
    """Says that the Python of a Function or of an operator does the same in each step, so that it may be recorded.

    `kernels="graphs"` records the kernels that a block launches, and later launches them without its Python. So blocks
    that call an `autograd.Function` or an operator of others run unrecorded, unless it is marked. Mark what decides by
    the shapes, dtypes and plain arguments of a call alone: nothing that it reads elsewhere (globals, attributes, files,
    the environment) may change, and nothing that it writes but its results may count. A class that inherits from a
    marked one isn't marked.

    Args:
        function: A class of Function, also as its decorator; or an operator's name with its namespace, `"mine::scale"`.

    Returns:
        The same.

    Raises:
        OptionError: If it is neither.

    Example:
        >>> @mark_recordable
        ... class Double(torch.autograd.Function):
        ...     forward = staticmethod(lambda ctx, x: 2 * x)
        ...     backward = staticmethod(lambda ctx, gradient: 2 * gradient)
    """
    recordable.add(function)
    return function


@checked(handler=callable_with(3), rule=callable_with(1))
def register_op(kind: OpKind, *, handler: Handler, rule: Callable[[Case], None]) -> None:
    """Adds a kind of op, for all schedules made, read or run from now on.

    Args:
        kind: Its row: stream, letter, and the effect of an op. A new stream works on the host, on its own thread, and
            has a column after the others.
        handler: Runs an op; gets the operations, the run on whose calls it works, and the instruction. It runs on the
            stream's thread, after everything that the op waits for. An error in it stops the run.
        rule: Raises a `ScheduleError` (make it with `case.fault`) unless all ops of this kind are at right places of a
            table. The checker doesn't use the row, so the rule must state everything again.

    Raises:
        OptionError: If the stream already has this letter, or the stream or the letter is invalid.
    """
    key = (kind.stream, kind.what)
    if not re.fullmatch(r"[a-z]\w{0,15}", kind.stream) or not re.fullmatch(r"[A-Z]", kind.what):
        raise OptionError(
            f"`{kind.what}` of the stream `{kind.stream}` can't be printed.\n"
            "  A kind of op is a letter from A to Z; a stream's name is a small letter, then letters and digits.\n"
            '  Write OpKind(Stream("file"), "R", ...), say.'
        )
    if key in KINDS:
        raise OptionError(
            f"the {kind.stream} stream has an op `{kind.what}` already.\n"
            "  Each kind of op of a stream has its own letter.\n  Take another letter, or unregister_op first."
        )
    HANDLERS[key], further_rules[key] = handler, rule
    register_kind(kind)


@checked()
def unregister_op(kind: OpKind) -> None:
    """Removes a kind of op; schedules with such ops can't be used any more.

    Raises:
        OptionError: If `register_op` didn't add it.
    """
    key = (kind.stream, kind.what)
    if key in BUILT_IN or KINDS.get(key) is not kind:
        raise OptionError(
            f"`{kind.what}` of the {kind.stream} stream was not added by register_op.\n"
            "  Only a registered kind can be removed.\n  Give the OpKind that was registered."
        )
    unregister_kind(kind)
    del HANDLERS[key], further_rules[key]
