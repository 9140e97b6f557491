"""A head's loss in chunks of rows against the whole: time of forward and backward, and the memory that a plan counts.

    python -m benchmarks.heads --rows 4096 --width 512

Both run as megatrain's compiled calls, in pairs of one round; the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.base.sizes import format_bytes
from megatrain.passes.rewrites.head_loss import chunk_head_loss


class Head(nn.Module):
    """Hidden states, a linear head, and the loss of a language model."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, words, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of all rows."""
        return F.cross_entropy(self.linear(hidden).float(), labels)


def _seconds(call: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    start = time.perf_counter()
    call(*batch).backward()
    return time.perf_counter() - start


def _memory(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], passes: Any) -> int:
    """Bytes of the block beyond its weights and their gradients, at its forward with a graph and at its backward."""
    program = megatrain.lower(megatrain.trace(model, batch), rewrites=passes)
    cost = program.templates[program.blocks[-1].template].cost
    assert cost is not None
    return cost.saved_bytes + max(cost.forward_workspace_bytes, cost.backward_workspace_bytes)


def main() -> None:
    """Prints a line for the whole loss and one for each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--words", type=int, default=150000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Head(args.words, args.width)
    batch = torch.randn(args.rows, args.width, requires_grad=True), torch.randint(args.words, (args.rows,))
    passes: dict[str, Any] = {"whole": ()}
    passes |= {f"{rows} rows": (partial(chunk_head_loss, rows=rows),) for rows in args.chunks}
    calls = {name: megatrain.compile(model, device="cpu", passes=each) for name, each in passes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _seconds(call, batch)
    for _ in range(args.rounds):
        for name, call in calls.items():
            model.zero_grad()
            seconds[name].append(_seconds(call, batch))
    print(f"{args.rows} rows, {args.words} words, width {args.width}, fp32; {torch.get_num_threads()} threads")
    for name, times in seconds.items():
        ratio = statistics.median(one / whole for one, whole in zip(times, seconds["whole"], strict=True))
        nbytes = format_bytes(_memory(model, batch, passes[name]))
        print(f"{name:>9}: {statistics.median(times):.3f} s, {ratio:.3f} of the whole; {nbytes}")


if __name__ == "__main__":
    main()
