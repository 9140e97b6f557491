"""Each place where the library orders streams, or waits for the device, is needed; or a list says why it isn't.

The places are found in the source. A run without what one of them does must give other numbers in some order of the
streams, fail, or touch memory that it must not.
"""

from __future__ import annotations

import ast
import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import megatrain
from tests.simulated_device.loading import load
from tests.simulated_device.simulator import CallName, Simulator
from tests.simulated_runs.on_device import choose
from tests.simulated_runs.ordering_runs import RUNS

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


NOTICED: dict[str, str] = {
    "accelerator.seconds_since: each.event.synchronize": "timed",
    "accelerator.settle: torch.accelerator.synchronize": "measured",
    "accelerator.moment: event.record": "timed",
    "cuda.wait_for: stream.wait_event": "waited for as CUDA",
    "cuda._sleep_until: event.record": "waited for as CUDA",
    "cuda._sleep_until: event.synchronize": "waited for as CUDA",
    "interface.synchronize: stream.synchronize": "called",
    "interface.wait_for: event.synchronize": "bare",
    "measured._both_by_streams: before.record_event": "measured",
    "measured._both_by_streams: stream.wait_event": "measured",
    "measured._both_by_streams: moment.seconds_since": "measured",
    "kernels_alone.launch_s: device.moment().seconds_since": "measured",
    "kernels_alone.launch_s: device.moment().seconds_since (2)": "measured",
    "measured.copies: device.synchronize": "measured",
    "kernels_alone.seconds_of: device.settle": "measured",
    "kernels_alone.seconds_of: device.moment().seconds_since": "measured",
    "host_arena._unlock: device.settle": "dropped",
    "bus.to_host: self._arrive": "ringed",
    "bus.to_host: self._arrive (2)": "ringed",
    "bus._next: self._device.wait_for": "ringed",
    "bus._note: stream.record_event": "ringed",
    "bus._arrive: self._device.wait_for": "ringed",
    "device_updates._write_back: self._engine.streams.settle": "kept",
    "device_updates._write_back: self._engine.device.synchronize": "kept",
    "device_updates.device_tensors: self._engine.streams.settle": "kept",
    "engine.reserve_slots: self.streams.settle": "grown",
    "engine.release_slots: self.streams.settle": "walked",
    "gradients._land: self._bus.device.synchronize": "spread",
    "offload_buffers.download: self._device.synchronize": "normed",
    "events.run: queue.synchronize": "timed",
    "events._zero: moment.seconds_since": "timed",
    "events._seconds: moment.seconds_since": "timed",
    "stream._run: self._wait_for_mark": "overlap",
    "stream._run: self.device_stream.record_event": "overlap",
    "stream._wait_for_mark: device.wait_for": "bare",
    "stream._wait_for_mark: self.device_stream.wait_event": "overlap",
    "stream_set.begin: compute.wait_event": "evaluated",
    "stream_set.begin: compute.record_event": "called",
    "stream_set.begin: stream.wait_event": "called",
    "stream_set.finish: compute.wait_event": "bare",
    "stream_set.finish: stream.device_stream.record_event": "bare",
    "stream_set.finish: compute.record_event": "evaluated",
    "stream_set.finish: self.device.wait_for": "bare",
    "stream_set.settle: self.device.wait_for": "grown",
    "stream_set._settle_device: self.device.settle": "failed",
    "on_demand.get: self._wait": "walked",
    "on_demand._give_back: self._wait": "walked",
}
"""Places, and a run that notices each one that is dropped."""

_TRIED = "orders nothing: it tries whether the device has such calls at all"
_OF_RANKS = "a rank waits for others, which nothing of a device does; tests/ranks has runs of several"
_OF_FAKES = "threads wait for each other before anything is captured; fake tensors have no device's memory"
_UNLOCKED = "page-locked memory is waited for when it is unlocked, and copies of other memory have read it on return"
UNNOTICED: dict[str, str] = {
    "torch_features._make_first_fakes: made.wait": _OF_FAKES,
    "torch_features.run: never.wait": _OF_FAKES,
    "division.changed: self._masters.settle": _OF_RANKS,
    "rank_exchange._wait: run.step_trainer.wait": _OF_RANKS,
    "rank_exchange.totals: self._here.wait_for": _OF_RANKS,
    "rank_exchange.wait: self._parts.wait": _OF_RANKS,
    "rank_exchange.wait_summed: self._here.wait_for": _OF_RANKS,
    "updates._wait_or_take_over: self._exchange.wait": _OF_RANKS,
    "streamed._save_rng_state: several.wait": _OF_RANKS,
    "trainer.wait: self._updates.wait": _OF_RANKS,
    "trainer.wait: self._updates.wait (2)": _OF_RANKS,
    "updates.wait: self._exchange.wait": _OF_RANKS,
    "device_updates.bring: stream.record_event": _UNLOCKED,
    "device_updates._vacate: self._engine.device.wait_for": _UNLOCKED,
    "cuda.wait_for: event.query": "tells of an event that is over, for which nothing waits",
    "accelerator._try_event: self.new_stream().record_event": _TRIED,
    "accelerator._try_event: stream.wait_event": _TRIED,
    "accelerator._try_event: event.synchronize": _TRIED,
    "accelerator._try_copy: self.synchronize": _TRIED,
}
"""Places that no run notices when they are dropped, and why."""

