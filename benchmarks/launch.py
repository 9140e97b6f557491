"""Measures the microseconds that a layer of tiny width takes each thread; see benchmarks/README.md.

At such a width kernels take next to no time, so what is left is launching: PyTorch's own, and ours around it. A layer's
share is the difference of two depths, so that embedding, head and loss drop out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import megatrain
from benchmarks.bench import Shape
from megatrain.passes.interpret import Code
from megatrain.passes.program import Program
from megatrain.tracer.spec import TensorSpec

TINY = Shape(width=64, vocabulary=64, context=8, batch_size=1)
BASE = "eager, checkpointed"
Take = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Made:
    """A model that steps in one way.

    Args:
        take: Takes a step.
        program: What it runs, once a step was taken; None of eager PyTorch.
        micro_batches: How often.
    """

    take: Take
    program: Callable[[], Program] | None = None
    micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a step.

    Args:
        name: Printed.
        make: Makes what takes steps of a model with a batch.
    """

    name: str
    make: Callable[[nn.Module, dict[str, torch.Tensor]], Made]


class Alone:
    """The torch calls of a step alone: the forward of each block, then that with its backward, on tensors made once.

    Args:
        made: What takes the step, once it has.
    """

    def __init__(self, made: Made):
        assert made.program is not None
        program, self._repeats = made.program(), made.micro_batches
        codes = {name: Code(template.graph) for name, template in program.templates.items()}
        self._blocks: list[tuple[Code, list[torch.Tensor], list[int], list[torch.Tensor]]] = []
        for block in program.blocks:
            known = [(program.values[name].spec, program.values[name].requires_grad) for name in block.inputs]
            known += [(program.state[key].spec, program.state[key].requires_grad) for key in block.binding]
            given = [_filled(spec, requires_grad=flag) for spec, flag in known]
            outputs = codes[block.template](given)
            roots = [place for place, output in enumerate(outputs) if output.requires_grad]
            seeds = [torch.ones_like(outputs[place]) for place in roots]
            self._blocks.append((codes[block.template], given, roots, seeds))

    def take(self) -> None:
        """Makes the calls of all micro-batches."""
        for _ in range(self._repeats):
            for code, given, _, _ in self._blocks:
                code(given)
            for code, given, roots, seeds in reversed(self._blocks):
                outputs = code(given, is_checked=False)
                leaves = [tensor for tensor in given if tensor.requires_grad]
                if roots:
                    torch.autograd.grad([outputs[place] for place in roots], leaves, seeds, allow_unused=True)


def _filled(spec: TensorSpec, *, requires_grad: bool) -> torch.Tensor:
    """A tensor of small values, or of the first token."""
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    return torch.full(spec.shape, 0.01, dtype=spec.dtype).requires_grad_(requires_grad)


def _eager(model: nn.Module, batch: dict[str, torch.Tensor], *, checkpoints: bool) -> Made:
    if checkpoints:
        for block in model.get_submodule("model.layers").children():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def take() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    return Made(take)


def _call(model: nn.Module, batch: dict[str, torch.Tensor], *, transfer: str) -> Made:
    compiled: Any = megatrain.compile(model, device="cpu", transfer=transfer, activations="recompute")

    def take() -> None:
        compiled(**batch).loss.backward()
        model.zero_grad()

    return Made(take, lambda: compiled.program)


def _step(model: nn.Module, batch: dict[str, torch.Tensor], *, precision: str, micro_batches: int) -> Made:
    compiled: Any = megatrain.compile(
        model, device="cpu", transfer="copy", activations="recompute", precision=precision
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-4, fused=True)
    step = megatrain.TrainStep(compiled, optimizer, spread=False)
    return Made(functools.partial(step, [batch] * micro_batches), lambda: step.program, micro_batches)


