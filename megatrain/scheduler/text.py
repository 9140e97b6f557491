"""Text: a table printed, and read back; a workload printed; numbers of blocks as ranges."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatrain.base.checks import checked
from megatrain.base.counts import counted
from megatrain.errors import OptionError, ScheduleError
from megatrain.hardware.work import total_flops, total_kernels
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.step_kind import MODES, OUTPUTS, TRANSFERS, UPDATES, StepKind
from megatrain.scheduler.table import Op, Place, Slot, Table, Tick, columns, parse_op
from megatrain.scheduler.workload import BlockWork, ValueWork, Workload


def ranges(blocks: Sequence[int]) -> list[str]:
    """Ascending numbers as texts, runs of them as one: `0-3`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]


_HEADER = re.compile(
    r"schedule: (?P<num_blocks>\d{1,18}) blocks?, (?P<num_slots>\d{1,18}) slots?, keep (?P<keep>\d{1,18}), "
    r"(?P<num_ticks>\d{1,18}) ticks?; "
    r"h2d (?P<h2d_bytes>\d{1,18}) B, d2h (?P<d2h_bytes>\d{1,18}) B, peak (?P<peak_bytes>\d{1,18}) B"
)
_DEVICE = re.compile(r"device: (?P<device_bytes>\d{1,18}) B; host: (?P<host_bytes>\d{1,18}) B")
_SLOT = re.compile(r"(?P<index>\d{1,18}) = (?P<offset>\d{1,18})\+(?P<nbytes>\d{1,18})")
_PLACE = re.compile(r"(?P<block>\d{1,18}) = (?P<offset>\d{1,18})\+(?P<nbytes>\d{1,18})")
_UPDATES = re.compile(r"(?P<updates>\w+)(?P<norm>, clipped|, norm)?")
_RANGE = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")
_WIDTH = 100
_ALWAYS_SHOWN = (Stream.H2D, Stream.COMPUTE, Stream.D2H)
_COUNTS = ("num_slots", "num_ticks")


def table_text(schedule: Table) -> str:
    """Prints a schedule: the header, then one row per tick, in columns as wide as needed.

    An F whose graph is retained has a star. Lines and columns of the host that would say nothing are left out.
    """
    lines = [
        f"schedule: {counted(schedule.num_blocks, 'block')}, {counted(schedule.num_slots, 'slot')}, "
        f"keep {schedule.keep}, {counted(len(schedule.ticks), 'tick')}; "
        f"h2d {schedule.h2d_bytes} B, d2h {schedule.d2h_bytes} B, peak {schedule.peak_bytes} B",
        f"device: {schedule.device_bytes} B; host: {schedule.host_bytes} B",
    ]
    for key, line in _LINES.items():
        lines += _folded(f"{key}: ", line.separator, line.parts(schedule))
    return "\n".join([*lines, *table_rows(schedule.ticks, schedule.live_bytes, schedule.saves)])


def table_rows(ticks: Sequence[Tick], live_bytes: Sequence[int], saves: Sequence[int]) -> list[str]:
    """The table, its heading first."""
    saved = frozenset(saves)
    used = {stream for tick in ticks for stream in tick}
    shown = [stream for stream in columns(ticks) if stream in _ALWAYS_SHOWN or stream in used]
    written = [[stream, *(_token(tick.get(stream), saved) for tick in ticks)] for stream in shown]
    left = _aligned(["tick", *map(str, range(len(ticks)))], right=True)
    right = _aligned(["live_bytes", *map(str, live_bytes)], right=True)
    return ["  ".join(cells) for cells in zip(left, *map(_aligned, written), right, strict=True)]


def _token(op: Op | None, saved: frozenset[int]) -> str:
    if op is None:
        return "."
    return f"{op}*" if op.is_forward and op.block in saved else str(op)


def _aligned(cells: Sequence[str], *, right: bool = False) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]


