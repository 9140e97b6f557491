"""Op: one cell of a schedule's table, and its token."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatrain.errors import ScheduleError
from megatrain.scheduler.effects import KINDS
from megatrain.scheduler.items import NO_BLOCK, Stream

_TOKEN = re.compile(r"(?P<what>[A-Z])(?P<block>\d{1,18})?(?:\.(?P<micro>\d{1,18}))?(?:@(?P<slot>\d{1,18}))?")


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. The same op may recur; its position in the table is its identity.

    Args:
        stream: Where it runs.
        what: One letter; see `megatrain.scheduler.effects.KINDS`.
        block: Block it concerns; `NO_BLOCK` for `N`.
        slot: Slot that it fills; None for an op that fills none.
        micro_batch: Micro-batch, where the step has several.

    Raises:
        ScheduleError: If the stream can't do this, or a part is missing or superfluous.

    >>> print(Op(Stream.H2D, "W", 3, slot=1), Op(Stream.HOST, "U", 3))
    W3@1 U3
    """

    stream: Stream
    what: str
    block: int
    slot: int | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        kind = KINDS.get((self.stream, self.what))
        if kind is None:
            able = " and ".join(what for stream, what in KINDS if stream == self.stream)
            raise ScheduleError(f"the {self.stream} stream can't do `{self.what}`; it does {able or 'nothing'}.")
        if (self.slot is None) == kind.has_slot:
            raise ScheduleError(f"`{self}` must {'name' if kind.has_slot else 'not name'} a slot.")
        if (self.block < 0) == kind.has_block:
            raise ScheduleError(f"`{self}` must {'name' if kind.has_block else 'not name'} a block.")

    @property
    def key(self) -> tuple[Stream, str, int, int]:
        """Stream, letter, block, and micro-batch, which is 0 where the op serves all."""
        return self.stream, self.what, self.block, self.micro_batch or 0

    def __str__(self) -> str:
        block = "" if self.block < 0 else str(self.block)
        micro = "" if self.micro_batch is None else f".{self.micro_batch}"
        slot = "" if self.slot is None else f"@{self.slot}"
        return f"{self.what}{block}{micro}{slot}"


def parse_op(token: str, stream: Stream) -> Op:
    """Reads one token of the `stream` column.

    Raises:
        ScheduleError: If the token is no op, or none of that stream.

    >>> parse_op("A3.0", Stream.D2H).micro_batch
    0
    """
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ScheduleError(f"`{token}` is not an op; an op reads like W3@1, F3, A3.0 or G3.")
    block, *rest = (None if match[g] is None else int(match[g]) for g in ("block", "slot", "micro"))
    return Op(stream, match["what"], NO_BLOCK if block is None else block, *rest)
