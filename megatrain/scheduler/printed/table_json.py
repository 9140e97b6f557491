"""A schedule and its workload as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from megatrain.checks import checked, from_data, shown
from megatrain.errors import ScheduleError
from megatrain.scheduler.effects import streams
from megatrain.scheduler.items import Stream
from megatrain.scheduler.op import parse_op
from megatrain.scheduler.step_kind import RANKS, STORES, StepKind
from megatrain.scheduler.table import Place, Slot, Table, Tick, columns
from megatrain.scheduler.workload import Workload

FORMAT = 1

# What schedules of a process alone don't say.
_LEFT_OUT = (("ranks", RANKS[0]), ("store", STORES[0]))
_FIGURES = ("keep", "h2d_bytes", "d2h_bytes", "peak_bytes", "device_bytes", "host_bytes")


def table_to_json(schedule: Table) -> str:
    """Writes one object: figures by name, the table as tokens, the workload as `Workload.to_dict`."""
    names = columns(schedule.ticks)
    data: dict[str, Any] = {
        "format": FORMAT,
        "num_blocks": schedule.num_blocks,
        **{name: getattr(schedule, name) for name in _FIGURES},
        **{name: part for name, part in asdict(schedule.kind).items() if (name, part) not in _LEFT_OUT},
        "saves": schedule.saves,
        "slots": [(slot.offset, slot.nbytes) for slot in schedule.slots],
        "places": [(place.block, place.offset, place.nbytes) for place in schedule.places],
        "persistent": schedule.persistent,
        "results": schedule.results,
        "live_bytes": schedule.live_bytes,
        "streams": names,
        "ticks": [[None if s not in tick else str(tick[s]) for s in names] for tick in schedule.ticks],
        "workload": None if schedule.workload is None else schedule.workload.to_dict(),
    }
    return json.dumps(data)


@checked()
def table_from_json(text: str) -> Table:
    """Reads what `table_to_json` wrote.

    Raises:
        ScheduleError: If the text isn't JSON, of another format, or lacks something.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ScheduleError(
                f"format {shown(data['format'])} of a schedule is unknown.\n  This version reads format {FORMAT}.\n"
                "  Write the schedule again with this version's Schedule.to_json."
            )
        return from_data(
            Table,
            # Schedules written by an earlier version have the first four streams, as all had.
            ticks=tuple(_read_tick(tokens, data.get("streams", streams()[:4])) for tokens in data["ticks"]),
            slots=tuple(from_data(Slot, offset=offset, nbytes=nbytes) for offset, nbytes in data["slots"]),
            saves=tuple(data["saves"]),
            places=tuple(
                from_data(Place, block=block, offset=offset, nbytes=nbytes)
                for block, offset, nbytes in data.get("places", ())
            ),
            persistent=tuple(data.get("persistent", ())),
            results=tuple(data.get("results", ())),
            live_bytes=tuple(data["live_bytes"]),
            num_blocks=data["num_blocks"],
            workload=None if data["workload"] is None else Workload.from_dict(data["workload"]),
            **{name: data[name] for name in _FIGURES},
            # A schedule written by an earlier version lacks some parts of the kind of step.
            kind=StepKind(**{part.name: data[part.name] for part in fields(StepKind) if part.name in data}),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ScheduleError(
            f"this JSON isn't a schedule: {type(error).__name__}: {error}\n"
            "  The JSON must come from Schedule.to_json.\n  Give the result of to_json, unchanged."
        ) from error


def _read_tick(tokens: list[str | None], names: list[str]) -> Tick:
    cells = zip(names, tokens, strict=True)
    return Tick(*(None if token is None else parse_op(token, Stream(name)) for name, token in cells))