def _folded(key: str, separator: str, parts: Iterable[str]) -> list[str]:
    """Lines that each begin with the key and take as many parts as their width allows."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(separator) + len(part) <= _WIDTH:
            lines[-1] += separator + part
        else:
            lines.append(key + part)
    return lines


@dataclass(slots=True)
class _Read:
    """What the lines read so far said."""

    figures: dict[str, int] = field(default_factory=dict[str, int])
    slots: list[Slot] = field(default_factory=list[Slot])
    places: list[Place] = field(default_factory=list[Place])
    blocks: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    kind: dict[str, Any] = field(default_factory=dict[str, Any])
    streams: list[Stream] = field(default_factory=list[Stream])
    ticks: list[Tick] = field(default_factory=list[Tick])
    live_bytes: list[int] = field(default_factory=list[int])

    def of(self, name: str) -> tuple[int, ...]:
        """The blocks that a line named."""
        return tuple(self.blocks.get(name, ()))

    def say(self, name: str, value: Any) -> None:
        """Notes a part of the kind of step, which has one value."""
        if name in self.kind:
            raise ScheduleError("an earlier line says the same thing.")
        self.kind[name] = value


@checked()
def parse_table(text: str, workload: Workload | None = None) -> Table:
    """Reads what `table_text` wrote; spaces between the cells don't matter, nor do empty lines.

    Raises:
        ScheduleError: With the number of the line that can't be read, and the line.
    """
    read = _Read()
    for number, line in enumerate(lines := text.splitlines(), start=1):
        if line.strip():
            _at_line(number, line.strip(), _reader_of(line, read), read)
    _at_line(max(1, len(lines)), lines[-1].strip() if lines else "", _check_complete, read)
    schedule = Table(
        ticks=tuple(read.ticks),
        slots=tuple(read.slots),
        live_bytes=tuple(read.live_bytes),
        kind=_kind(read),
        places=tuple(read.places),
        saves=read.of("saves"),
        persistent=read.of("persistent"),
        results=read.of("results"),
        recorded=read.of("recorded"),
        device_updates=read.of("updated on the device"),
        workload=workload,
        **{name: figure for name, figure in read.figures.items() if name not in _COUNTS},
    )
    if read.of("frozen") != schedule.frozen:
        raise ScheduleError(
            f"the line `frozen:` must name {', '.join(ranges(schedule.frozen)) or 'no block'}.\n"
            "  This line names the blocks whose gradients no G offloads."
        )
    return schedule


def _kind(read: _Read) -> StepKind:
    try:
        return StepKind(**read.kind)
    except OptionError as error:
        raise ScheduleError(f"the header of the schedule contradicts itself: {error}") from None


def _at_line(number: int, line: str, reader: Callable[[str, _Read], None], read: _Read) -> None:
    try:
        reader(line, read)
    except ScheduleError as error:
        raise ScheduleError(f"line {number} of the schedule can't be read: {error}\n  {line}") from None


def _reader_of(line: str, read: _Read) -> Callable[[str, _Read], None]:
    if read.streams:
        return _read_row
    if not read.figures:
        return _read_header
    key, _, rest = line.strip().partition(":")
    if key in _LINES:
        return lambda _, read: _LINES[key].read(rest.strip(), read)
    return {"device": _read_device, "tick": _read_heading}.get(key.split()[0], _read_unknown)


def _read_unknown(line: str, read: _Read) -> None:
    raise ScheduleError(f"`{line.split()[0]}` is neither a key of the header nor the heading of the table.")


def _read_header(line: str, read: _Read) -> None:
    match = _HEADER.fullmatch(line)
    if match is None:
        raise ScheduleError("a schedule begins with `schedule: 4 blocks, 2 slots, keep 2, 10 ticks; h2d ...`.")
    read.figures.update({name: int(figure) for name, figure in match.groupdict().items()})


def _read_device(line: str, read: _Read) -> None:
    if (match := _DEVICE.fullmatch(line)) is None:
        raise ScheduleError("expected `device: 1024 B; host: 1024 B`.")
    read.figures.update({name: int(figure) for name, figure in match.groupdict().items()})


def _read_slots(text: str, read: _Read) -> None:
    for part in text.split(";"):
        match = _SLOT.fullmatch(part.strip())
        if match is None or int(match["index"]) != len(read.slots):
            raise ScheduleError(f"`{part.strip()}` isn't slot {len(read.slots)}; a slot reads `0 = 0+1024`.")
        read.slots.append(Slot(int(match["offset"]), int(match["nbytes"])))


def _read_places(text: str, read: _Read) -> None:
    for part in text.split(";"):
        match = _PLACE.fullmatch(part.strip())
        if match is None:
            raise ScheduleError(f"`{part.strip()}` isn't the place of a block's gradients; one reads `3 = 0+1024`.")
        read.places.append(Place(*map(int, match.groups())))


def _read_ranges(text: str, read: _Read) -> list[int]:
    blocks: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        # A range must not be longer than the model: its length is the reader's memory.
        if match is None or int(match["last"] or match["first"]) >= read.figures["num_blocks"]:
            raise ScheduleError(f"`{part.strip()}` isn't a range of blocks; one reads `3` or `3-5`.")
        blocks.extend(range(int(match["first"]), int(match["last"] or match["first"]) + 1))
    return blocks


def _several(key: str, name: str) -> _Line:
    def read_number(text: str, read: _Read) -> None:
        if not re.fullmatch(r"[1-9]\d{0,17}", text):
            raise ScheduleError(f"expected `{key}: 4`.")
        read.say(name, int(text))

    return _Line(lambda s: [str(n)] if (n := getattr(s.kind, name)) > 1 else [], read_number)


def _read_updates(text: str, read: _Read) -> None:
    if (match := _UPDATES.fullmatch(text)) is None:
        raise ScheduleError("expected `updates: deferred`, `updates: deferred, clipped` or `updates: overlap, norm`.")
    read.say("updates", _one_of(match["updates"], UPDATES))
    read.say("clip", match["norm"] == ", clipped")
    read.say("reports_norm", match["norm"] == ", norm")


def _one_of(word: str, known: Sequence[str]) -> str:
    if word not in known:
        raise ScheduleError(f"`{word}` is none of {', '.join(known)}.")
    return word


def _updates(schedule: Table) -> Iterable[str]:
    kind = schedule.kind
    norm = ", clipped" if kind.clip else ", norm" if kind.reports_norm else ""
    return [f"{kind.updates}{norm}"] if kind.holds_gradients else []


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the header after its first two: what it says of a schedule, in parts, and how it is read."""

    parts: Callable[[Table], Iterable[str]]
    read: Callable[[str, _Read], None]
    separator: str = ", "


