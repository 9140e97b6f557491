"""Says whether a model of the shape of Llama-2-7B can be trained on a card of 10 GiB, before anybody pays for the card.

The model is on the meta device: 6.7 billion parameters take no memory here. python examples/plan_before_you_rent.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain

config = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
    use_cache=False,
    attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
ids = torch.zeros(1, 2048, dtype=torch.long)

plans = {
    host_memory: megatrain.plan(
        model,
        device_memory="9GiB",  # of 10: the driver and the desktop keep the rest
        host_memory=host_memory,
        optimizer="AdamW",
        precision="bf16",
        micro_batches=8,
        max_grad_norm=1.0,
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    for host_memory in ("64GiB", "128GiB")
}
print(plans["128GiB"])

for host_memory, plan in plans.items():
    print(f"\na card of 10 GiB in a machine with {host_memory}: {'it fits' if plan.fits else 'it does not fit'}")
    try:
        plan.check()
    except megatrain.MegatrainError as error:
        print(error)