WAYS = (
    Way("eager", functools.partial(_eager, checkpoints=False)),
    Way(BASE, functools.partial(_eager, checkpoints=True)),
    Way("call, bind", functools.partial(_call, transfer="bind")),
    Way("call, copy", functools.partial(_call, transfer="copy")),
    Way("TrainStep", functools.partial(_step, precision="fp32", micro_batches=1)),
    Way("TrainStep, bf16", functools.partial(_step, precision="bf16", micro_batches=1)),
    Way("TrainStep, 4 micro-batches", functools.partial(_step, precision="fp32", micro_batches=4)),
    Way("TrainStep, 4 micro-batches, bf16", functools.partial(_step, precision="bf16", micro_batches=4)),
)


def _processor_s() -> dict[str, float]:
    """Returns the processor time of each of this process's Python threads so far, by name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            found[thread.name] = found.get(thread.name, 0.0) + time.clock_gettime(clock)
    return found


def _timed(take: Take, steps: int) -> dict[str, float]:
    """Returns the seconds of a step: of the wall, of the process, and of each thread."""
    before, process, start = _processor_s(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        take()
    found = {"wall": time.perf_counter() - start, "process": time.process_time() - process}
    after = _processor_s()
    found |= {name: after[name] - before.get(name, 0.0) for name in after}
    return {name: seconds / steps for name, seconds in found.items()}


COLUMNS = ("wall", "process", "MainThread", "megatrain-host", "megatrain-d2h", "megatrain-h2d")


def measure(depths: tuple[int, int], rounds: int, steps: int, names: list[str]) -> str:
    """Takes all ways in turn; returns the table."""
    ways = [way for way in WAYS if not names or way.name == BASE or any(name in way.name for name in names)]
    takes: dict[tuple[str, int], Take] = {}
    alone: dict[tuple[str, int], Take] = {}
    for way in ways:
        for depth in depths:
            shape = replace(TINY, depth=depth)
            made = way.make(shape.model(), shape.batch())
            takes[way.name, depth] = made.take
            for _ in range(3):
                made.take()
            if made.program is not None:
                alone[way.name, depth] = Alone(made).take
    layers = depths[1] - depths[0]
    found: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for _ in tqdm(range(rounds), desc="launch", unit="round"):
        for way in ways:
            less, more = (_timed(takes[way.name, depth], steps) for depth in depths)
            found[way.name].append({name: (more[name] - less.get(name, 0.0)) / layers * 1e6 for name in more})
            if (way.name, depths[0]) in alone:
                less, more = (_timed(alone[way.name, depth], steps) for depth in depths)
                found[way.name][-1]["alone"] = (more["MainThread"] - less["MainThread"]) / layers * 1e6
    heads = (
        "wall",
        "process",
        "main",
        "host",
        "d2h",
        "h2d",
        "wall / checkpointed",
        "main / checkpointed",
        "host / main",
        "own / main",
    )
    lines = [f"{'us a layer':<34}" + "".join(f"{head:>{max(9, len(head) + 2)}}" for head in heads)]
    for way in ways:
        medians = [statistics.median(each.get(name, 0.0) for each in found[way.name]) for name in COLUMNS]
        pairs = list(zip(found[way.name], found[BASE], strict=True))
        ratios = [statistics.median(mine[name] / base[name] for mine, base in pairs) for name in ("wall", "MainThread")]
        own = statistics.median(
            1 - each.get("alone", each["MainThread"]) / each["MainThread"] for each in found[way.name]
        )
        shares = [*ratios, medians[3] / max(medians[2], 1e-9), own]
        texts = [*(f"{value:.0f}" for value in medians), *(f"{share:.3f}" for share in shares)]
        lines.append(
            f"{way.name:<34}" + "".join(f"{t:>{max(9, len(h) + 2)}}" for t, h in zip(texts, heads, strict=True))
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--depths", type=int, nargs=2, default=(4, 20), help="decoder layers of the two models")
    parser.add_argument("--rounds", type=int, default=7, help="turns of all ways")
    parser.add_argument("--steps", type=int, default=5, help="steps of a way in each turn")
    parser.add_argument("--only", nargs="*", default=[], help="ways whose name contains one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(measure(tuple(options.depths), options.rounds, options.steps, options.only))


if __name__ == "__main__":
    main()
