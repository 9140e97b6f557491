"""Trains LoRA adapters of peft on a frozen Llama: weights cross to the device, gradients of adapters come back.

Its weights are random and small; nothing is downloaded. python examples/lora.py
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=8,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)
base = LlamaForCausalLM(config)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")).train()
model.print_trainable_parameters()
frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}

trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-3, fused=True)
compiled = megatrain.compile(model, device="cpu", memory="800KiB")  # with a GPU: megatrain.compile(model)
step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0)

ids = (torch.randint(128, (4, 1)) + torch.arange(16)) % 128
for number in range(30):
    loss = step({"input_ids": ids, "labels": ids})
    if number % 10 == 0 or number == 29:
        print(f"step {number + 1}: loss {loss.item():.3f}")

step.flush()
parameters = dict(model.named_parameters())
print(f"frozen weights unchanged: {all(torch.equal(parameters[name], values) for name, values in frozen.items())}")
weights = sum(p.nbytes for p in parameters.values())
print(f"weights {weights} B, the step takes {step.schedule.device_bytes} B of the device")
print(f"a step moves {step.schedule.h2d_bytes} B to the device and {step.schedule.d2h_bytes} B back")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    print(f"adapters take {Path(folder, 'adapter_model.safetensors').stat().st_size} B on disk")