def _choice(name: str, known: Sequence[str]) -> _Line:
    """The line of a part of the kind of step that is one of a few words, and is left out where that is the first."""

    def parts(schedule: Table) -> Iterable[str]:
        word: str = getattr(schedule.kind, name)
        return [] if word == known[0] else [word]

    return _Line(parts, lambda text, read: read.say(name, _one_of(text, known)))


def _blocks(name: str, key: str = "") -> _Line:
    """The line that names the blocks of a field, of the same name unless it has a key of its own."""
    return _Line(
        lambda schedule: ranges(getattr(schedule, name)),
        lambda text, read: read.blocks.setdefault(key or name, []).extend(_read_ranges(text, read)),
    )


# By key, in their order. Lines of many parts are folded: each goes on with the key again.
_LINES: dict[str, _Line] = {
    "slots": _Line(lambda s: [f"{i} = {x.offset}+{x.nbytes}" for i, x in enumerate(s.slots)], _read_slots, "; "),
    **{name: _blocks(name) for name in ("saves", "results", "recorded", "frozen", "persistent")},
    "updated on the device": _blocks("device_updates", "updated on the device"),
    "mode": _choice("mode", MODES),
    "transfer": _choice("transfer", TRANSFERS),
    "micro-batches": _several("micro-batches", "micro_batches"),
    "updates": _Line(_updates, _read_updates),
    "places": _Line(lambda s: [f"{x.block} = {x.offset}+{x.nbytes}" for x in s.places], _read_places, "; "),
    "outputs": _choice("outputs", OUTPUTS),
}


def _read_heading(line: str, read: _Read) -> None:
    cells = line.split()
    found = [stream for stream in streams() if stream in cells]
    if not set(_ALWAYS_SHOWN) <= set(found) or cells != ["tick", *found, "live_bytes"]:
        raise ScheduleError("expected the heading `tick  h2d  compute  d2h  live_bytes`.")
    read.streams = found


