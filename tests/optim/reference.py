"""fp32 masters with bf16 compute, written with nothing of megatrain: what `precision="bf16"` has to equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.masters.halves import read_
from megatrain.training.compiled.module import CompiledModule
from tests.comparing import assert_same_bits

Maker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
}


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Rounds finite fp32 values to the nearest bf16 value, ties away from zero; keeps the strides."""
    upper = (values.view(torch.int32).long() + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


def loss_of(result: Any) -> torch.Tensor:
    """Makes a scalar of an output: its own loss, or else the mean of squares."""
    if isinstance(result, tuple):
        result = result[-1]
    loss = getattr(result, "loss", None)
    result = getattr(result, "logits", result) if loss is None else loss
    return result.float().square().mean()


class Reference:
    """An eager copy of a model whose bf16 parameters are the high halves of fp32 ones, which an optimizer trains.

    A wholly fp32 model is narrowed; one that has bf16 parameters stays as it is. Masters are on the CPU.
    """

    def __init__(self, model: nn.Module, make: Maker, device: torch.device | str = "cpu"):
        self.model = copy.deepcopy(model)
        self.is_wide = all(p.dtype == torch.float32 for p in model.parameters())
        self.masters: dict[str, torch.Tensor] = {}
        for name, p in self.model.named_parameters():
            values = p.detach().float()
            is_narrow = self.is_wide or p.dtype == torch.bfloat16
            if p.requires_grad:
                self.masters[name] = nn.Parameter(values.clone()) if is_narrow else p
            if is_narrow:
                p.data = nearest(values) if p.requires_grad else values.bfloat16()
        self.optimizer = make(list(self.masters.values()))
        self.model.to(device)

    def step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
        """Takes one step; returns its loss."""
        self.model.zero_grad()
        if self.is_wide:
            args = [a.bfloat16() if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args]
        loss = loss_of(self.model(*args, **kwargs))
        loss.backward()
        self.update()
        return float(loss.detach())

    def update(self) -> None:
        """Takes the gradients to the masters, which step; rounds them into the model."""
        narrow = {n: p for n, p in self.model.named_parameters() if n in self.masters and self.masters[n] is not p}
        for name, p in narrow.items():
            self.masters[name].grad = None if p.grad is None else p.grad.cpu().float()
        self.optimizer.step()
        for name, p in narrow.items():
            p.data.copy_(nearest(self.masters[name].detach()))


class Loop:
    """A plain loop over a compiled model: forward, backward, and a step of its masters, in some blocks."""

    def __init__(self, model: nn.Module, compiled: CompiledModule, make: Maker):
        self.model, self.compiled = model, compiled
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make(parameters)
        step = MasterStep(compiled.masters)
        self.blocks = BlockOptimizer(self.optimizer, [parameters[:2], parameters[2:5], parameters[5:]], code=step)

    def step(self, args: Sequence[Any], kwargs: dict[str, Any], order: Sequence[int] = (2, 0, 1)) -> float:
        """Takes one step; returns its loss."""
        self.model.zero_grad()
        loss = loss_of(self.compiled(*args, **kwargs))
        loss.backward()
        self.update(order)
        return float(loss.detach())

    def update(self, order: Sequence[int] = (2, 0, 1)) -> None:
        self.blocks.begin()
        for block in order:
            self.blocks.update(block)
        self.blocks.finish()


def values_of(compiled: CompiledModule) -> dict[str, torch.Tensor]:
    """Reads all masters by name, in their parameters' shapes."""
    found: dict[str, torch.Tensor] = {}
    for name, p in compiled.megatrain.model.named_parameters():
        if p in compiled.masters:
            master = compiled.masters[p]
            flat = read_(torch.empty(master.shape), master).flatten()
            # Dense, in the order of its memory.
            found[name] = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
            found[name].as_strided((p.numel(),), (1,)).copy_(flat)
    return found


def assert_same_training(reference: Reference, loop: Loop) -> None:
    """Compares masters, the weights computed with, frozen ones, buffers and the optimizers' state, bit for bit."""
    masters = values_of(loop.compiled)
    assert masters.keys() == reference.masters.keys()
    names = {id(p): name for name, p in loop.model.named_parameters()}
    for name, expected in reference.masters.items():
        assert_same_bits(expected, masters[name], f"master of {name}")
    for name, expected in reference.model.state_dict().items():
        assert_same_bits(expected, loop.model.state_dict()[name], name)
    states = {names[id(p)]: state for p, state in loop.optimizer.state.items()}
    for name, master in reference.masters.items():
        expected = reference.optimizer.state.get(master, {})
        assert expected.keys() == states.get(name, {}).keys()
        for key, value in expected.items():
            assert_same_bits(value, states[name][key], f"{key} of {name}")
