"""Compares ways to update parameters on the host, in bytes per second, with a triad on the same memory.

Every way goes over the same parameters, once per round, one after the other, so that a busy machine slows all
alike; figures are medians. Bytes are counted from the code: AdamW over fp32 reads parameter, gradient and two moments
(16) and writes three of them (12), over split masters the same; the triad reads two arrays and writes one. Each number
of threads is measured in its own process. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.base.host_limits import update_threads
from megatrain.optim.fast.adamw import AdamWOptions, Moments, adamw_, fused_update, native_reason
from megatrain.optim.fast.adamw_8bit import AdamW8bitInOnePass
from megatrain.optim.fast.codes import new_state
from megatrain.optim.fast.path import ParameterUpdate, in_pieces
from megatrain.optim.masters.halves import Master, SplitMaster, WholeMaster
from megatrain.optim.norm import GradientNorm

OPTIONS = AdamWOptions(lr=1e-4)
TRIAD = "triad"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do the work: a name, the bytes it names per parameter, and the work."""

    name: str
    bytes_each: float
    run: Callable[[], object]


def ways(numel: int, *, inductor: bool, deepspeed: bool) -> list[Way]:
    """Makes the tensors, which all ways share, and the ways."""
    values, gradient = torch.randn(numel) * 0.02, torch.randn(numel) * 1e-3
    halves = SplitMaster.of(values)
    moments, narrow = (torch.zeros(numel), torch.zeros(numel)), gradient.bfloat16()
    parameter, out = torch.nn.Parameter(values), torch.zeros(numel)
    parameter.grad = gradient

    def ours(master: Master = halves, given: torch.Tensor = gradient) -> Callable[[], object]:
        return lambda: adamw_(master, moments, given, step=3, options=OPTIONS)

    @torch.no_grad()
    def on_pieces() -> None:
        for piece, wide, (mean, square) in in_pieces(halves, gradient, moments):
            fused_update(piece, wide, (mean, square), 3, OPTIONS)

    def of_torch(fused: bool) -> Callable[[], object]:
        optimizer = torch.optim.AdamW([parameter], lr=OPTIONS.lr, fused=fused, foreach=None if fused else False)
        state = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **state}
        return optimizer.step

    made = [
        Way(TRIAD, 12, lambda: torch.add(values, gradient, alpha=1e-9, out=out)),
        Way("gradient norm, torch", 4, lambda: GradientNorm([parameter]).add(0, {parameter: gradient})),
        Way("gradient norm, as on a GPU", 4, lambda: _norm(parameter, gradient)),
        Way("gradient norm, as on a GPU, bf16", 2, lambda: _norm(parameter, narrow)),
        Way("fp32, torch, operation by operation", 28, of_torch(fused=False)),
        Way("fp32, torch, fused", 28, of_torch(fused=True)),
        Way("split, torch's fused on pieces", 28, on_pieces),
    ]
    if native_reason() is None:
        made.append(Way("fp32, native", 28, ours(WholeMaster(values))))
        made.append(Way("split, native", 28, ours()))
        made.append(Way("split, native, bf16 gradient", 26, ours(halves, narrow)))
        made.append(Way("split, native, bf16 gradient, 8-bit moments", 14.375, _in_codes(halves, narrow)))
    if deepspeed:
        made.append(_of_deepspeed(parameter, moments))
    if inductor:
        made.extend(_of_inductor(values, halves, moments, gradient))
    return made


def _norm(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    norm = GradientNorm([parameter], [parameter], threads=torch.get_num_threads())
    norm.add(0, {parameter: gradient})


def _in_codes(master: SplitMaster, gradient: torch.Tensor) -> Callable[[], object]:
    path, state = AdamW8bitInOnePass(), new_state(gradient)
    moments, numbers = (tuple(state[name] for name in names) for names in (path.moments, path.numbers))
    given = ParameterUpdate(master, gradient, moments, numbers, OPTIONS)  # kept: the update knows addresses alone
    update = path.prepare([given])
    assert update is not None
    return lambda: update([given.gradient], [OPTIONS], [1.0])


def _of_deepspeed(parameter: torch.nn.Parameter, moments: Moments) -> Way:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    optimizer = DeepSpeedCPUAdam([parameter], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay, adamw_mode=True)
    optimizer.state[parameter] = {"step": 3, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return Way("fp32, DeepSpeedCPUAdam", 28, optimizer.step)


def _of_inductor(values: torch.Tensor, master: SplitMaster, moments: Moments, gradient: torch.Tensor) -> list[Way]:
    """The same arithmetic as one function of flat tensors, compiled by torch.compile."""

    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        return (p * (1 - 1e-6)).addcdiv(m, v.sqrt() / 0.05 + 1e-8, value=-1e-3)

    def over_fp32(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        p.copy_(step(p, g, m, v))

    def over_halves(high: torch.Tensor, low: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        bits = (high.to(torch.int32) << 16) + low.to(torch.int32)
        bits = step(bits.view(torch.float32), g, m, v).view(torch.int32)
        low.copy_(bits.to(torch.int16))
        high.copy_(((bits + 0x8000) >> 16).to(torch.int16))

    fp32, halves = torch.compile(over_fp32), torch.compile(over_halves)
    high, (m, v) = master.high.view(torch.int16), moments
    return [
        Way("fp32, Inductor", 28, lambda: fp32(values, gradient, m, v)),
        Way("split, Inductor", 28, lambda: halves(high, master.low, gradient, m, v)),
    ]


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Runs every way once per round and returns medians."""
    torch.set_num_threads(arguments.one)
    made = ways(arguments.params, inductor=arguments.inductor, deepspeed=arguments.deepspeed)
    seconds: dict[str, list[float]] = {way.name: [] for way in made}
    for way in made:
        way.run()  # touches all pages, and compiles
    for turn in range(arguments.rounds):
        for way in made[turn % len(made) :] + made[: turn % len(made)]:
            start = time.perf_counter()
            way.run()
            seconds[way.name].append(time.perf_counter() - start)
    rates = {way.name: [way.bytes_each * arguments.params / s for s in seconds[way.name]] for way in made}
    return {
        name: {
            "ms": statistics.median(seconds[name]) * 1e3,
            "GB/s": statistics.median(rate) / 1e9,
            "of triad": statistics.median(mine / triad for mine, triad in zip(rate, rates[TRIAD], strict=True)),
        }
        for name, rate in rates.items()
    }


def main() -> None:
    """Prints a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1 << 25)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="", help="such as 1,8,15; default: 1, and all but one, and all")
    parser.add_argument("--inductor", action="store_true", help="also what torch.compile makes of it")
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeedCPUAdam, where it is installed")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results_host.json"))
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    counts = [int(t) for t in arguments.threads.split(",") if t] or sorted(
        {1, update_threads(), update_threads(leave=0)}
    )
    results: dict[str, object] = {"cpu": platform.processor(), "torch": torch.__version__, "params": arguments.params}
    print(f"{arguments.params} parameters, {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    if native_reason() is not None:
        print(f"no native kernel: {native_reason()}")
    for count in counts:
        command = [sys.executable, "-m", "benchmarks.host_update", *sys.argv[1:], "--one", str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        table = results[f"{count} threads"] = json.loads(done.stdout.splitlines()[-1])
        print(f"\n{count} threads")
        for name, row in table.items():
            print(f"  {name:<38} {row['ms']:8.1f} ms  {row['GB/s']:7.1f} GB/s  {row['of triad']:5.2f} of the triad")
    arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
