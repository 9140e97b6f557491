"""Trains a model that nearly fills host memory, and compares the memory of the process with the plan.

It makes random weights in a file, builds the model on meta, trains it, saves it, and trains on; with `--resume` another
process continues from the checkpoint, and prints the same losses. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import megatrain
from benchmarks.bench import PeakMemory
from megatrain.base.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2; by default those of 1.5 billion parameters."""

    vocab_size: int = 151936
    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    num_key_value_heads: int = 2

    def model(self) -> Qwen2ForCausalLM:
        """Makes it on meta, in bf16, with the buffers that are in no file."""
        config = Qwen2Config(**asdict(self), tie_word_embeddings=True)
        with torch.device("meta"):
            model: Any = Qwen2ForCausalLM(config)
            model.to(torch.bfloat16).train()
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model


def write_weights(model: nn.Module, path: Path) -> None:
    """Writes random values for the parameters of a model on meta."""
    generator = torch.Generator().manual_seed(0)
    values: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            values[name] = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).mul_(0.02)
        else:
            values[name] = torch.full(parameter.shape, float("norm" in name), dtype=parameter.dtype)
    save_file(values, path)


def held() -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


class Training:
    """Steps on one batch, each printed with the growth of the process since its start."""

    def __init__(self, options: argparse.Namespace):
        shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
        model = shape.model()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, shape.vocab_size, (options.batch_size, options.length), generator=generator)
        weights, self._saved = options.folder / "random.safetensors", options.folder / "saved"
        options.folder.mkdir(parents=True, exist_ok=True)
        if not weights.exists():
            write_weights(model, weights)
        self._batch: dict[str, Any] = {
            "input_ids": ids.to(options.device),
            "labels": ids.to(options.device),
            "use_cache": False,
        }
        self._start = held()
        self._clip = options.clip or None
        self._compiled = megatrain.compile(
            model,
            device=options.device,
            memory=options.memory,
            precision="bf16",
            weights=self._saved if options.resume else weights,
            example_kwargs=self._batch,
        )
        self._optimizer = torch.optim.AdamW(self._compiled.parameters(), lr=1e-4, fused=True)

    def begin(self, *, resume: bool) -> None:
        """Makes or loads the step, and prints its plan."""
        if resume:
            began = time.perf_counter()
            self._step = megatrain.TrainStep.load(
                self._saved, self._compiled, self._optimizer, max_grad_norm=self._clip
            )
            print(f"loaded in {time.perf_counter() - began:.0f} s")
        else:
            self._step = megatrain.TrainStep(self._compiled, self._optimizer, max_grad_norm=self._clip)
        self._step.prepare(self._batch)
        print(self._step.host_plan)

    def take(self, count: int) -> None:
        """Takes steps."""
        for _ in range(count):
            began = time.perf_counter()
            with PeakMemory(0.05) as peak:
                loss = float(self._step(self._batch))
            seconds, planned = time.perf_counter() - began, self._step.host_plan.total_bytes
            print(
                f"step {self._step.progress.count}: loss {loss.hex()} = {loss:.6f}, {seconds:.1f} s, host at most "
                f"{format_bytes(peak.nbytes - self._start)} of {format_bytes(planned)} planned",
                flush=True,
            )

    def save(self) -> None:
        """Saves."""
        began = time.perf_counter()
        self._step.save(self._saved)
        print(f"saved in {time.perf_counter() - began:.0f} s; host {format_bytes(held() - self._start)}", flush=True)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--folder", type=Path, required=True, help="for weights and checkpoint: 14 bytes a parameter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="2GiB", help="budget of device memory")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of all gradients; 0 is any")
    parser.add_argument("--steps", type=int, default=2, help="before it saves, and after")
    parser.add_argument("--resume", action="store_true", help="go on from what an earlier run has saved")
    options = parser.parse_args()
    training = Training(options)
    training.begin(resume=options.resume)
    if not options.resume:
        training.take(options.steps)
        training.save()
    training.take(options.steps)


if __name__ == "__main__":
    main()
