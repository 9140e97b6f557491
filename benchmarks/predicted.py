"""Training steps on this machine's CPU, beside what its rates predict: the machine is measured once, for all models.

`predicted` is `schedule.simulate(hardware)` by the median step, without a run of the model. A machine that others use
changes while it is measured: there each of several `--rounds` measures the machine and all models, and the median of
their ratios counts. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

import megatrain
from benchmarks.bench import Shape

MODELS = {
    "13M": Shape(depth=4, width=384, vocabulary=8192, context=256, batch_size=2),
    "30M": Shape(depth=6, width=512, vocabulary=8192, context=256, batch_size=2),
    "60M": Shape(depth=8, width=640, vocabulary=16384, context=256, batch_size=2),
    "110M": Shape(),
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model that trains, with one way of transfer."""

    name: str
    transfer: str
    step: megatrain.TrainStep
    batch: Any

    @staticmethod
    def of(name: str, transfer: str) -> Case:
        """Compiles it, and takes two steps that make what stays."""
        shape = MODELS[name]
        compiled = megatrain.compile(shape.model(), device="cpu", transfer=transfer, activations="recompute")
        step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-4, fused=True))
        case = Case(name, transfer, step, shape.batch())
        case.seconds(2)
        return case

    def seconds(self, count: int) -> list[float]:
        """Takes steps."""
        found: list[float] = []
        for _ in range(count):
            begin = time.perf_counter()
            self.step(self.batch)
            found.append(time.perf_counter() - begin)
        return found


def rows(options: argparse.Namespace) -> Generator[str]:
    """Yields a line for each case once all rounds are over; of ratios the median of the rounds counts."""
    cases = [Case.of(name, transfer) for name in options.models for transfer in ("copy", "bind")]
    taken: dict[Case, list[float]] = {case: [] for case in cases}
    predicted: dict[Case, list[float]] = {case: [] for case in cases}
    own: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in tqdm(range(options.rounds), unit="round", disable=None):
        begin = time.perf_counter()
        machine = megatrain.Hardware.measure("cpu", fresh=True)
        yield f"measured in {time.perf_counter() - begin:.1f} s, at a load of {os.getloadavg()[0]:.1f}\n{machine}\n"
        for case in cases:
            seconds = case.seconds(options.steps)
            middle, schedule = statistics.median(seconds), case.step.schedule
            taken[case] += seconds
            predicted[case].append(schedule.simulate(machine).step_s / middle)
            own[case].append(schedule.simulate(case.step.measure(case.batch)).step_s / middle)
    yield "| model | transfer | step | fastest and slowest | predicted | by its own times |"
    yield f"|{' --- |' * 6}"
    for case in cases:
        spread = f"{min(taken[case]):.3f} to {max(taken[case]):.3f} s"
        ratios = f"{_of_rounds(predicted[case])} | {_of_rounds(own[case])}"
        yield f"| {case.name} | {case.transfer} | {statistics.median(taken[case]):.3f} s | {spread} | {ratios} |"


def _of_rounds(ratios: list[float]) -> str:
    """The median, and if there are several the least and the most."""
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Prints the machine as each round measures it, then a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each, in a round")
    parser.add_argument("--rounds", type=int, default=1, help="each measures the machine, then all models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for line in rows(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
