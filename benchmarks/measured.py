"""Training steps of large models on this machine's device, measured, next to what the simulator of schedules says.

The table has the columns of `benchmarks.device`, whose seconds are modelled for cards that aren't here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import megatrain
from benchmarks.llamas import CONTEXT, SIZES
from benchmarks.steps import OF_UPDATES
from megatrain.base.sizes import format_bytes
from megatrain.errors import MegatrainError


def rows(options: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the table, as they are known."""
    yield "| model | tokens | way | step (measured) | predicted | device memory, schedule | measured peak | loss |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in options.sizes:
        torch.manual_seed(0)
        model = SIZES[name].model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        compiled = megatrain.compile(
            model, device=options.device, precision="bf16", memory=options.memory, kernels=options.kernels
        )
        place = compiled.megatrain.options.device.torch_device
        ids = torch.randint(SIZES[name].vocabulary, (max(options.micro_batches), 1, CONTEXT)).to(place)
        for count in options.micro_batches:
            batch = [{"input_ids": one, "labels": one} for one in ids[:count]]
            for way in options.ways:
                if way == CALLS:
                    taken = _calls(compiled, batch, options.steps)
                    yield f"| {name} | {count * CONTEXT} | {way} | {taken:.3f} s | | | | |"
                    continue
                step = OF_UPDATES[way].step(compiled, lr=1e-5)
                head = f"| {name} | {count * CONTEXT} | {way} |"
                try:
                    yield f"{head} {_measured(compiled, step, batch, options.steps)} |"
                except MegatrainError as error:
                    yield f"{head} {str(error).splitlines()[0]} | | | | |"
                if options.profile:
                    yield _profile(step, batch)
                step.flush()


CALLS = "calls"
"""A way without updates: forward and backward, whose gradients go to the host."""


def _calls(compiled: megatrain.CompiledModule, batch: list[Any], count: int) -> float:
    seconds: list[float] = []
    for _ in range(count + 2):
        begin = time.perf_counter()
        for one in batch:
            compiled(**one).loss.backward()
        seconds.append(time.perf_counter() - begin)
        compiled.zero_grad()
    return statistics.median(seconds[2:])


def _profile(step: megatrain.TrainStep, batch: Any) -> str:
    """What takes one step's time, as torch's profiler counts: kernels where there is a card, and calls that launch."""
    with torch.profiler.profile() as profiler:
        float(step(batch))
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=48)


def _measured(compiled: megatrain.CompiledModule, step: megatrain.TrainStep, batch: Any, count: int) -> str:
    step(batch)
    float(step(batch))
    seconds: list[float] = []
    loss = 0.0
    for _ in range(count):
        begin = time.perf_counter()
        loss = float(step(batch))  # waits for the device
        seconds.append(time.perf_counter() - begin)
    taken = statistics.median(seconds)
    predicted = step.schedule.simulate(step.measure(batch)).step_s
    planned, peak = format_bytes(step.schedule.device_bytes), format_bytes(compiled.peak_bytes)
    return f"{taken:.3f} s | {predicted / taken:.3f} | {planned} | {peak} | {loss:.4f}"


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default=None, help="as for megatrain.compile")
    parser.add_argument("--memory", default=None, help="as for megatrain.compile")
    parser.add_argument("--kernels", default="eager", help="as for megatrain.compile")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1.5B"])
    parser.add_argument("--ways", nargs="+", choices=[*OF_UPDATES, CALLS], default=list(OF_UPDATES))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 8], help=f"each of {CONTEXT} tokens")
    parser.add_argument("--profile", action="store_true", help="one step more of each way under torch's profiler")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each way")
    for line in rows(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
