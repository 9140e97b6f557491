"""The small model that tests of other libraries' tools train, and how states are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.arange(16).reshape(2, 8)


def llama(*, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=is_tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key
