"""Compares megatrain with eager PyTorch under activation checkpointing: time, memory, time to compile.

Everything is measured in one run. Step times alternate, peer by peer, so that a busy machine slows all alike;
memory is measured in a fresh process per peer. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from megatrain.base.sizes import format_bytes

EAGER = "eager, checkpointed"
PEERS = (EAGER, "megatrain, bind", "megatrain, copy")
COMPILE_DEPTHS = (4, 32, 96)


@dataclass(frozen=True, slots=True)
class Shape:
    """The model and the batch that every peer gets."""

    depth: int = 12
    width: int = 768
    vocabulary: int = 16384
    context: int = 256
    batch_size: int = 2
    device: str = "cpu"

    def model(self) -> nn.Module:
        """Returns the model on the CPU, with the same random weights at every call."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.width * 8 // 3,
            num_hidden_layers=self.depth,
            num_attention_heads=max(1, self.width // 64),
            num_key_value_heads=max(1, self.width // 64),
            max_position_embeddings=self.context,
            use_cache=False,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        )
        return LlamaForCausalLM(config)

    def batch(self) -> dict[str, torch.Tensor]:
        """Returns token ids, which are their own labels, on the compute device."""
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(self.vocabulary, (self.batch_size, self.context), generator=draw).to(self.device)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to train the model: `forward` is what is called, `model` owns the parameters."""

    name: str
    model: nn.Module
    forward: nn.Module

    def step(self, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Returns the seconds of one forward and backward, and the loss; gradients are gone afterwards."""
        start = time.perf_counter()
        loss = self.forward(**batch).loss
        loss.backward()
        if loss.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        self.model.zero_grad()
        return seconds, loss.item()


def build_peer(name: str, shape: Shape) -> Peer:
    """Builds a peer with its own copy of the weights."""
    model = shape.model()
    if name == EAGER:
        for block in model.get_submodule("model.layers").children():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return Peer(name, model, model.to(shape.device))
    transfer: Any = name.rpartition(" ")[2]
    compiled = megatrain.compile(model, device=shape.device, transfer=transfer, activations="recompute")
    return Peer(name, model, compiled)


def measure_times(shape: Shape, num_rounds: int) -> dict[str, Any]:
    """Steps all peers in turn and compares each round's times with the eager one's of the same round."""
    peers = [build_peer(name, shape) for name in PEERS]
    batch = shape.batch()
    first = {peer.name: peer.step(batch) for peer in peers}
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    losses = {peer.name: loss for peer, (_, loss) in zip(peers, first.values(), strict=True)}
    for index in tqdm(range(num_rounds), desc="step times", unit="round"):
        shift = index % len(peers)
        # The first peer finds other caches than the last, so every peer takes every position.
        for peer in (*peers[shift:], *peers[:shift]):
            seconds[peer.name].append(peer.step(batch)[0])
    return {
        name: {
            "first_step_s": first[name][0],
            "step_s": steps,
            "median_step_s": statistics.median(steps),
            "ratio": statistics.median(a / b for a, b in zip(steps, seconds[EAGER], strict=True)),
            "loss": losses[name],
        }
        for name, steps in seconds.items()
    }


class PeakMemory:
    """Samples this process's resident bytes in a `with` block; `nbytes` is the largest sample."""

    def __init__(self, interval_s: float = 0.002):
        self.nbytes = 0
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._is_over.wait(self._interval_s):
            self.nbytes = max(self.nbytes, process.memory_info().rss)


def measure_memory(name: str, shape: Shape, num_steps: int = 3) -> dict[str, int]:
    """Returns the peak of resident bytes above the memory of Python and its imports, and the device's share.

    Meant for a process that has done nothing else.
    """
    before = psutil.Process().memory_info().rss
    with PeakMemory() as peak:
        peer = build_peer(name, shape)
        batch = shape.batch()
        for _ in range(num_steps):
            peer.step(batch)
    found = {"host_bytes": peak.nbytes - before}
    if isinstance(peer.forward, megatrain.CompiledModule):
        found["device_bytes"] = peer.forward.peak_bytes
        found["schedule_bytes"] = peer.forward.schedule.peak_bytes
    elif torch.device(shape.device).type != "cpu":
        found["device_bytes"] = torch.accelerator.max_memory_allocated()
    return found


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what the function returns in a new interpreter."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def measure_compile(depths: Sequence[int], repeats: int) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the best times to compile, from module to checked schedule, and to capture, by number of layers."""
    compiled: dict[int, float] = {}
    captured: dict[int, float] = {}
    for depth in tqdm(depths, desc="compile times", unit="depth"):
        shape = Shape(depth=depth, width=64, vocabulary=256, context=32, batch_size=1)
        model, batch = shape.model(), shape.batch()
        options: dict[str, Any] = {"device": "cpu", "transfer": "bind", "example_kwargs": batch}
        captured[depth] = min(_seconds(megatrain.trace, model, (), batch) for _ in range(repeats))
        compiled[depth] = min(_seconds(megatrain.compile, model, **options) for _ in range(repeats))
    return compiled, captured


def _seconds(work: Callable[..., Any], *args: Any, **options: Any) -> float:
    gc.collect()
    start = time.perf_counter()
    work(*args, **options)
    return time.perf_counter() - start


def growth(seconds: dict[int, float]) -> list[float]:
    """Returns the seconds per added decoder layer between depths; equal figures mean linear growth."""
    depths = sorted(seconds)
    return [(seconds[b] - seconds[a]) / (b - a) for a, b in pairwise(depths)]


def format_peers(times: dict[str, Any], memory: dict[str, dict[str, int]]) -> str:
    """Returns the table of peers."""
    lines = [f"{'':<20} {'step':>9} {'ratio':>6} {'first step':>11} {'process peak':>13} {'device peak':>12}"]
    for name, found in times.items():
        device = memory[name].get("device_bytes")
        lines.append(
            f"{name:<20} {found['median_step_s']:>7.3f} s {found['ratio']:>6.3f}"
            f" {found['first_step_s']:>9.2f} s {format_bytes(memory[name]['host_bytes']):>13}"
            f" {format_bytes(device) if device else '-':>12}"
        )
    return "\n".join(lines)


def format_compile(seconds: dict[int, float], captured: dict[int, float]) -> str:
    """Returns the table of compile times, and of those of its first part, the capture."""
    steps = [None, *growth(seconds)]
    lines = ["decoder layers   capture   compile   per added layer"]
    for depth, added in zip(sorted(seconds), steps, strict=True):
        times = f"{captured[depth]:>7.2f} s {seconds[depth]:>7.2f} s"
        lines.append(f"{depth:>14} {times}   {'-' if added is None else f'{1000 * added:.1f} ms':>15}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Describes what the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
    }


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    shape = Shape()
    for name, default in asdict(shape).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each peer")
    parser.add_argument("--repeats", type=int, default=3, help="compilations of each depth; the best counts")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    return parser.parse_args()


def main() -> None:
    """Measures everything, prints the tables and writes them as JSON."""
    options = parse_options()
    shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    num_parameters = sum(p.numel() for p in shape.model().parameters())
    tokens = f"{shape.batch_size} x {shape.context} tokens"
    print(f"{num_parameters / 1e6:.0f}M parameters, {tokens}, on {shape.device}")
    memory = {name: in_fresh_process(measure_memory, name, shape) for name in tqdm(PEERS, desc="memory", unit="peer")}
    times = measure_times(shape, options.rounds)
    compile_seconds, capture_seconds = measure_compile(COMPILE_DEPTHS, options.repeats)
    print(f"\n{format_peers(times, memory)}\n\n{format_compile(compile_seconds, capture_seconds)}")
    if len({found["loss"] for found in times.values()}) > 1:
        print("\nThe losses differ: " + ", ".join(f"{name} {found['loss']!r}" for name, found in times.items()))
    results = {
        "machine": machine(),
        "shape": asdict(shape),
        "num_parameters": num_parameters,
        "times": times,
        "memory": memory,
        "compile_s": compile_seconds,
        "capture_s": capture_seconds,
        "compile_s_per_added_layer": growth(compile_seconds),
    }
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