def _read_row(line: str, read: _Read) -> None:
    cells = line.split()
    if len(cells) != len(read.streams) + 2:
        raise ScheduleError(f"expected {len(read.streams) + 2} cells, found {len(cells)}.")
    if cells[0] != str(len(read.ticks)):
        raise ScheduleError(f"expected tick {len(read.ticks)}, found `{cells[0]}`.")
    if not re.fullmatch(r"\d{1,18}", cells[-1]):
        raise ScheduleError(f"`{cells[-1]}` isn't a number of live bytes.")
    read.ticks.append(Tick(*(_read_cell(c, s, read) for s, c in zip(read.streams, cells[1:-1], strict=True))))
    read.live_bytes.append(int(cells[-1]))


def _read_cell(cell: str, stream: Stream, read: _Read) -> Op | None:
    if cell == ".":
        return None
    op = parse_op(cell.removesuffix("*"), stream)
    is_saved = op.is_forward and op.block in read.of("saves")
    if cell.endswith("*") != is_saved:
        raise ScheduleError(f"`{cell}` must {'' if is_saved else 'not '}have a star: see the line `saves:`.")
    return op


def _check_complete(line: str, read: _Read) -> None:
    for name, count in (("num_ticks", len(read.ticks)), ("num_slots", len(read.slots))):
        if read.figures.get(name) != count:
            what = name.removeprefix("num_")
            raise ScheduleError(f"the header announces {read.figures.get(name, 'no')} {what}, found {count}.")
    if "device_bytes" not in read.figures:
        raise ScheduleError("the line `device:` is missing.")


def workload_text(workload: Workload) -> str:
    """Prints a row per block and a row per value, in bytes; what a schedule moves and holds is made of them."""
    blocks = [_block_cells(index, block) for index, block in enumerate(workload.blocks)]
    values = [_value_cells(index, value) for index, value in enumerate(workload.values)]
    storages = ", ".join(f"{index} = {nbytes}" for index, nbytes in enumerate(workload.storages))
    return "\n".join(
        [
            f"workload: {counted(len(blocks), 'block')}, {counted(len(values), 'value')}, "
            f"{counted(len(workload.storages), 'storage')}",
            f"storages: {storages}",
            *([f"loss: {workload.loss_bytes} B"] if workload.loss_bytes else []),
            *(["Python code reads values of the last block"] if workload.last_reads_values else []),
            *_in_columns([_BLOCK, *blocks]),
            *_in_columns([_VALUE, *values]),
        ]
    )


_BLOCK = ("block", "state", "frozen", "gradients", "saved", "forward", "backward", "FLOP", "kernels", "update", "name")
_VALUE = ("value", "bytes", "storage", "made by", "read by", "is", "name")


def _block_cells(index: int, block: BlockWork) -> tuple[str, ...]:
    backward = str(block.backward_workspace_bytes) if block.has_backward else "."
    gradients = f"{block.gradient_bytes}" + (f"+{block.gradient_padding}" if block.gradient_padding else "")
    shares = f", updates rows of {_listed(block.shares)} as well" if block.shares else ""
    held = (block.saved_bytes, block.forward_workspace_bytes, backward)
    sizes = (block.state_bytes, block.frozen_bytes, gradients, *held)
    both = (block.forward, block.backward) if block.has_backward else (block.forward,)
    kernels = ["+".join(str(total(works)) for works in both) for total in (total_flops, total_kernels)]
    partial = f", {block.partial_gradient_bytes} B of them partial" if block.partial_gradient_bytes else ""
    filed = f", {block.moment_bytes} B of optimizer state in a file" if block.moment_bytes else ""
    return (str(index), *map(str, sizes), *kernels, str(block.update_bytes), f"{block.name}{shares}{partial}{filed}")


def _value_cells(index: int, value: ValueWork) -> tuple[str, ...]:
    producer = "." if value.producer is None else str(value.producer)
    facts = {
        "input": value.is_there,
        "output": value.is_output,
        "differentiable": value.has_gradient,
        "parkable": value.is_parkable,
        "committed": value.is_committed,
        "cpu": value.on_host,
        "result": value.is_result,
    }
    told = "+".join(fact for fact, holds in facts.items() if holds) or "."
    return (str(index), str(value.nbytes), str(value.storage), producer, _listed(value.readers), told, value.name)


def _listed(blocks: Sequence[int]) -> str:
    return ",".join(map(str, blocks)) or "."


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    *_, last = widths
    return [
        "  ".join([*(c.rjust(w) for c, w in zip(row, widths[:-1], strict=False)), row[-1].ljust(last).rstrip()])
        for row in rows
    ]
