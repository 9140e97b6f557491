"""verify_trainer(): the first updates of a trainer that streams, next to those of its class without megatrain."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from megatrain.checks import checked, count, number, optional
from megatrain.counts import counted
from megatrain.device import Device
from megatrain.errors import ExecuteError
from megatrain.integrations.hf.trainer_report import KINDS, FirstUpdate, TrainerReport
from megatrain.runtime.rng import GlobalGenerators, kept_generators
from megatrain.runtime.streams.chaos import Recording
from megatrain.verification.compare import distance, scale_of
from megatrain.verification.report import Difference
from megatrain.verification.trial import generators

_LOGGED = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
_NOT_REPEATED = ("runtime", "per_second", "time", "_mem_")
"""Parts of names of logged values that depend on the clock, or on what else is in memory."""
Key = tuple[int, str, str]
"""Number of the update, kind, name."""


@dataclass(frozen=True, slots=True)
class Sides:
    """How the two trainers are made that are compared.

    Args:
        streamed: Makes a copy that streams; it writes into the folder, and its model's operations are recorded.
        stock: Makes a copy of the class without megatrain.
        names: Of the two classes.
        device: Compute device.
        model: The model that the copies are of.
        steps: How many training steps a streamed copy has taken, and why no more, if something is known.
    """

    streamed: Callable[[Path, Recording], Any]
    stock: Callable[[Path], Any]
    names: tuple[str, str]
    device: Device
    model: nn.Module
    steps: Callable[[Any], tuple[int, str | None]]


@dataclass(slots=True)
class _Outcome:
    """What a run of some updates left.

    Args:
        values: Everything that is compared.
        num_updates: How many it took.
        num_training_steps: How many were one training step.
        num_blocks: Of the streamed model.
        reason: Why not all were.
    """

    values: dict[Key, Any]
    num_updates: int
    num_training_steps: int = 0
    num_blocks: int = 0
    reason: str | None = None


@checked(
    updates=count(1, 10_000),
    tolerance=optional(number(least=0, below=math.inf, example=1e-3)),
)
def verify_trainer(sides: Sides, updates: int, tolerance: float | None) -> TrainerReport:
    """Trains both copies for some updates from the same state, and compares; see `Streamed.verify`."""
    allowed = tolerance or 0.0
    start = GlobalGenerators.now(sides.device)
    moved_from = dict(sides.model.named_parameters())
    with kept_generators(sides.device), tempfile.TemporaryDirectory() as folder:
        runs = _Runs(sides, updates, start, Path(folder))
        found = runs.streamed()
        expected = runs.stock()
        differences = list(_differences(expected.values, found.values, allowed, moved_from))
        first = None if all(d.ok for d in differences) else _first(runs, expected, allowed, moved_from)
    notes = [f"{found.reason}, so not every update was one training step"] if found.reason else []
    if found.num_updates < updates:
        notes.append(f"training ended after {counted(found.num_updates, 'update')}")
    differences.sort(key=lambda d: (*(-x for x in d.severity), d.step, KINDS.index(d.kind), d.name))
    return TrainerReport(
        tuple(differences),
        allowed,
        *sides.names,
        found.num_updates,
        found.num_training_steps,
        runs.num_operations,
        found.num_blocks,
        first,
        tuple(notes),
    )


def _first(runs: _Runs, expected: _Outcome, allowed: float, moved_from: Mapping[str, torch.Tensor]) -> FirstUpdate:
    """Repeats both, with all parameters read after each update, and finds the first value that differs."""
    again = runs.stock(reads=True)
    as_before = {key: value for key, value in again.values.items() if key in expected.values}
    itself = _earliest(expected.values, as_before, allowed, moved_from)
    if itself is not None:
        return FirstUpdate("stock", itself)
    parted = _earliest(again.values, runs.streamed(reads=True).values, allowed, moved_from)
    return FirstUpdate("unrepeatable" if parted is None else "streamed", parted)


def _earliest(
    expected: Mapping[Key, Any], found: Mapping[Key, Any], allowed: float, moved_from: Mapping[str, torch.Tensor]
) -> Difference | None:
    wrong = [d for d in _differences(expected, found, allowed, moved_from) if not d.ok]
    return min(wrong, key=lambda d: (d.step, KINDS.index(d.kind)), default=None)


@dataclass(slots=True)
class _Runs:
    """Runs copies from the same state, one after the other: only one is in memory.

    Attributes:
        num_operations: What the first streamed run ran on the device.
    """

    _sides: Sides
    _updates: int
    _start: GlobalGenerators
    _folder: Path
    num_operations: int = 0
    _count: int = 0

    def streamed(self, *, reads: bool = False) -> _Outcome:
        """Trains a copy that streams."""
        recording = Recording()
        trainer = self._sides.streamed(self._next_folder(), recording)
        ran = self._run(trainer, reads=reads)
        ran.num_training_steps, ran.reason = self._sides.steps(trainer)
        issued = sum(entry.stream == "compute" for entry in recording.issued)
        self.num_operations = self.num_operations or issued
        ran.num_blocks = len(trainer.model.program.blocks) if issued else 0
        return ran

    def stock(self, *, reads: bool = False) -> _Outcome:
        """Trains a copy of the class without megatrain."""
        return self._run(self._sides.stock(self._next_folder()), reads=reads)

    def _next_folder(self) -> Path:
        if self._count:
            gc.collect()  # the run before goes first, with what it has on the device
        self._count += 1
        return self._folder / str(self._count)

    def _run(self, trainer: Any, *, reads: bool) -> _Outcome:
        watch = _Watch(self._updates, reads=reads)
        trainer.add_callback(watch)
        self._start.restore(self._sides.device)
        trainer.train()
        drawn = generators(self._sides.device)
        if watch.num_updates == 0:
            raise ExecuteError(
                "the trainer took no update.\n  Two runs are compared by their updates.\n"
                "  Give it data for one update, and max_steps or num_train_epochs above 0."
            )
        last = watch.num_updates
        values = dict(_logged(trainer.state.log_history)) | watch.values | _tensors(trainer.model, last)
        values |= {(last, "optimizer", name): value for name, value in _optimizer_state(trainer)}
        values |= {(last, "rng", name): state for name, state in drawn.items()}
        return _Outcome(values, last)


class _Watch(TrainerCallback):
    """Ends training after some updates, and may read all state after each.

    Attributes:
        num_updates: Updates so far.
        values: What was read.
    """

    def __init__(self, updates: int, *, reads: bool) -> None:
        self.num_updates = 0
        self.values: dict[Key, Any] = {}
        self._updates = updates
        self._reads = reads

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each update."""
        self.num_updates += 1
        if self._reads:
            self.values |= _tensors(kwargs["model"], self.num_updates)
        if self.num_updates >= self._updates:
            control.should_training_stop = True


