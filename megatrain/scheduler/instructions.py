"""Instructions: every op of a schedule with everything that it needs to run; the runtime walks them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatrain.checks import checked
from megatrain.errors import ScheduleError
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import ITEMS, Item, Stream
from megatrain.scheduler.op import Op, parse_op
from megatrain.scheduler.table import Position


class Bytes(NamedTuple):
    """A range of bytes in one of the arenas: that of the slots, of parked values, or of gradients that land."""

    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.offset}+{self.nbytes}"


class Parked(NamedTuple):
    """A value that an `A` moves, and its bytes in the host memory for parked values of its micro-batch."""

    value: int
    host: Bytes


@dataclass(frozen=True, slots=True)
class Instruction:
    """An op with everything that it needs to run.

    Args:
        position: Its place in the table.
        op: The op.
        waits: Ops of other streams that must be over when it starts.
        state: Bytes of the slots that a `W` fills, or that an F or B reads; None for what has no state, and for all
            where weights are used in place.
        persists: A `W` whose frozen weights may be there from an earlier step: then it moves only the rest.
        parked: The values that an `A` moves.
        landing: Host bytes where a `G` puts gradients; None where they stay where they are made.
        retains: An F that retains its graph.
        recomputes: An F that its B will repeat.
        keeps: An F that keeps its results for its B, which doesn't compute them again.
        turns: The first B of its micro-batch: the caller hands in the gradients of the outputs.
        frees_before: Items to free when its waits are over: transfers used them last.
        frees_after: Items whose last use it is.
        takes: Items that transfers of later ticks bring to the device; their memory is taken then, when the op is over.
        leaves: Bytes of the slots whose state it is the last to read.
    """

    position: Position
    op: Op
    waits: tuple[Position, ...] = ()
    state: Bytes | None = None
    persists: bool = False
    parked: tuple[Parked, ...] = ()
    landing: Bytes | None = None
    retains: bool = False
    recomputes: bool = False
    keeps: bool = False
    turns: bool = False
    frees_before: tuple[Item, ...] = ()
    frees_after: tuple[Item, ...] = ()
    takes: tuple[Item, ...] = ()
    leaves: tuple[Bytes, ...] = ()

    @property
    def micro_batch(self) -> int:
        """Whose op it is; what concerns all micro-batches counts as the first's."""
        return self.op.micro_batch or 0


@dataclass(frozen=True, slots=True)
class Half:
    """Instructions that run without a break.

    Args:
        instructions: In the order of the table.
        frees: Items to free when they are over.
        takes: Items whose memory is taken before they begin.
    """

    instructions: tuple[Instruction, ...]
    frees: tuple[Item, ...]
    takes: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Instructions:
    """All instructions of a schedule, in the order of its table, split where the caller gets the model's outputs.

    Args:
        forward: Up to the tick of the last F of a call; nothing of a training step, which isn't split.
        backward: The rest.
        slot_bytes: Device bytes of the slots.
        park_bytes: Host bytes for the parked values of one micro-batch.
        landing_bytes: Host bytes where gradients land.
    """

    forward: Half
    backward: Half
    slot_bytes: int
    park_bytes: int
    landing_bytes: int

    def __str__(self) -> str:
        return _text(self)

    @staticmethod
    @checked()
    def parse(text: str) -> Instructions:
        """Reads what `str` wrote; the result equals the original.

        Raises:
            ScheduleError: With the number of the line that can't be read, and the line.
        """
        return _parse(text)

    @property
    def all(self) -> tuple[Instruction, ...]:
        """Both halves."""
        return self.forward.instructions + self.backward.instructions


