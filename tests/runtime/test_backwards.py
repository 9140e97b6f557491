"""Backwards of compiled calls, and what autograd's other functions ask for, are those of eager PyTorch.

Any order and number of calls and backwards: `test_random_backwards.py`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from megatrain.runtime.streams.stream_set import Chaos, Recording
from tests.runtime.parity import assert_parity_of, seeded

WIDTH = 4


class Trunk(nn.Module):
    """Three residual layers with dropout, a buffer that is written, two heads; returns the trunk's output as well."""

    def __init__(self, p: float = 0.2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(p)) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.left = nn.Linear(WIDTH, 2)
        self.right = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x)
        return self.left(x), self.right(x), x


def batch(rows: int = 5, *, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).requires_grad_(requires_grad)


def test_backward_into_some_leaves_only() -> None:
    def drive(call, model):
        x = batch(requires_grad=True)
        for leaves in ([x], [model.left.weight], [x, model.layers[0][0].bias]):
            left, _, trunk = call(x)
            (left.sum() + trunk.square().sum()).backward(inputs=leaves)
        return x.grad

    assert_parity_of(seeded(Trunk), drive)


def test_an_output_twice_without_retaining_is_refused() -> None:
    compiled = megatrain.compile(seeded(Trunk), device="cpu")
    left, right, _ = compiled(batch())
    left.sum().backward()
    right.sum().backward()
    with pytest.raises(ExecuteError, match="backward ran a second time on the same output of a call"):
        (left * 2).sum().backward()


def test_create_graph_is_refused() -> None:
    compiled = megatrain.compile(seeded(Trunk), device="cpu")
    x = batch(requires_grad=True)
    with pytest.raises(ExecuteError, match="backward ran with create_graph=True"):
        torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)
    compiled(x)[0].sum().backward()


def test_changes_between_two_backwards_are_refused() -> None:
    model = seeded(Trunk).eval()
    model.right.requires_grad_(False)
    compiled, x = megatrain.compile(model, device="cpu"), batch()
    for changed in (model.left.weight, model.right.weight, x, model.norm.running_mean):
        left, right, _ = compiled(x)
        left.sum().backward(retain_graph=True)
        with torch.no_grad():
            torch.as_tensor(changed).add_(1)
        with pytest.raises(ExecuteError, match="modified"):
            right.sum().backward()


def test_a_second_backward_repeats_the_forward_and_writes_no_buffer() -> None:
    recording = Recording()
    model = seeded(Trunk)
    compiled = megatrain.compile(
        model, device="cpu", transfer="copy", activations="recompute", recording=recording, chaos=Chaos(max_delay_s=0)
    )
    left, right, _ = compiled(batch())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    forward = len(recording.labels("compute"))
    left.sum().backward(retain_graph=True)
    once = recording.labels("compute")
    right.sum().backward()
    assert recording.labels("compute") == once * 2
    assert len(once) > forward > 0
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_what_a_repeat_needs_is_let_go_of_with_the_last_output() -> None:
    compiled = megatrain.compile(seeded(Trunk), device="cpu", transfer="copy")
    left, right, trunk = compiled(batch())
    call = left.grad_fn.call
    left.sum().backward(retain_graph=True)
    left.sum().backward()
    assert call.start is not None
    (right.sum() + trunk.sum()).backward()
    assert call.start is None
    floor = compiled.megatrain.engine.meter.current
    for _ in range(3):
        compiled(batch())[0].sum().backward(retain_graph=True)
    gc.collect()
    assert compiled.megatrain.engine.meter.current == floor


def test_hooks_act_once_on_the_sum_over_calls() -> None:
    def drive(call, model):
        seen: list[tuple[str, torch.Tensor]] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g: g.clamp(-0.5, 0.5))
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen.append((n, p.grad.clone())))
        losses: list[Any] = [sum(t.square().sum() for t in call(batch(rows))) for rows in (5, 3)]
        (losses[0] + losses[1]).backward()
        return sorted(seen, key=lambda pair: pair[0])

    assert_parity_of(seeded(Trunk), drive)


def test_optimizer_in_the_backward() -> None:
    def drive(call, model):
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for rows in (5, 3):
            left, right, _ = call(batch(rows))
            (left.square().sum() + right.sum()).backward()

    assert_parity_of(seeded(Trunk), drive)


def test_a_hook_without_a_gradient_is_refused() -> None:
    model = seeded(Trunk)
    compiled = megatrain.compile(model, device="cpu")
    model.right.weight.register_hook(lambda g: g * 2)
    left, right, _ = compiled(batch())
    with pytest.raises(ExecuteError, match=r"parameter `right.weight` has a hook, but this backward has no gradient"):
        left.sum().backward()
    left, right, _ = compiled(batch())
    (left.sum() + right.sum()).backward()
