"""Trains a Hugging Face Llama with micro-batches, saves it, and compares one step with eager PyTorch.

Its weights are random and small; nothing is downloaded. python examples/hf_llama.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
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
)
model = LlamaForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
compiled = megatrain.compile(model, device="cpu", memory="800KiB")  # with a GPU: megatrain.compile(model)
step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=1.0)


def batch(number: int) -> list[dict[str, Any]]:
    """Four micro-batches of two texts that count upwards from random beginnings."""
    starts = torch.randint(128, (4, 2, 1), generator=torch.Generator().manual_seed(number))
    texts = (starts + torch.arange(16)) % 128
    # `use_cache=False`: otherwise the model returns keys and values, which stay on the device.
    return [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in texts]


for number in range(20):
    loss = step(batch(number))
    if number % 5 == 0 or number == 19:
        print(f"step {number + 1}: loss {loss.item():.3f}, norm {step.progress.grad_norm.item():.2f}")

weights = sum(p.nbytes for p in model.parameters())
print(f"weights {weights} B, the step takes {step.schedule.device_bytes} B of the device")

with tempfile.TemporaryDirectory() as folder:
    step.save(folder)  # a real run continues: megatrain.TrainStep.load(folder, compiled, optimizer, ...)
    read = LlamaForCausalLM.from_pretrained(folder)
    same = all(torch.equal(a, b) for a, b in zip(read.state_dict().values(), model.state_dict().values(), strict=True))
    print(f"from_pretrained reads {len(list(Path(folder).glob('*.safetensors')))} file(s), the same weights: {same}")

report = megatrain.verify(model, device="cpu", memory="800KiB", **batch(0)[0])
print(str(report).splitlines()[0])
