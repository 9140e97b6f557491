"""Training steps on this machine's CPU, beside what its rates predict: the machine is measured once, for all models.

`predicted` is `schedule.simulate(hardware)` by the median step, without a run of the model. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Generator

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


def rows(options: argparse.Namespace, machine: megatrain.Hardware) -> Generator[str]:
    """Yields the lines of the table, as they are known."""
    yield "| model | transfer | step | fastest and slowest | predicted | by its own times |"
    yield f"|{' --- |' * 6}"
    cases = [(name, transfer) for name in options.models for transfer in ("copy", "bind")]
    for name, transfer in tqdm(cases, unit="case", disable=None):
        shape = MODELS[name]
        compiled = megatrain.compile(shape.model(), device="cpu", transfer=transfer, activations="recompute")
        step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-4, fused=True))
        batch, seconds = shape.batch(), list[float]()
        for _ in range(options.steps + 2):
            begin = time.perf_counter()
            step(batch)
            seconds.append(time.perf_counter() - begin)
        taken = statistics.median(seconds[2:])
        predicted, own = (step.schedule.simulate(costs).step_s for costs in (machine, step.measure(batch)))
        spread = f"{min(seconds[2:]):.3f} to {max(seconds[2:]):.3f} s"
        yield f"| {name} | {transfer} | {taken:.3f} s | {spread} | {predicted / taken:.2f} | {own / taken:.2f} |"


def main() -> None:
    """Prints the machine, then a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    machine = megatrain.Hardware.measure("cpu", fresh=True)
    print(f"measured in {time.perf_counter() - begin:.1f} s, at a load of {os.getloadavg()[0]:.1f}\n{machine}\n")
    for line in rows(options, machine):
        print(line, flush=True)


if __name__ == "__main__":
    main()
