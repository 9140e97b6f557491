"""One whole training step of megatrain, in the shape that an outside harness of trainers calls.

The harness passes a context with the model (`ctx.model(dtype)`), AdamW's settings (`ctx.adamw`), the gradient-norm
clip (`ctx.clip`, 0 for none), the dtype to compute in (`ctx.compute`) and the compute device (`ctx.device`), and gets
back `step(ids)`: token ids on the CPU in, the loss out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import megatrain


def train(ctx: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """Returns the step function and facts about the run.

    Raises:
        ValueError: If the harness asks for another dtype than fp32 or bf16.
    """
    precisions = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    if ctx.compute not in precisions:
        raise ValueError(f"megatrain {megatrain.__version__} computes in fp32 or bf16, not in {ctx.compute}")
    precision = precisions[ctx.compute]
    model = ctx.model(torch.float32)
    compiled = megatrain.compile(
        model, device=ctx.device, transfer="copy", activations="recompute", precision=precision
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True, **ctx.adamw)
    train_step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=ctx.clip or None)

    def step(ids: torch.Tensor) -> torch.Tensor:
        on_device = ids.to(compiled.megatrain.options.device.torch_device)
        return train_step({"input_ids": on_device, "labels": on_device, "use_cache": False})

    return step, {"optimizer": "torch AdamW fused, block by block", "megatrain": megatrain.__version__}
