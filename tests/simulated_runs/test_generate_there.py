"""Generating on the simulated device: the model's own code, its weights streamed, the cache there and in the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

import megatrain
from megatrain.errors import ExecuteError
from tests.simulated_device import Simulator
from tests.simulated_runs.on_device import DEVICE, choose, held_bytes

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
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
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


@pytest.mark.parametrize(("make", "order"), [(llama, "late"), pytest.param(bart, "seeded", marks=pytest.mark.nightly)])
def test_tokens_and_logits_are_those_of_eager_there(sim: Simulator, make: Any, order: Any):
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
    assert figures.h2d_bytes > 1.9 * sum(p.nbytes for p in model.parameters())
    assert figures.peak_bytes <= figures.budget_bytes


def test_the_cache_is_there_and_the_devices_own_peak_is_in_the_budget(sim: Simulator):
    others = held_bytes()
    compiled: Any = megatrain.compile(llama(), device=DEVICE, memory="1MiB")
    ids, device = IDS.to(DEVICE), compiled.megatrain.options.device
    step = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    for _ in range(2):
        step({"input_ids": ids, "labels": ids, "use_cache": False})  # its slots make room for what is generated
        device.settle()
        before = others + ids.nbytes
        device.reset_peak()
        found = compiled.generate(ids, **OPTIONS)
        assert found.past_key_values.layers[0].keys.device == ids.device
        figures = compiled.megatrain.walks.latest
        assert device.peak_bytes() <= others + figures.budget_bytes
        assert device.peak_bytes() - before >= figures.peak_bytes * 0.9
        del found
        device.settle()
        assert torch.accelerator.memory_allocated() <= others + 4096


def test_more_than_the_budget_is_refused_and_everything_is_given_back(sim: Simulator):
    others = held_bytes()
    compiled: Any = megatrain.compile(llama(), device=DEVICE, memory="24KiB")
    ids = IDS.to(DEVICE)
    with pytest.raises(ExecuteError, match=r"generate\(\) needs more device memory than the budget of 24\.00 KiB"):
        compiled.generate(ids, **OPTIONS)
    assert held_bytes() <= others + 1024
