"""Compares whole training steps with the eager loop, and with the simulator's predictions.

All trainers take turns in one run; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import megatrain
from benchmarks.bench import Shape

CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Args:
        name: Printed.
        clip: Whether gradients are clipped.
        options: Of `TrainStep`; None is the eager loop.
        compile_options: Of `compile`.
    """

    name: str
    clip: bool
    options: dict[str, Any] | None = None
    compile_options: dict[str, Any] | None = None

    def step(self, compiled: megatrain.CompiledModule, lr: float = 1e-4) -> megatrain.TrainStep:
        """Makes a step that trains this way with fused AdamW."""
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=lr, fused=True)
        return megatrain.TrainStep(compiled, optimizer, max_grad_norm=CLIP if self.clip else None, **self.options or {})


WAYS = (
    Way("eager loop, checkpointed", clip=False),
    Way("spread", clip=False, options={"spread": True}),
    Way("overlap", clip=False, options={"spread": False}),
    Way("serial", clip=False, options={"overlap": False}),
    Way("overlap, bf16", clip=False, options={"spread": False}, compile_options={"precision": "bf16"}),
    Way("eager loop, checkpointed, clipped", clip=True),
    Way("deferred, clipped", clip=True, options={}),
    Way("serial, clipped", clip=True, options={"overlap": False}),
    Way("deferred, clipped, bf16", clip=True, options={}, compile_options={"precision": "bf16"}),
)


OF_UPDATES = {way.name: way for way in WAYS if way.options is not None and way.compile_options is None}
"""By name, those that differ in when updates run and whether gradients are clipped."""


class Trainer:
    """Trains its own copy of the model in one way."""

    def __init__(self, way: Way, shape: Shape, micro_batches: int, transfer: str):
        self.way = way
        model = shape.model()
        batch = shape.batch()
        parts = {name: tensor.chunk(micro_batches) for name, tensor in batch.items()}
        self._batches = [{name: chunks[i] for name, chunks in parts.items()} for i in range(micro_batches)]
        self._losses: list[float] = []
        self.step: megatrain.TrainStep | None = None
        if way.options is None:
            self._take = _eager(model, self._batches, CLIP if way.clip else None, shape.device)
            return
        compiled = megatrain.compile(
            model,
            device=shape.device,
            transfer=transfer,
            activations="recompute",
            **(way.compile_options or {}),
        )
        self.step = way.step(compiled)
        self._take = functools.partial(self.step, self._batches)

    def take(self) -> tuple[float, float]:
        """Returns the seconds of one step, and its loss."""
        start = time.perf_counter()
        loss = float(self._take())
        return time.perf_counter() - start, loss

    def predicted(self, runs: int) -> float | None:
        """Returns the seconds that the simulator gives the schedule, by times of its operations."""
        if self.step is None:
            return None
        measured = [self.step.measure(self._batches) for _ in range(runs)]
        return statistics.median(self.step.schedule.simulate(each).step_s for each in measured)


def _eager(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], clip: float | None, device: str
) -> Callable[[], torch.Tensor]:
    for block in model.get_submodule("model.layers").children():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    model.to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def take() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = model(**batch).loss / len(batches)
            loss.backward()
            total += loss.detach()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        return total

    return take


def measure(shape: Shape, rounds: int, micro_batches: int, transfer: str, names: list[str]) -> str:
    """Steps all ways in turn; returns the table."""
    ways = [way for way in WAYS if not names or any(name in way.name for name in names)]
    trainers = [Trainer(way, shape, micro_batches, transfer) for way in ways]
    for trainer in trainers:
        trainer.take()
        trainer.take()
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    losses: dict[str, float] = {}
    for index in tqdm(range(rounds), desc="steps", unit="round"):
        shift = index % len(trainers)
        for trainer in (*trainers[shift:], *trainers[:shift]):
            taken, losses[trainer.way.name] = trainer.take()
            seconds[trainer.way.name].append(taken)
    lines = [f"{'':<36}{'step':>10}{'ratio':>8}{'simulated':>12}{'of it':>8}{'loss':>10}"]
    for trainer in trainers:
        name = trainer.way.name
        base = seconds[next(w.name for w in ways if w.clip == trainer.way.clip and w.options is None)]
        ratio = statistics.median(a / b for a, b in zip(seconds[name], base, strict=True))
        median, simulated = statistics.median(seconds[name]), trainer.predicted(min(3, rounds))
        text = "-" if simulated is None else f"{simulated:.3f} s"
        part = "-" if simulated is None else f"{simulated / median:.2f}"
        lines.append(f"{name:<36}{median:>8.3f} s{ratio:>8.3f}{text:>12}{part:>8}{losses[name]:>10.5f}")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of the batch")
    parser.add_argument("--transfer", default="copy", choices=("copy", "bind"))
    parser.add_argument("--only", nargs="*", default=[], help="ways whose name contains one of these")
    options = parser.parse_args()
    shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    print(f"{sum(p.numel() for p in shape.model().parameters()) / 1e6:.0f}M parameters, {asdict(shape)}")
    print(measure(shape, options.rounds, options.micro_batches, options.transfer, options.only))


if __name__ == "__main__":
    main()
