"""Llamas of the sizes that people train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The shape of a Llama."""

    depth: int
    width: int
    inner: int
    heads: int
    groups: int
    vocabulary: int
    is_tied: bool = False
    head_width: int | None = None  # None is width / heads

    def model(self) -> nn.Module:
        """Returns the model; its parameters are in memory that nobody has written."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=self.head_width,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=self.is_tied,
            use_cache=False,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.to_empty(device="cpu")
        model.tie_weights()  # `to_empty` has given each module a parameter of its own
        # Its frequencies are no parameters: code that fills the parameters leaves them as they are.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model


SIZES = {
    "tiny": LlamaShape(2, 64, 128, 2, 2, 256),
    "1.5B": LlamaShape(28, 1536, 8960, 12, 2, 151936, is_tied=True),
    "3B": LlamaShape(28, 3072, 8192, 24, 8, 128256, is_tied=True),
    "4B": LlamaShape(36, 2560, 9728, 32, 8, 151936, is_tied=True, head_width=128),
    "8B": LlamaShape(32, 4096, 14336, 32, 8, 128256),
    "14B": LlamaShape(48, 5120, 13824, 40, 8, 152064),
}
