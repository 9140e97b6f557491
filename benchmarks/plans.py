"""Plans by the time of a step beside plans by rule: modelled steps, without a device. See benchmarks/README.md.

Each case is a model, a number of tokens, a machine and a budget. Both plans fit the budget; no plan that does is
shorter than `bound`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Generator
from itertools import product
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import megatrain
from benchmarks.llamas import CONTEXT, SIZES
from megatrain.base.sizes import format_bytes
from megatrain.errors import ScheduleError
from megatrain.scheduler.builder.bound import step_bound

# A card, and budgets on it: what a card leaves, and less.
BUDGETS = {
    "rtx-3080": (9,),
    "rtx-4090": (8, 21),
    "h100-sxm": (24, 71),
    "h200": (24, 126),
    "gh200": (24, 85),
}
# Texts of so many tokens, and how many of them.
SHAPES = ((256, 1), (1024, 1), (CONTEXT, 1), (8192, 1), (CONTEXT, 8))
RANK = 16
GIB = 1 << 30


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank term that is trained (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, device="meta")
        self.up = nn.Linear(RANK, base.out_features, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the term."""
        return self.base(x) + self.up(self.down(x))


def model_of(size: str, *, has_adapters: bool) -> nn.Module:
    """A Llama on the meta device, trained in full or by adapters of its attention."""
    model: Any = SIZES[size].model().to("meta")
    model.tie_weights()  # as in `LlamaShape.model`
    if has_adapters:
        model.requires_grad_(False)
        for path, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and path.endswith(("q_proj", "v_proj")):
                model.set_submodule(path, Adapter(layer))
    return model


def workload_of(size: str, tokens: int, *, has_adapters: bool) -> megatrain.Workload:
    """What a step of one text of so many tokens runs, in bf16 with AdamW."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    planned = megatrain.plan(
        model_of(size, has_adapters=has_adapters),
        example_kwargs={"input_ids": ids, "labels": ids},
        precision="bf16",
        optimizer="AdamW",
    )
    return planned.schedule.known_workload()


def rows(options: argparse.Namespace) -> Generator[str]:
    """Yields the lines of the table, as they are known."""
    yield "| model | tokens | card | budget | by rule | by time | ratio | bound | of bound | searched |"
    yield f"|{' --- |' * 10}"
    ratios: list[float] = []
    budgets = [(card, budget * GIB) for card in options.cards for budget in BUDGETS[card]]
    cases: list[tuple[str, bool, tuple[int, int]]] = list(product(options.sizes, (False, True), SHAPES))
    for size, has_adapters, (tokens, count) in tqdm(cases, unit="model", disable=None):
        workload = workload_of(size, tokens, has_adapters=has_adapters)
        name = f"{size}, LoRA" if has_adapters else size
        for card, budget in budgets:
            found = _compared(workload, count, megatrain.Hardware.preset(card), budget)
            head = f"| {name} | {count} x {tokens} | {card} | {format_bytes(budget)} |"
            if found is None:
                yield f"{head} doesn't fit | | | | | |"
                continue
            ruled, timed, bound, searched = found
            ratios.append(timed / ruled)
            yield (
                f"{head} {ruled:.4f} s | {timed:.4f} s | {timed / ruled:.3f} | {bound:.4f} s | {timed / bound:.3f} | "
                f"{searched:.1f} s |"
            )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    gains, least, most = sum(ratio < 0.999 for ratio in ratios), min(ratios), max(ratios)
    yield f"\n{len(ratios)} cases: mean {mean:.4f} (geometric), {least:.3f} to {most:.3f}; {gains} gain over 0.1 %."


def _compared(
    workload: megatrain.Workload, count: int, card: megatrain.Hardware, budget: int
) -> tuple[float, float, float, float] | None:
    """Seconds of the step by rule and by time, the second's bound, and of the search; None if no plan fits."""
    try:
        ruled = megatrain.schedule(workload, memory=budget, micro_batches=count, updates="spread", outputs="release")
    except ScheduleError:
        return None
    begin = time.perf_counter()
    timed = megatrain.schedule(
        workload, memory=budget, micro_batches=count, updates="spread", outputs="release", hardware=card
    )
    searched = time.perf_counter() - begin
    bound = step_bound(timed.effects(), budget, card).seconds
    return ruled.simulate(card).step_s, timed.simulate(card).step_s, bound, searched


def main() -> None:
    """Prints a table in Markdown, and the geometric mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1.5B", "8B", "14B"])
    parser.add_argument("--cards", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    for line in rows(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
