"""Training on the simulated device: eager there, and compiled for it, with inputs that differ in every step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import megatrain
from megatrain.hardware.hardware import Hardware
from megatrain.tracer.arguments import Structure
from tests.simulated_device.simulator import Simulator, Synchronization
from tests.training.parity import LossOf, loop_gradients

DEVICE = "sim"
SLOW_HOST = replace(Hardware.preset("rtx-4090"), host_bytes_per_s=1e8)
"""A machine whose updates are best made on the device, as far as it has room."""
ORDERS = ("late", "seeded", "late but compute", "late compute", "late h2d", "late d2h")
"""Orders of the streams in which a missing wait shows; `"early"` is the usual one."""


def choose(sim: Simulator, order: str, compiled: megatrain.CompiledModule | None = None, seed: int = 0) -> None:
    """Sets the order of the streams; which of the pool are those of transfers is known once they exist."""
    sim.order("early")
    if order == "late but compute":
        sim.late_but_default()
    elif order == "late compute":
        sim.order("late", torch.accelerator.current_stream())
    elif order in ("late h2d", "late d2h"):
        assert compiled is not None
        streams = compiled.megatrain.engine.streams
        stream = streams.h2d.device_stream if order == "late h2d" else streams.d2h.device_stream
        assert isinstance(stream, torch.Stream)
        sim.order("late", stream)
    elif order != "early":
        sim.order("late" if order == "late" else "seeded", seed=seed)


def on_device(values: Any) -> Any:
    """Moves the tensors of nested values there."""
    structure = Structure.of(values)
    return structure.fill([t.to(DEVICE) for t in structure.placeholders])


def varied(values: Any, seed: int) -> Any:
    """Other numbers in the same shapes: stale data is wrong data."""
    dice = torch.Generator().manual_seed(seed)
    structure = Structure.of(values)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor + 0.1 * torch.randn(tensor.shape, generator=dice).to(tensor.dtype)
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=dice)].view(tensor.shape)

    return structure.fill([other(t) for t in structure.placeholders])


def host_copy(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def loss_of(result: Any) -> torch.Tensor:
    """One number to which every differentiable output contributes."""
    terms = [t.abs().mean() if t.is_complex() else t.float().sin().mean() for t in _differentiable(result)]
    return torch.stack(terms).sum()


def _differentiable(result: Any) -> list[torch.Tensor]:
    return [t for t in Structure.of(result).placeholders if t.requires_grad]


def trained(
    call: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any, *, steps: int = 2, seed: int = 0
) -> list[list[torch.Tensor]]:
    """Takes steps of SGD, each of other inputs; returns outputs, gradients and state of each."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    torch.manual_seed(seed)
    found: list[list[torch.Tensor]] = []
    for number in range(steps):
        inputs, keywords = on_device(varied((args, kwargs), 10 * seed + number))
        optimizer.zero_grad()
        result = call(*inputs, **keywords)
        loss_of(result).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        kept = host_copy([*Structure.of(result).placeholders, *grads])
        optimizer.step()
        found.append([*kept, *host_copy([*model.parameters(), *model.buffers()])])
    return found


def step_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], loss: LossOf, max_norm: float | None
) -> torch.Tensor:
    """A step of eager PyTorch that keeps the model on the host, as a `TrainStep` does.

    Forward and backward run on the device; the norm, clipping and the update on the host.
    """
    there = eager_copy(model).train(model.training)
    found = loop_gradients(there, batches, loss=loss, device=DEVICE)
    for parameter, computed in zip(model.parameters(), there.parameters(), strict=True):
        parameter.grad = None if computed.grad is None else computed.grad.cpu()
    for buffer, computed in zip(model.buffers(), there.buffers(), strict=True):
        buffer.copy_(computed)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return found


def eager_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(DEVICE)


def compiled_copy(model: nn.Module, **options: Any) -> tuple[megatrain.CompiledModule, nn.Module]:
    streamed = copy.deepcopy(model)
    return megatrain.compile(streamed, device=DEVICE, **options), streamed


class Chain(nn.Module):
    """Equal layers."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


def held_bytes() -> int:
    """Bytes on the device when nothing runs."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_allocated()


def on_launching_threads(found: Sequence[Synchronization]) -> list[str]:
    """Waits for the device outside of megatrain's own threads."""
    return [str(one) for one in found if not one.thread.startswith("megatrain-")]
