"""One whole training step of megatrain, in the shape that an outside harness of trainers calls.

The harness passes a context with the model (`ctx.model(dtype)`), AdamW's settings (`ctx.adamw`), the gradient-norm
clip (`ctx.clip`, 0 for none), the compute device (`ctx.device`) and a timer (`ctx.phases.run(name, function)`), and
gets back `step(ids)`: token ids on the CPU in, the loss out, the update done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import megatrain


def train(ctx: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """Returns the step function and facts about the run.

    Raises:
        ValueError: If the harness asks for bf16 compute, which this version doesn't have.
    """
    if ctx.compute != torch.float32:
        raise ValueError(f"megatrain {megatrain.__version__} computes in the parameters' own dtype: run with fp32")
    model = ctx.model(torch.float32)
    compiled = megatrain.compile(model, device=ctx.device, transfer="copy", activations="recompute")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **ctx.adamw)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        on_device = ids.to(compiled.options.device)
        return compiled(input_ids=on_device, labels=on_device, use_cache=False).loss

    def update() -> None:
        if ctx.clip:
            torch.nn.utils.clip_grad_norm_(parameters, ctx.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = ctx.phases.run("forward", lambda: forward(ids))
        ctx.phases.run("backward", loss.backward)
        ctx.phases.run("optimizer", update)
        return loss.detach()

    return step, {"optimizer": "torch AdamW fused on the host", "megatrain": megatrain.__version__}
