"""Drawn: a table of ops that a report draws; its ops and blocks as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.hardware.work import total_flops
from megatrain.passes.program import Program
from megatrain.scheduler.items import Effect
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.table import Position


@dataclass(frozen=True, slots=True)
class Drawn:
    """What runs in one process, as a report knows it.

    Args:
        schedule: The table.
        sources: The user's line with which each block begins, `model.py:41: ...`; empty where none is known.
        effects: What each op does: the bytes that it moves, its floating-point operations.
    """

    schedule: Schedule
    sources: tuple[str, ...]
    effects: Mapping[Position, Effect]


def sources_of(program: Program) -> tuple[str, ...]:
    """The user's first line in each block; equal blocks share a template, and with it the line of one of them."""
    return tuple(_source(program, index) for index in range(len(program.blocks)))


def _source(program: Program, index: int) -> str:
    graph = program.templates[program.blocks[index].template].graph
    found = (node.meta.get("source") for node in graph.nodes if node.op.startswith("call_"))
    return next((str(line) for line in found if line is not None), "")


def ops_data(drawn: Drawn, names: Sequence[str]) -> list[list[Any]]:
    """The ops in table order: stream, tick, name, letter, block, bytes, floating-point operations.

    Args:
        drawn: What is drawn.
        names: The streams; an op has the number of its own among them.
    """
    saves = frozenset(drawn.schedule.saves)
    ops: list[list[Any]] = []
    for position, op in drawn.schedule.positions():
        effect = drawn.effects[position]
        star = "*" if op.what in "FB" and op.block in saves else ""
        stream = names.index(position.stream)
        ops.append([stream, position.tick, f"{op}{star}", op.what, op.block, effect.moves, total_flops(effect.work)])
    return ops


def blocks_data(drawn: Drawn) -> dict[str, Any]:
    """`blocks`: the name of each, and the number of its line among `sources`."""
    sources = list(dict.fromkeys(drawn.sources))
    blocks = drawn.schedule.known_workload().blocks
    lines = drawn.sources or ("",) * len(blocks)
    return {
        "blocks": [
            [block.name, sources.index(line) if line else -1] for block, line in zip(blocks, lines, strict=True)
        ],
        "sources": sources,
    }
