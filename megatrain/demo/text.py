"""The text that the demo trains on, and the batches made of it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics

import torch

from megatrain.demo.recipe import Recipe

NUM_BYTES = 256


def read_corpus() -> tuple[bytes, bytes]:
    """Returns the help texts of Python itself: nine tenths to train on, the rest held out.

    Topics quote each other at length, so a paragraph counts only where it stands first; otherwise much of the
    held-out part would have been seen in training.
    """
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(p for p in paragraphs if p.strip())).encode()
    end = len(text) * 9 // 10
    return text[:end], text[end:]


def digest(text: bytes) -> str:
    """Tells one text from another: help pages differ between versions of Python."""
    return hashlib.sha256(text).hexdigest()


def unigram_entropy(training: bytes, held_out: bytes) -> float:
    """Nats per held-out byte under the byte frequencies of the training text, each count raised by one."""
    counts = Counter(training)
    total = len(training) + NUM_BYTES
    return -sum(n * math.log((counts[b] + 1) / total) for b, n in Counter(held_out).items()) / len(held_out)


def byte_tensor(text: bytes) -> torch.Tensor:
    """Returns the text as int64 token ids."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def random_batches(ids: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yields `[batch_size, context]` windows of the text, without end and in an order fixed by the seed."""
    order = torch.Generator().manual_seed(recipe.seed)
    while True:
        starts = torch.randint(len(ids) - recipe.context + 1, (recipe.batch_size,), generator=order)
        yield torch.stack([ids[s : s + recipe.context] for s in starts.tolist()])


def step_batches(
    text: bytes, recipe: Recipe, device: torch.device, first_step: int = 0
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yields the micro-batches of each step, as arguments of the model, from `first_step` on."""
    batches = random_batches(byte_tensor(text), recipe)
    batches = islice(batches, first_step * recipe.micro_batches, None)
    while True:
        moved = (ids.to(device) for ids in islice(batches, recipe.micro_batches))
        yield [{"input_ids": ids, "labels": ids} for ids in moved]
