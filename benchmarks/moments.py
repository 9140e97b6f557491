"""Trains a small language model with exact moments and with those of 8 bits: what `AdamW8bit` costs in accuracy.

The text is the source of Python's own library, in bytes; a part is held out. Each run begins with the weights of its
seed and sees the batches of its seed, so the only difference between two runs of a seed is the optimizer. Lines come as
the runs go; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain

HELD_OUT = 16  # sequences, evaluated at the end of each tenth


def text() -> torch.Tensor:
    """The bytes of Python's library, in a fixed order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.long)


def model_of(args: argparse.Namespace) -> nn.Module:
    """A Llama of this size over bytes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.layers,
            num_attention_heads=args.width // 64, num_key_value_heads=args.width // 64, tie_word_embeddings=True,
        )
    )  # fmt: skip


def run(args: argparse.Namespace, optimizer: str, seed: int) -> dict[str, float]:
    """Trains; returns the held-out loss after each tenth of the steps."""
    torch.manual_seed(seed)
    model, data = model_of(args), text()
    options = {"lr": args.lr, "betas": (0.9, args.beta2), "weight_decay": 0.1}
    is_coded = optimizer == "8bit"
    made: Any = (megatrain.AdamW8bit if is_coded else partial(torch.optim.AdamW, fused=True))(
        model.parameters(), **options
    )
    compiled = megatrain.compile(model, device="cpu")
    train = megatrain.TrainStep(compiled, made, max_grad_norm=1.0)
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # the training step calls no other
    warm = max(1, args.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        made, lambda step: min(1.0, (step + 1) / warm) * (1 - 0.9 * step / args.steps)
    )
    draws, split = torch.Generator().manual_seed(seed), int(len(data) * 0.95)
    starts = torch.linspace(split, len(data) - args.length - 1, HELD_OUT).long().tolist()
    held_out = torch.stack([data[start : start + args.length] for start in starts])
    losses: list[float] = []
    found: dict[str, float] = {}
    for step in range(args.steps):
        starts = torch.randint(0, split - args.length, (args.batch,), generator=draws).tolist()
        ids = torch.stack([data[start : start + args.length] for start in starts])
        losses.append(train({"input_ids": ids, "labels": ids}).item())
        scheduler.step()
        if (step + 1) % (args.steps // 10) == 0:
            with torch.no_grad():
                train.flush()
                found[str(step + 1)] = model(input_ids=held_out, labels=held_out).loss.item()
            mean = statistics.mean(losses[-args.steps // 10 :])
            print(
                f"{optimizer:>5} seed {seed} step {step + 1:>5}: {mean:.4f}, held out {found[str(step + 1)]:.4f}",
                flush=True,
            )
    return found


def main() -> None:
    """Prints the held-out losses of all runs, and their differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 512), ("layers", 7), ("length", 64), ("batch", 4), ("steps", 2000), ("seeds", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta2", type=float, default=0.999)
    args = parser.parse_args()
    count = sum(p.numel() for p in model_of(args).parameters())
    print(f"{count / 1e6:.1f} million parameters, {args.batch} x {args.length} bytes a step", flush=True)
    last = str(args.steps // 10 * 10)
    found = {(name, seed): run(args, name, seed)[last] for seed in range(args.seeds) for name in ("exact", "8bit")}
    between = [abs(found["exact", one] - found["exact", 0]) for one in range(1, args.seeds)]
    apart = [found["8bit", seed] - found["exact", seed] for seed in range(args.seeds)]
    print(json.dumps({"8bit - exact by seed": apart, "exact: other seeds - first": between}, indent=1))


if __name__ == "__main__":
    main()
