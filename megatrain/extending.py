"""Kinds of ops of your own: a row of the table of effects, a handler of the runtime, a rule of the checker.

A schedule that holds such ops prints, parses, is checked, simulated and run as any other. megatrain's builder doesn't
place them: a function of yours puts them into a table. docs/extending.md adds one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatrain.checks import checked, function
from megatrain.errors import OptionError
from megatrain.runtime.operations import HANDLERS, Handler, Operations, Taken
from megatrain.scheduler.check.case import Case
from megatrain.scheduler.check.schedule_rules import further_rules
from megatrain.scheduler.effects import BUILT_IN, KINDS, Effect, Effects, OpKind, Stream
from megatrain.scheduler.instructions import Instruction
from megatrain.scheduler.items import Item
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
        kind: Its row: stream, letter, and what an op does. A new stream works on the host, on a thread of its own, and
            has a column behind the others.
        handler: Runs an op: of the operations, the calls that they run on, and the instruction. It runs on the
            stream's thread, when all that the op waits for is done; what it raises stops the run.
        rule: Raises a `ScheduleError` (make it with `case.fault`) unless a table's ops of this kind are where they
            must be. The checker shares nothing with the row, so the rule says it once more.

    Raises:
        OptionError: If the stream has that letter already, or one of them has no valid name.
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
    """Takes a kind of op out again; schedules that hold such ops can't be used any more.

    Raises:
        OptionError: If it isn't one that `register_op` added.
    """
    key = (kind.stream, kind.what)
    if key in BUILT_IN or KINDS.get(key) is not kind:
        raise OptionError(
            f"`{kind.what}` of the {kind.stream} stream was not added by register_op.\n"
            "  Only a registered kind can be removed.\n  Give the OpKind that was registered."
        )
    for registry in (KINDS, HANDLERS, further_rules):
        del registry[key]
