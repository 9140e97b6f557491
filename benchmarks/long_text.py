"""Trains a Llama on one long text on this machine's CPU, within a budget that is too little without rewrites.

It prints the refusal of the plan without chunks and tiles, the plan with them, and the measured peak and seconds of
each step. On a text that eager PyTorch can hold it compares losses and gradients of chunks and tiles with eager's. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from benchmarks.bench import PeakMemory
from megatrain.base.sizes import format_bytes
from megatrain.errors import ScheduleError


def model_of(options: argparse.Namespace) -> nn.Module:
    """Returns a Llama with tied embeddings and random weights, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.depth,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 256),
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def text(options: argparse.Namespace, tokens: int, number: int) -> dict[str, torch.Tensor]:
    """Returns one text of random words."""
    ids = torch.randint(options.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def refusal(model: nn.Module, batch: Any, memory: str) -> str:
    """Why a step without rewrites doesn't fit."""
    try:
        megatrain.plan(
            model, example_kwargs=batch, device="cpu", device_memory=memory, optimizer="AdamW", chunking="never"
        ).check()
    except ScheduleError as error:
        return str(error).splitlines()[0]
    return "it fits"


def steps(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines about the plan and each step."""
    model = model_of(options)
    count = sum(parameter.numel() for parameter in model.parameters())
    yield f"{count / 1e6:.0f}M parameters, fp32, {options.tokens} tokens, {options.memory} of device memory"
    yield f"without chunks and tiles: {refusal(model, text(options, options.tokens, 0), options.memory)}"
    compiled = megatrain.compile(model, device="cpu", memory=options.memory)
    step = megatrain.TrainStep(compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-4, fused=True))
    schedule = step.prepare(text(options, options.tokens, 0))
    rewritten = [line.strip() for line in str(step.program).splitlines() if "chunked(" in line or "tiled(" in line]
    yield f"chunks and tiles: {len(rewritten)}, such as {rewritten[-1] if rewritten else 'none'}"
    for number in range(options.steps):
        begin = time.perf_counter()
        with PeakMemory(0.05) as memory:
            loss = step(text(options, options.tokens, number)).item()
        step.flush()
        planned, measured = schedule.peak_bytes, compiled.peak_bytes
        yield (
            f"step {number}: loss {loss:.6f}, {time.perf_counter() - begin:.1f} s; peak of the device's memory planned "
            f"{format_bytes(planned)}, measured {format_bytes(measured)} ({measured / planned:.4f}), with what lies "
            f"between {format_bytes(schedule.device_bytes)}; process {format_bytes(memory.nbytes)}"
        )


def exactness(options: argparse.Namespace) -> Iterator[str]:
    """Yields a line that compares chunks and tiles with eager's numbers, on a text that eager holds."""
    model, batch = model_of(options), text(options, options.check, 0)
    eager = copy.deepcopy(model)
    expected = eager(**batch).loss
    expected.backward()
    compiled = megatrain.compile(model, device="cpu", chunking="always")
    loss = compiled(**batch).loss
    loss.backward()
    worst, equal, pairs = 0.0, 0, list(zip(eager.parameters(), model.parameters(), strict=True))
    for whole, part in pairs:
        assert whole.grad is not None
        assert part.grad is not None
        equal += torch.equal(whole.grad, part.grad)
        worst = max(worst, float((whole.grad - part.grad).norm() / whole.grad.norm()))
    yield (
        f"{options.check} tokens, all in chunks and tiles: loss {loss.item():.6f}, eager's {expected.item():.6f} "
        f"({'the same bits' if torch.equal(loss, expected) else 'other bits'}); {equal} of {len(pairs)} gradients have "
        f"the same bits, all are within {worst:.1e} of their norm"
    )


def main() -> None:
    """Prints line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--memory", default="3GiB", help="of the device, which is the CPU")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=150000)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--check", type=int, default=2048, help="tokens of the text that eager holds, too")
    options = parser.parse_args()
    for line in exactness(options):
        print(line, flush=True)
    for line in steps(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
