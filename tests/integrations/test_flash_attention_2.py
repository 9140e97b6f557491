"""transformers' `attn_implementation="flash_attention_2"`, with stand-ins of flash-attn's kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import megatrain
from tests import varlen
from tests.comparing import assert_same

transformers = pytest.importorskip("transformers")
flash = pytest.importorskip("transformers.modeling_flash_attention_utils")


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return varlen.FlashAttnVarlenFunc.apply(q, k, v, cu_seqlens_q, max_seqlen_q, causal)


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False
) -> Any:
    rows, tokens = q.shape[:2]
    ends = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return flash_attn_varlen_func(q, k, v, ends, ends, tokens, tokens, causal=causal).view(rows, tokens, *q.shape[1:])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Llama that calls the kernels, as transformers has it where flash-attn is installed."""
    of_kernels = flash._lazy_define_process_function(flash_attn_varlen_func)
    for name, value in {
        "_loaded_implementation": "flash_attention_2", "_flash_fn": flash_attn_func,
        "_flash_varlen_fn": flash_attn_varlen_func, "_pad_fn": flash._pad_input, "_unpad_fn": flash._unpad_input,
        "_process_flash_kwargs_fn": of_kernels, "_process_with_kvcache_kwargs_fn": dict,
    }.items():  # fmt: skip
        monkeypatch.setattr(flash, name, value)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    made.config._attn_implementation = "flash_attention_2"
    return made


def rows(*masked: int) -> dict[str, Any]:
    """Two texts of 24 tokens, of which so many are padding."""
    ids = torch.randint(0, 64, (2, 24))
    mask = torch.tensor([[1] * (24 - each) + [0] * each for each in masked])
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def documents(*sizes: int) -> dict[str, Any]:
    """One row of such documents, as `DataCollatorWithFlattening` makes it."""
    ids = torch.randint(0, 64, (1, sum(sizes)))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(size) for size in sizes])[None]}


def with_ends(*sizes: int) -> dict[str, Any]:
    """The same, with `return_flash_attn_kwargs=True`."""
    ends, longest = torch.tensor([0, *sizes]).cumsum(0).int(), max(sizes)
    return documents(*sizes) | {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest
    }  # fmt: skip


def test_padded_packed_and_flattened_batches_have_the_stock_models_bits(model: Any):
    expected = copy.deepcopy(model)
    compiled = megatrain.compile(model, device="cpu")
    torch.manual_seed(1)
    batches = [
        rows(0, 0), rows(3, 9), rows(9, 3), documents(10, 20, 18), documents(15, 15, 18), documents(15, 15, 10, 8),
        with_ends(10, 20, 18), with_ends(20, 10, 18),
    ]  # fmt: skip
    for batch in batches:
        losses = [each(**batch).loss for each in (compiled, expected)]
        for loss in losses:
            loss.backward()
        assert_same(losses[1].detach(), losses[0].detach(), "loss")
        assert_same([p.grad for p in expected.parameters()], [p.grad for p in compiled.parameters()])
        compiled.zero_grad()
        expected.zero_grad()
    assert "FlashAttnVarlenFunc" in str(compiled.traced)
