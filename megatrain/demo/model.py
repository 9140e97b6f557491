"""The demo's model, its loss on held-out text, and a sample of its writing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from megatrain.demo.recipe import Recipe
from megatrain.demo.text import NUM_BYTES, byte_tensor
from megatrain.errors import OptionError

# Every model config takes it, but no config class declares it.
_SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}


def build_model(recipe: Recipe) -> nn.Module:
    """Returns an unmodified Hugging Face decoder with random weights on the CPU.

    Raises:
        OptionError: If transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # it is there, but broken: its own message says how
        raise OptionError(
            "The demo trains a Hugging Face model, and transformers is not installed.\n"
            '  It is an optional dependency: pip install "megatrain[hf]"'
        ) from error
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=NUM_BYTES,
        hidden_size=recipe.width,
        intermediate_size=recipe.width * 11 // 4,
        num_hidden_layers=recipe.depth,
        num_attention_heads=max(1, recipe.width // 64),
        num_key_value_heads=max(1, recipe.width // 64),
        max_position_embeddings=recipe.context,
        use_cache=False,
        **_SDPA,
    )
    return LlamaForCausalLM(config)


def check_windows(text: bytes, recipe: Recipe) -> None:
    """Refuses a recipe whose step takes more than a text has, the held-out one being the shortest.

    Raises:
        OptionError: With both sizes.
    """
    if len(text) < recipe.tokens_per_step:
        raise OptionError(
            f"the held-out text has {len(text)} bytes, too few for the windows of one step.\n"
            f"  A step takes micro-batches x batch size x context = {recipe.tokens_per_step} bytes.\n"
            "  Take fewer windows, or shorter ones."
        )


@torch.no_grad()
def held_out_loss(model: nn.Module, text: bytes, recipe: Recipe, device: torch.device) -> float:
    """Returns nats per byte over the text, cut into windows; each window's first byte is only read."""
    ids = byte_tensor(text)
    check_windows(text, recipe)
    num_windows = len(ids) // recipe.tokens_per_step * recipe.windows_per_step
    batches = ids[: num_windows * recipe.context].view(-1, recipe.windows_per_step, recipe.context).to(device)
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in batches]
    return sum(losses) / len(losses)


@torch.no_grad()
def write_sample(
    model: nn.Module, prompt: bytes, recipe: Recipe, device: torch.device, *, temperature: float = 0.7
) -> str:
    """Lets the model continue `prompt`, one byte at a time, each drawn at the given temperature.

    The window keeps one shape, padded on the right, so one compiled variant serves every step; attention is
    causal, so what pads can't be seen.
    """
    model.eval()
    text = list(prompt)
    draw = torch.Generator().manual_seed(recipe.seed)
    for _ in tqdm(range(recipe.sample_bytes), desc="sampling", unit="B", leave=False, disable=None):
        seen = text[-recipe.context :]
        window = torch.tensor([seen + [0] * (recipe.context - len(seen))], device=device)
        logits = model(input_ids=window).logits[0, len(seen) - 1].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw)))
    return bytes(text).decode(errors="replace")


def state_bytes(model: nn.Module) -> int:
    """Returns the bytes of the model's parameters and buffers, a shared tensor once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
