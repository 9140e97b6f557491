"""Generating on the simulated device: the model's own code, its weights streamed, the cache there and in the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, LlamaConfig, LlamaForCausalLM

import megatrain
from tests.simulated_device import Simulator
from tests.simulated_runs.on_device import DEVICE, ORDERS, choose

IDS = torch.arange(16).reshape(2, 8)
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "min_new_tokens": 4,
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)).eval()


def bart() -> Any:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
        forced_eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def assert_generates_alike(compiled: Any, eager: Any, **options: Any) -> None:
    found, expected = (m.generate(IDS.to(DEVICE), **{**OPTIONS, **options}) for m in (compiled, eager))
    assert found.sequences.device == expected.sequences.device == torch.device(DEVICE, 0)
    assert torch.equal(found.sequences.cpu(), expected.sequences.cpu())
    assert len(found.logits) == 4
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [llama, bart])
def test_tokens_and_logits_are_those_of_eager_there(sim: Simulator, make: Any, order: str):
    model = make()
    eager = copy.deepcopy(model).to(DEVICE)
    compiled: Any = megatrain.compile(model, device=DEVICE, memory="96KiB" if make is llama else "128KiB")
    for _ in range(2):
        choose(sim, order, compiled if "late " in order else None)
        assert_generates_alike(compiled, eager)
        with torch.no_grad():
            for each in (*model.parameters(), *eager.parameters()):
                each.mul_(-1.5)
    figures = compiled.megatrain.walks.latest
    assert figures.h2d_bytes > 2 * sum(p.nbytes for p in model.parameters())
    assert figures.peak_bytes <= figures.budget_bytes


def test_the_cache_is_there_and_the_memory_is_that_of_the_budget(sim: Simulator):
    compiled: Any = megatrain.compile(llama(), device=DEVICE, memory="64KiB")
    ids = IDS.to(DEVICE)
    device = compiled.megatrain.options.device
    compiled.generate(ids, **OPTIONS)
    print(device.peak_bytes(), compiled.megatrain.walks.latest)
    before = torch.accelerator.memory_allocated()
    device.reset_peak()
    found = compiled.generate(ids, **OPTIONS)
    print(before, device.peak_bytes(), compiled.megatrain.walks.latest)
    assert found.past_key_values.layers[0].keys.device == ids.device
    assert 0