_HEADER = re.compile(
    r"instructions: (?P<forward>\d{1,18}) until the outputs, (?P<backward>\d{1,18}) after; "
    r"slots (?P<slot_bytes>\d{1,18}) B, parks (?P<park_bytes>\d{1,18}) B, landing (?P<landing_bytes>\d{1,18}) B"
)
_ITEM = re.compile(r"(?P<kind>[a-z]+) (?P<number>\d{1,18})(?:\.(?P<micro_batch>\d{1,18}))?")
_ITEM_KINDS = tuple(kind for kind, row in ITEMS.items() if row.memory == "device")
_BYTES = re.compile(r"(\d{1,18})\+(\d{1,18})")
_PARKED = re.compile(r"(\d{1,18}) at (\d{1,18})\+(\d{1,18})")
_POSITION = re.compile(r"(\w+) (\d{1,18})")
_STARTS = ("start", "backward")
_ENDS = ("outputs", "end")
_EDGE = re.compile(r"(?P<name>\w+): (?P<what>takes|frees) (?P<items>.*)")


def _text(instructions: Instructions) -> str:
    """Prints one line per instruction: tick, stream and op, then what it waits for, its bytes, and what it frees.

    A line at the start of each half says what memory is taken then, and one at its end what is let go of. Parts that
    would say nothing are left out.
    """
    halves = (instructions.forward, instructions.backward)
    lines = [
        f"instructions: {len(halves[0].instructions)} until the outputs, {len(halves[1].instructions)} after; "
        f"slots {instructions.slot_bytes} B, parks {instructions.park_bytes} B, landing {instructions.landing_bytes} B"
    ]
    cells = [[str(i.position.tick), str(i.position.stream), str(i.op)] for i in instructions.all]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
    rows = iter(cells)
    for half, start, end in zip(halves, _STARTS, _ENDS, strict=True):
        if half.takes:
            lines.append(f"{start}: takes {_items(half.takes)}")
        for instruction in half.instructions:
            tick, stream, op = next(rows)
            cell = f"{tick.rjust(widths[0])}  {stream.ljust(widths[1])}  {op.ljust(widths[2])}"
            lines.append("  ".join([cell, "; ".join(_parts(instruction))]).rstrip())
        if half.frees:
            lines.append(f"{end}: frees {_items(half.frees)}")
    return "\n".join(lines)


def _parts(instruction: Instruction) -> Iterable[str]:
    for key, write, _ in _FIELDS:
        value = getattr(instruction, key)
        if value not in ((), None, False):
            yield f"{_WORDS[key]}{write(value)}"


def _positions(positions: Iterable[Position]) -> str:
    return ", ".join(f"{p.stream} {p.tick}" for p in positions)


def _items(items: Iterable[Item]) -> str:
    return ", ".join(f"{i.kind} {i.number}{f'.{i.micro_batch}' if i.micro_batch else ''}" for i in items)


def _read_positions(text: str) -> tuple[Position, ...]:
    found = _matches(_POSITION, text, "an op; one reads `h2d 3`")
    return tuple(Position(int(match[2]), _read_stream(match[1])) for match in found)


def _read_stream(name: str) -> Stream:
    if name not in streams():
        raise ScheduleError(f"`{name}` is none of the streams {', '.join(streams())}.")
    return Stream(name)


def _read_items(text: str) -> tuple[Item, ...]:
    found = [_match(_ITEM, part, "an item; one reads `value 3`") for part in text.split(", ")]
    for match in found:
        if match["kind"] not in _ITEM_KINDS:
            raise ScheduleError(f"`{match['kind']}` is none of {', '.join(_ITEM_KINDS)}.")
    return tuple(Item(m["kind"], int(m["number"]), int(m["micro_batch"] or 0)) for m in found)


def _read_bytes(text: str) -> Bytes:
    match = _match(_BYTES, text, "a range of bytes; one reads `0+1024`")
    return Bytes(int(match[1]), int(match[2]))


def _read_parked(text: str) -> tuple[Parked, ...]:
    found = _matches(_PARKED, text, "a parked value; one reads `3 at 0+1024`")
    return tuple(Parked(int(m[1]), Bytes(int(m[2]), int(m[3]))) for m in found)


def _matches(pattern: re.Pattern[str], text: str, what: str) -> list[re.Match[str]]:
    return [_match(pattern, part, what) for part in text.split(", ")]


