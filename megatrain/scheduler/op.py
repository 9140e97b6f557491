"""Op and Stream: the instruction set of a schedule, and its tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from megatrain.errors import ScheduleError


class Stream(StrEnum):
    """A queue of ops that run one after the other; different streams run at the same time."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    HOST = "host"


# In the order of the table's columns.
STREAMS = (Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.HOST)

# What each stream can do: W weights, A what a backward needs, F forward, B backward, G gradients of
# parameters, N norm of all gradients, U optimizer update.
INSTRUCTIONS = {Stream.H2D: "WA", Stream.COMPUTE: "FB", Stream.D2H: "AG", Stream.HOST: "NU"}

# What runs once for each micro-batch; everything else once for all of them.
PER_MICRO_BATCH = "FBA"

# The block of an op that concerns no block in particular (`N`).
NO_BLOCK = -1

_TOKEN = re.compile(r"(?P<what>[WAFBGNU])(?P<block>\d{1,18})?(?:\.(?P<micro>\d{1,18}))?(?:@(?P<slot>\d{1,18}))?")


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. The same op may recur; its position in the table is its identity.

    Args:
        stream: Where it runs.
        what: One letter; see `INSTRUCTIONS`.
        block: Block it concerns; `NO_BLOCK` for `N`.
        slot: Slot that a `W` fills; None for every other op.
        micro_batch: Micro-batch, where the step has several.

    Raises:
        ScheduleError: If the stream can't do this, or a part is missing or superfluous.

    >>> print(Op(Stream.H2D, "W", 3, slot=1))
    W3@1
    """

    stream: Stream
    what: str
    block: int
    slot: int | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if len(self.what) != 1 or self.what not in INSTRUCTIONS[self.stream]:
            able = " and ".join(INSTRUCTIONS[self.stream])
            raise ScheduleError(f"the {self.stream} stream can't do `{self.what}`; it does {able}.")
        if (self.slot is None) == (self.what == "W"):
            raise ScheduleError(f"`{self}` must {'name' if self.what == 'W' else 'not name'} a slot.")
        if (self.block < 0) != (self.what == "N"):
            raise ScheduleError(f"`{self}` must {'not name' if self.what == 'N' else 'name'} a block.")

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
    block, micro, slot = (None if match[g] is None else int(match[g]) for g in ("block", "micro", "slot"))
    return Op(stream, match["what"], NO_BLOCK if block is None else block, slot, micro)
