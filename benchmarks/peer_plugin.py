"""One whole training step of megatrain, in the shape that an outside harness of trainers calls.

The harness passes a context with the model (`ctx.model(dtype)`), AdamW's settings (`ctx.adamw`), the gradient-norm
clip (`ctx.clip`, 0 for none), the dtype to compute in (`ctx.compute`) and the compute device (`ctx.device`), and gets
back `step(ids)`: token ids on the CPU in, the loss out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import megatrain

_Trainer = tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]


def train(ctx: Any, *, kernels: str = "eager", transfer: str = "auto") -> _Trainer:
    """Each layer is recomputed, as the others do."""
    return _trainer(ctx, activations="recompute", kernels=kernels, transfer=transfer)


def train_default(ctx: Any) -> _Trainer:
    """The same with the options that a user gets: megatrain chooses what is recomputed, and which kernels run."""
    return _trainer(ctx)


def _trainer(ctx: Any, **options: Any) -> _Trainer:
    """Returns the step function and facts about the run.

    Where the compute device is the host, weights are used in place, as FSDP2 does.

    Raises:
        ValueError: If the harness asks for another dtype than fp32 or bf16.
    """
    precisions = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    if ctx.compute not in precisions:
        raise ValueError(f"megatrain {megatrain.__version__} computes in fp32 or bf16, not in {ctx.compute}")
    precision = precisions[ctx.compute]
    model = ctx.model(torch.float32)
    compiled = megatrain.compile(model, device=ctx.device, precision=precision, **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True, **ctx.adamw)
    train_step = megatrain.TrainStep(compiled, optimizer, max_grad_norm=ctx.clip or None)

    def step(ids: torch.Tensor) -> torch.Tensor:
        on_device = ids.to(compiled.megatrain.options.device.torch_device)
        return train_step({"input_ids": on_device, "labels": on_device, "use_cache": False})

    return step, {"optimizer": "torch AdamW fused, block by block", "megatrain": megatrain.__version__}


def train_graphs(ctx: Any) -> _Trainer:
    """The same with eager's kernels, recorded."""
    return train(ctx, kernels="graphs")


def train_inductor(ctx: Any) -> _Trainer:
    """The same with kernels that torch.compile makes."""
    return train(ctx, kernels="inductor")


def train_copy(ctx: Any) -> _Trainer:
    """The same with weights that are copied into slots, as on an accelerator."""
    return train(ctx, transfer="copy")


def train_eager_inductor(ctx: Any) -> _Trainer:
    """Eager PyTorch with each layer checkpointed and compiled, all on the device; bf16 weights have fp32 masters."""
    model = ctx.model(ctx.compute)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile()
    model.train()
    parameters = list(model.parameters())
    has_masters = ctx.compute != torch.float32
    trained = [nn.Parameter(p.detach().float()) for p in parameters] if has_masters else parameters
    optimizer = torch.optim.AdamW(trained, fused=True, **ctx.adamw)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if has_masters:
            for parameter, master in zip(parameters, trained, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        if ctx.clip:
            torch.nn.utils.clip_grad_norm_(trained, ctx.clip)
        optimizer.step()
        if has_masters:
            with torch.no_grad():
                for parameter, master in zip(parameters, trained, strict=True):
                    parameter.copy_(master)
        return loss.detach()

    return step, {"optimizer": "torch AdamW fused" + ", fp32 masters" * has_masters, "torch": torch.__version__}
