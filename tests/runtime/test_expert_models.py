"""Unmodified mixtures of transformers, their stacked experts cut into groups, train as in eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from megatrain.runtime.streams.stream_set import Chaos
from tests.runtime.parity import assert_parity
from tests.tiers import diagonal, wide

# Several threads sum the gradient of `weight[ids]` in any order: then eager doesn't equal itself.
pytestmark = pytest.mark.usefixtures("one_thread")
CHAOS = Chaos(seed=3, max_delay_s=0.0003)


def largest(compiled) -> int:
    return max(compiled.program.state_bytes(block) for block in compiled.program.blocks)


def moe_model(name: str, implementation: str, **extra) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=8, num_experts=8, num_experts_per_tok=2,
        **extra,
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return getattr(transformers, f"{name}ForCausalLM")(config)


IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(2))
CALL = {"input_ids": IDS, "labels": IDS, "use_cache": False}


PRODUCTS = [("batched_mm", torch.float32), ("grouped_mm", torch.float32), ("grouped_mm", torch.bfloat16)]


@pytest.mark.parametrize(
    ("case", "products"),
    [
        *diagonal([("Qwen3Moe", False), ("Mixtral", False), ("Mixtral", True)], PRODUCTS),
        *(wide((("Qwen3Moe", True), products)) for products in PRODUCTS),
    ],
)
def test_transformers_experts_are_cut_and_train_as_in_eager(case: tuple[str, bool], products: tuple[str, torch.dtype]):
    name, has_router_loss = case
    implementation, dtype = products
    model = moe_model(name, implementation, output_router_logits=has_router_loss).to(dtype)
    limit = 4 * 32 * 64 * dtype.itemsize
    compiled = assert_parity(model, (), CALL, block_bytes=limit, transfer="copy", chaos=CHAOS)
    assert largest(compiled) <= limit
    bases = {entry.base for entry in compiled.program.state.values() if entry.base}
    assert len([b for b in bases if b.endswith("gate_up_proj")]) == 2
    assert ("aux_loss" in compiled(**CALL)) == has_router_loss


def test_adapters_on_frozen_experts_train_as_in_eager():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name it no longer likes
        model = peft.get_peft_model(moe_model("Mixtral", "batched_mm"), config)
    compiled = assert_parity(model, (), CALL, block_bytes=16384, transfer="copy", chaos=CHAOS)
    assert any(entry.base and not entry.requires_grad for entry in compiled.program.state.values())
