"""Plans that know the slot of a card beside plans by the card's name: modelled steps. See benchmarks/README.md.

Copies take so much longer as the slot has less of the card's link. All three plans fit the budget, and are simulated
with the slot's rates.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator, Iterable
from dataclasses import replace
from itertools import product

from tqdm import tqdm

import megatrain
from benchmarks.plans import GIB, workload_of
from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.build import build
from megatrain.scheduler.step_kind import StepKind

CARDS = (("rtx-3080", 9), ("rtx-4090", 12), ("rtx-4090", 21), ("rtx-5090", 29))
"""And GiB of them."""
SHAPES = ((1024, 1), (4096, 1), (8192, 1), (2048, 8))
"""Texts of so many tokens, and how many of them."""


def seconds(workload: megatrain.Workload, count: int, card: str, budget: int, share: float) -> tuple[float, ...] | None:
    """Of a step by the card's name, by its slot, and by time with all rates known; None if no plan fits."""
    whole = megatrain.Hardware.preset(card)
    there = replace(whole, h2d_bytes_per_s=share * whole.h2d_bytes_per_s, d2h_bytes_per_s=share * whole.d2h_bytes_per_s)
    kind = StepKind("train", micro_batches=count, updates="spread", outputs="release")
    try:
        plans = [build(workload, kind, memory=budget, usual=usual) for usual in (whole, there)]
        plans.append(build(workload, kind, memory=budget, hardware=there))
    except ScheduleError:
        return None
    return tuple(plan.simulate(there).step_s for plan in plans)


def rows(shares: Iterable[float], sizes: Iterable[str]) -> Generator[str]:
    """Yields the lines of the table, as they are known."""
    yield "| model | tokens | card | budget | share of the link | by name | by slot | by time |"
    yield f"|{' --- |' * 8}"
    ratios: dict[tuple[bool, float], list[tuple[float, float]]] = {}
    for size, has_adapters, (tokens, count) in tqdm(list(product(sizes, (True, False), SHAPES)), disable=None):
        workload = workload_of(size, tokens, has_adapters=has_adapters)
        name = f"{size}, LoRA" if has_adapters else size
        for (card, gib), share in product(CARDS, shares):
            found = seconds(workload, count, card, gib * GIB, share)
            if found is not None:
                by_name, by_slot, by_time = found
                ratios.setdefault((has_adapters, share), []).append((by_slot / by_name, by_time / by_name))
                row = f"| {name} | {count} x {tokens} | {card} | {gib} GiB | {share:g} | {by_name:.4f} s |"
                yield f"{row} {by_slot / by_name:.3f} | {by_time / by_name:.3f} |"
    for (has_adapters, share), made in sorted(ratios.items(), reverse=True):
        means = (math.exp(sum(map(math.log, column)) / len(made)) for column in zip(*made, strict=True))
        texts = [f"{mean:.3f} ({min(column):.3f})" for mean, column in zip(means, zip(*made, strict=True), strict=True)]
        yield f"\n{'LoRA' if has_adapters else 'full'}, {share:g} of the link, {len(made)} cases: {', '.join(texts)}"


def main() -> None:
    """Prints a table in Markdown, and below it the geometric means and the least of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--sizes", nargs="+", default=["1.5B", "8B"])
    given = parser.parse_args()
    for line in rows(given.shares, given.sizes):
        print(line, flush=True)


if __name__ == "__main__":
    main()
