"""The places of the library that order streams of a device, or have the host wait for it, found in its source."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import megatrain
from tests.simulated_device.simulator import CallName

LIBRARY = Path(megatrain.__file__).parent
RECORDS: tuple[CallName, ...] = ("record",)
WAITS: tuple[CallName, ...] = ("wait",)
BLOCKS: tuple[CallName, ...] = ("event", "stream", "device")
ORDERING: tuple[CallName, ...] = (*RECORDS, *WAITS, "record_stream", *BLOCKS)
KINDS: dict[str, tuple[CallName, ...]] = {
    "record_event": RECORDS,
    "record": RECORDS,
    "wait_event": WAITS,
    "wait_stream": WAITS,
    "record_stream": ("record_stream",),
    "synchronize": BLOCKS,
    "settle": BLOCKS,
    "seconds_since": BLOCKS,
    "query": BLOCKS,
    "arrive": BLOCKS,
    "wait": ORDERING,
    "wait_for_mark": ORDERING,
    "wait_for": BLOCKS,
}
"""Names of such calls, without a leading underscore, and what the simulated device is told by them."""

NO_DEVICES = {
    "threads of the host wait for each other": {
        "barrier.wait", "digest.wait", "over.wait", "reader.wait", "ready.wait", "self._digest.wait", "self.wait",
        "step.wait", "updater.wait", "op.done.settle",
    },
    "notes something in a list": {
        "recorder.record", "self._recorder.record", "self._record", "self.record", "shard.record",
    },
    "records work for a launch graph": {"self._graphs.record"},
}  # fmt: skip
"""Names that mean something else elsewhere, with the object that they are asked of."""


@dataclass(frozen=True)
class Place:
    """An expression of the source that orders streams, or waits.

    Args:
        name: Module, function and text, the same wherever the lines are.
        path: File.
        lines: First and last line.
        kinds: What the simulated device is told by it.
    """

    name: str
    path: str
    lines: tuple[int, int]
    kinds: tuple[CallName, ...]

    def is_in(self, stack: traceback.StackSummary) -> bool:
        """Whether a call with this stack comes from here."""
        first, last = self.lines
        return any(f.filename == self.path and first <= (f.lineno or 0) <= last for f in stack)


def places_of(path: Path) -> Iterator[Place]:
    """Yields the places of one file, and the names in `NO_DEVICES`."""

    def within(node: ast.AST, function: str) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from within(child, child.name if is_function else function)
        called = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else node
        name = {ast.Attribute: "attr", ast.Name: "id"}.get(type(called))
        found = None if name is None else getattr(called, name).lstrip("_")
        # A name alone is a value of whatever kind, unless it is called.
        if found in KINDS and (isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and found == "arrive")):
            yield Place(
                f"{path.stem}.{function}: {ast.unparse(called)}",
                str(path),
                (node.lineno, node.end_lineno or node.lineno),
                KINDS[found],
            )

    return within(ast.parse(path.read_text()), "")


def all_places() -> list[Place]:
    """All of the library; two of one name are counted apart."""
    found, names = list[Place](), dict[str, int]()
    for path in sorted(LIBRARY.rglob("*.py")):
        for place in places_of(path):
            number = names[place.name] = names.get(place.name, 0) + 1
            name = place.name if number == 1 else f"{place.name} ({number})"
            found.append(Place(name, place.path, place.lines, place.kinds))
    return found


def is_in_library(stack: traceback.StackSummary) -> bool:
    return any(frame.filename.startswith(str(LIBRARY)) for frame in stack)


def is_of_no_device(place: Place) -> bool:
    return any(place.name.partition(": ")[2].partition(" ")[0] in names for names in NO_DEVICES.values())
