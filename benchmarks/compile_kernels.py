"""Time that compiled kernels take to make, and the time of steps with them: see benchmarks/README.md."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from tqdm import tqdm

import megatrain
from benchmarks.llamas import LlamaShape

_BATCH = 2
_LENGTH = 64


def llama(depth: int, width: int) -> nn.Module:
    """A Llama with random weights."""
    shape = LlamaShape(depth, width, 3 * width, width // 32, width // 32, 512)
    model = shape.model()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def first_step(depth: int, width: int, kernels: str) -> float:
    """Seconds of a model's first forward and backward, with an empty cache of kernels."""
    ids = torch.randint(512, (_BATCH, _LENGTH))
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        compiled: Any = megatrain.compile(llama(depth, width), device="cpu", kernels=kernels, activations="recompute")
        return timed(lambda: compiled(input_ids=ids, labels=ids).loss.backward())


def steps(depth: int, width: int, rounds: int) -> dict[str, float]:
    """Median seconds of a later forward and backward, by the kernels that take turns."""
    ids = torch.randint(512, (_BATCH, _LENGTH))
    ways: dict[str, Any] = {
        kernels: megatrain.compile(llama(depth, width), device="cpu", kernels=kernels, activations="recompute")
        for kernels in ("eager", "inductor")
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 2):
        for name, compiled in ways.items():
            seconds = timed(lambda compiled=compiled: compiled(input_ids=ids, labels=ids).loss.backward())
            if index > 1:  # the first make kernels and warm up
                found[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--depths", nargs="+", type=int, default=[24, 96])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way")
    parser.add_argument("--firsts", type=int, default=3, help="first steps of each way, whose medians count")
    options = parser.parse_args()
    warnings.simplefilter("error", megatrain.EagerKernelsWarning)
    torch.set_num_threads(2)
    first_step(2, options.width, "inductor")  # imports the compiler
    for depth in tqdm(options.depths, disable=None):
        firsts = [
            [first_step(depth, options.width, kernels) for kernels in ("eager", "inductor")]
            for _ in range(options.firsts)
        ]
        eager, inductor = (statistics.median(seconds) for seconds in zip(*firsts, strict=True))
        later = steps(depth, options.width, options.rounds)
        print(
            f"{depth} layers: first step {eager:.2f} s by eager's kernels, {inductor:.2f} s by inductor's "
            f"(kernels take {inductor - eager:.2f} s); later steps {later['eager']:.3f} s and "
            f"{later['inductor']:.3f} s, ratio {later['inductor'] / later['eager']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
