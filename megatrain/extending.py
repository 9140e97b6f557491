"""Your own kinds of ops: a row of the table of effects, a handler of the runtime, a rule of the checker.

A schedule with such ops is printed, parsed, checked, simulated and run like any other. megatrain's builder doesn't
place these ops: your own function puts them into a table. docs/extending.md adds one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatrain.checks import checked, function
from megatrain.errors import OptionError
from megatrain.runtime.operations import HANDLERS, Handler, Operations
from megatrain.runtime.taken import Taken
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.schedule_rules import further_rules
from megatrain.scheduler.effects import BUILT_IN, KINDS, Effects, OpKind
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Effect, Item, Stream
from megatrain.scheduler.op import Op
from megatrain.scheduler.table import Position, Tick

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
    "Stream",
    "Taken",
    "Tick",
    "register_op",
    "unregister_op",
]


@checked(handler=function(3), rule=function(1))
def register_op(kind: OpKind, *, handler: Handler, rule: Callable[[Case], None]) -> None:
    """Adds a kind of op, for all schedules made, read or run from now on.

    Args:
        kind: Its row: stream, letter, and the effect of an op. A new stream works on the host, on its own thread, and
            has a column after the others.
        handler: Runs an op; gets the operations, the calls that they run on, and the instruction. It runs on the
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
            '  Write OpKind(Stream("disk"), "R", ...), say.'
        )
    if key in KINDS:
        raise OptionError(
            f"the {kind.stream} stream has an op `{kind.what}` already.\n"
            "  Each kind of op of a stream has its own letter.\n  Take another letter, or unregister_op first."
        )
    KINDS[key], HANDLERS[key], further_rules[key] = kind, handler, rule


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
    for registry in (KINDS, HANDLERS, further_rules):
        del registry[key]
