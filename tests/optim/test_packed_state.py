"""Optimizers whose state is packed, whose code is compiled, or whose attributes compare by identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatrain
from megatrain.optim.per_parameter import register
from tests.comparing import assert_same
from tests.packed import Quantized

BUDGET = "24KiB"


class Rounded(Quantized):
    """State that only `copy_` writes, and nothing clones: what torchao's optimizers have."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            fresh = Quantized.of(args[1] + 1e-8)
            args[0].codes.copy_(fresh.codes)
            args[0].scale.copy_(fresh.scale)
            return args[0]
        if func is torch.ops.aten.clone.default:
            raise NotImplementedError("no clone")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Manager:
    """Shared by all optimizers, and equal to itself only."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {"bits": 8}


@register
class PackedMomentum(torch.optim.Optimizer):
    """Momentum in rows of codes, for matrices."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.manager = Manager()
        self.update: Any = torch.compile(PackedMomentum.plain_update, fullgraph=True, backend="eager")

    @staticmethod
    def plain_update(values: torch.Tensor, momentum: torch.Tensor, rate: float) -> torch.Tensor:
        return values - rate * momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    zeros = torch.zeros_like(p)
                    state["momentum"] = (
                        Rounded(zeros.to(torch.int8), zeros[:, :1].clone(), p.dtype) if p.dim() == 2 else zeros
                    )
                state["step"] += 1
                held = state["momentum"]
                plain = held.plain() if isinstance(held, Rounded) else held
                held.copy_(0.9 * plain + p.grad)
                now = held.plain() if isinstance(held, Rounded) else held
                p.copy_(self.update(p.detach(), now.clone(), group["lr"]))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def square(result: Any, batch: Any) -> torch.Tensor:
    return result.square().mean()


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: (v.codes, v.scale) if isinstance(v, Rounded) else v for k, v in state.items()}


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(number))


def test_steps_and_a_resumed_run_have_the_bits_of_the_loop(tmp_path: Path) -> None:
    eager, streamed, again = network(), network(), network()
    own, optimizer = PackedMomentum(eager.parameters()), PackedMomentum(streamed.parameters())
    options: dict[str, Any] = {"loss": square, "max_grad_norm": 0.05}
    step = megatrain.TrainStep(megatrain.compile(streamed, device="cpu", memory=BUDGET), optimizer, **options)
    for number in range(3):
        step(batch(number))
        eager(batch(number)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.05)
        own.step()
        own.zero_grad()
    step.flush()
    for one, other in zip(eager.parameters(), streamed.parameters(), strict=True):
        assert torch.equal(one, other)
        assert_same(plain(own.state[one]), plain(optimizer.state[other]))
    step.save(tmp_path / "run")
    compiled = megatrain.compile(again, device="cpu", memory=BUDGET)
    resumed = megatrain.TrainStep.load(tmp_path / "run", compiled, PackedMomentum(again.parameters()), **options)
    for number in range(3, 5):
        assert torch.equal(step(batch(number)), resumed(batch(number)))
    step.flush()
    resumed.flush()
    assert_same(list(streamed.parameters()), list(again.parameters()))


def test_a_plan_counts_inner_tensors() -> None:
    model = network()
    plan = megatrain.plan(model, batch(0), optimizer=PackedMomentum(model.parameters()), loss=square)
    assert plan.host.bytes_of("PackedMomentum.momentum") == 4 * (16 * 16 + 16 * 4 + 16 * 4)