def _match(pattern: re.Pattern[str], text: str, what: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ScheduleError(f"`{text}` isn't {what}.")
    return match


def _nothing(value: object) -> str:
    return ""


def _read_flag(text: str) -> bool:
    if text:
        raise ScheduleError(f"`{text}` is too much.")
    return True


def _separated(values: Sequence[Any], write: Callable[[Any], str]) -> str:
    return ", ".join(map(write, values))


# Each part of an instruction: its attribute, how it is written, and how it is read.
_FIELDS: tuple[tuple[str, Callable[[Any], str], Callable[[str], Any]], ...] = (
    ("waits", _positions, _read_positions),
    ("state", str, _read_bytes),
    ("persists", _nothing, _read_flag),
    ("parked", lambda v: _separated(v, lambda p: f"{p.value} at {p.host}"), _read_parked),
    ("landing", str, _read_bytes),
    ("retains", _nothing, _read_flag),
    ("recomputes", _nothing, _read_flag),
    ("keeps", _nothing, _read_flag),
    ("turns", _nothing, _read_flag),
    ("frees_before", _items, _read_items),
    ("frees_after", _items, _read_items),
    ("takes", _items, _read_items),
    ("leaves", lambda v: _separated(v, str), lambda text: tuple(map(_read_bytes, text.split(", ")))),
)
# No word begins another.
_WORDS = {
    "waits": "after ",
    "state": "state ",
    "persists": "persists",
    "parked": "values ",
    "landing": "lands at ",
    "retains": "retains its graph",
    "recomputes": "will be recomputed",
    "keeps": "keeps its results",
    "turns": "turns",
    "frees_before": "first frees ",
    "frees_after": "frees ",
    "takes": "takes ",
    "leaves": "leaves ",
}


def _parse(text: str) -> Instructions:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    header = _HEADER.fullmatch(lines[0][1].strip()) if lines else None
    if header is None:
        raise ScheduleError("instructions begin with `instructions: 8 until the outputs, 12 after; slots ...`.")
    made: list[Instruction] = []
    edges: dict[tuple[str, str], tuple[Item, ...]] = {}
    for number, line in lines[1:]:
        try:
            edge = _EDGE.fullmatch(line.strip())
            if edge is not None and edge["name"] in (_STARTS if edge["what"] == "takes" else _ENDS):
                edges[edge["name"], edge["what"]] = _read_items(edge["items"])
            else:
                made.append(_read_line(line))
        except ScheduleError as error:
            raise ScheduleError(f"line {number} of the instructions can't be read: {error}\n  {line}") from None
    split = int(header["forward"])
    if len(made) != split + int(header["backward"]):
        raise ScheduleError(f"the header announces {split + int(header['backward'])} instructions, found {len(made)}.")
    forward, backward = (
        Half(tuple(part), edges.get((end, "frees"), ()), edges.get((start, "takes"), ()))
        for part, start, end in zip((made[:split], made[split:]), _STARTS, _ENDS, strict=True)
    )
    return Instructions(
        forward,
        backward,
        *(int(header[name]) for name in ("slot_bytes", "park_bytes", "landing_bytes")),
    )


def _read_line(line: str) -> Instruction:
    cells = line.split(maxsplit=3)
    if len(cells) < 3 or not re.fullmatch(r"\d{1,18}", cells[0]) or cells[1] not in streams():
        raise ScheduleError("expected a tick, a stream and an op, then what belongs to them.")
    stream = _read_stream(cells[1])
    parts: dict[str, Any] = {}
    for part in cells[3].split("; ") if len(cells) > 3 else ():
        key, _, read = next((f for f in _FIELDS if part.startswith(_WORDS[f[0]])), (None, None, None))
        if key is None or read is None:
            raise ScheduleError(f"`{part}` begins with none of {', '.join(word.strip() for word in _WORDS.values())}.")
        if key in parts:
            raise ScheduleError(f"`{_WORDS[key].strip()}` stands there twice.")
        parts[key] = read(part.removeprefix(_WORDS[key]))
    return Instruction(Position(int(cells[0]), stream), parse_op(cells[2], stream), **parts)
