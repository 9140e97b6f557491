"""lengths= on the simulated device: the trial walks there, and padding and cutting happen where the batch is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from tests.comparing import assert_same
from tests.simulated_device import Simulator
from tests.simulated_runs.on_device import DEVICE, choose


def test_batches_of_any_length_have_the_bits_of_padded_ones_there(sim: Simulator) -> None:
    choose(sim, "late")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2, use_cache=False))
    eager: Any = copy.deepcopy(model)
    eager.to(DEVICE)
    compiled: Any = megatrain.compile(model, device=DEVICE, memory="192KiB", lengths=8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, compiled)]
    step = megatrain.TrainStep(compiled, optimizers[1])
    for length in (5, 11, 7):
        ids = torch.randint(1, 60, (2, length)).to(DEVICE)
        more = -length % 8
        padded = torch.cat([ids, ids.new_zeros(2, more)], 1)
        labels = torch.cat([ids, ids.new_full((2, more), -100)], 1)
        loss = step({"input_ids": ids, "labels": ids})
        expected = eager(padded, labels=labels).loss
        expected.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert_same(expected.detach().cpu(), loss.cpu(), f"the loss of {length}")
        with torch.no_grad():
            logits = compiled(ids).logits
        assert logits.device == ids.device
        assert_same(eager(padded).logits[:, :length].detach().cpu().contiguous(), logits.cpu(), f"logits of {length}")
    step.flush()
    assert_same({k: p.detach().cpu() for k, p in eager.named_parameters()}, dict(model.state_dict()), "weights")
    captures = list(compiled.megatrain._variants)
    assert sum(each.lowered._is_training for each in captures) == 2