ORDERS = ("late", "late but compute", "late compute")
MEASURING = ("timed", "measured")  # take seconds
PLACES = {place.name: place for place in all_places() if not is_of_no_device(place)}
ATTEMPTS = 8  # another thread may force the device's work first, so that a place isn't missed in each run


def test_each_place_of_the_source_is_listed():
    names = set(PLACES)
    assert names - {*NOTICED, *UNNOTICED} == set(), "name a run that notices it, or the reason why none does"
    assert {*NOTICED, *UNNOTICED} - names == set(), "not in the source any more"
    assert set(NOTICED) & set(UNNOTICED) == set()
    meant = {place.name.partition(": ")[2].partition(" (")[0] for place in all_places() if is_of_no_device(place)}
    assert set().union(*NO_DEVICES.values()) == meant, "not in the source any more"
    assert set(NOTICED.values()) == set(RUNS), "a run notices nothing"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (run in MEASURING)) for name, run in NOTICED.items()]
)
def test_a_run_without_one_place_is_noticed(sim: Simulator, name: str):
    expected = usual(NOTICED[name])
    assert any(is_noticed(sim, PLACES[name], NOTICED[name], expected) for _ in range(ATTEMPTS))


@pytest.mark.nightly
@pytest.mark.parametrize("run", RUNS)
def test_runs_are_right_in_each_order_without_what_is_listed(sim: Simulator, run: str):
    """And the library orders nothing at any other place."""
    expected, unknown = usual(run), list[str]()
    for kind in ORDERING:
        sim.drop_where(kind, unlisted(kind, unknown))
    assert all(same(expected, found) for found in results(sim, run))
    assert unknown == []


def unlisted(kind: CallName, unknown: list[str]) -> Callable[[traceback.StackSummary], bool]:
    """Drops a call of the list `UNNOTICED`, and notes one that comes from no place of the source."""

    def drop(stack: traceback.StackSummary) -> bool:
        here = [name for name, place in PLACES.items() if kind in place.kinds and place.is_in(stack)]
        if not here and is_in_library(stack):
            unknown.append("".join(traceback.format_list(stack[-3:])))
        return any(name in UNNOTICED for name in here)

    return drop


@functools.cache
def usual(run: str) -> list[torch.Tensor]:
    """What a run gives in the usual order."""
    return [tensor.detach().cpu().clone() for tensor in RUNS[run](load())]


def results(sim: Simulator, run: str) -> Iterator[list[torch.Tensor] | None]:
    """What a run gives in several orders; None if it failed."""
    for order in ORDERS:
        choose(sim, order)
        try:
            found = [tensor.detach() for tensor in RUNS[run](sim)]
            torch.accelerator.synchronize()
            sim.order("early")
            yield [tensor.cpu().clone() for tensor in found]
        except Exception:  # a run without one of its waits may end in any way; that is noticed too
            sim.order("early")
            torch.accelerator.synchronize()
            yield None


def is_noticed(sim: Simulator, place: Place, run: str, expected: list[torch.Tensor]) -> bool:
    sim.reset()
    gc.collect()
    torch.accelerator.empty_cache()  # else memory that other tests left is taken, and not what came back too early
    for kind in place.kinds:
        sim.drop_where(kind, place.is_in)
    noticed = any(not same(expected, found) for found in results(sim, run))
    gc.collect()
    noticed = bool(sim.violations()) or noticed
    sim.reset()
    return noticed


def same(left: list[torch.Tensor] | None, right: list[torch.Tensor] | None) -> bool:
    return left is not None and right is not None and len(left) == len(right) and all(map(torch.equal, left, right))