def _logged(history: list[dict[str, Any]]) -> Iterator[tuple[Key, Any]]:
    for row in history:
        for name, value in row.items():
            if name != "step" and not any(part in name for part in _NOT_REPEATED):
                kind = _LOGGED.get(name, "logged")
                yield (row["step"], kind, kind if name in _LOGGED else name), _comparable(value)


def _comparable(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(float(value), dtype=torch.float64, device="cpu") if is_number else value


def _tensors(model: nn.Module, update: int) -> dict[Key, Any]:
    """Copies of all parameters and buffers, on the host."""
    values: dict[Key, Any] = {(update, "parameter", n): _kept(p) for n, p in model.named_parameters()}
    return values | {(update, "buffer", n): _kept(b) for n, b in model.named_buffers()}


def _optimizer_state(trainer: Any) -> Iterator[tuple[str, Any]]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    for group, options in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(options["params"]):
            name = names.get(parameter, f"parameter {place} of group {group}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{name} {key}", _kept(value) if isinstance(value, torch.Tensor) else value


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _differences(
    expected: Mapping[Key, Any], found: Mapping[Key, Any], allowed: float, moved_from: Mapping[str, torch.Tensor]
) -> Iterator[Difference]:
    for key in dict.fromkeys([*expected, *found]):
        update, kind, name = key
        if key in expected and key in found:
            absolute, reason = distance(expected[key], found[key])
            relative = absolute / _scale(key, expected[key], moved_from) if absolute else 0.0
        else:
            absolute = relative = math.inf
            reason = "missing" if key in expected else "the stock run has nothing of that name"
        yield Difference(kind, name, update, absolute, relative, tolerance=allowed, reason=reason)


def _scale(key: Key, expected: Any, moved_from: Mapping[str, torch.Tensor]) -> float:
    """What a difference is relative to: of a parameter, how far training has moved it; else the largest value."""
    _, kind, name = key
    if kind == "parameter" and name in moved_from:
        moved, _ = distance(_kept(moved_from[name]), expected)
        if 0 < moved < math.inf:
            return moved
    return scale_of(expected)
