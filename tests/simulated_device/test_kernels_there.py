"""Ops on the device have the CPU's numbers, and CUDA's rules for autocast and attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from tests.simulated_device.simulator import Simulator


def both(work, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)
    return work(*(t.to("sim") for t in tensors)).cpu(), work(*tensors)


@pytest.mark.parametrize("order", ["early", "late"])
@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.cat([x.t()[1:], x.t()[:1] * 2]).softmax(-1),
        lambda x: x[[0, 2]].masked_fill(x[:2] > 0, 3.0).cumsum(1),
        lambda x: x[x > 0],
        lambda x: torch.stack(torch.unbind(x.view(4, 2, 2).permute(2, 0, 1))).contiguous(),
        lambda x: F.layer_norm(x, (4,)).to(torch.bfloat16).float(),
        lambda x: x.unfold(0, 2, 1).sum((0, 2)),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 2, 2)) * 2j),
        lambda x: x.view(torch.int32) & 255,
        lambda x: torch.where(x > 0, x, x.new_zeros(())).topk(2).values,
        lambda x: torch.linalg.solve(x + 4 * torch.eye(4, device=x.device), x),
        lambda x: F.conv2d(x.view(1, 1, 4, 4), x.new_ones(2, 1, 3, 3), padding=1),
        lambda x: F.max_pool2d(x.view(1, 1, 4, 4), 2),
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: x.new_empty(0).new_zeros(3, 0),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x.expand(3, 4, 4).to(torch.float64).sum(0),
        lambda x: torch.stack([loss(x, x * 2) for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss)]),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, -100], device=x.device), reduction="none"),
        lambda x: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    ],
)
def test_ops_have_the_cpus_numbers(sim: Simulator, order, work):
    sim.order(order)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    found, expected = both(work, x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module(x).square().mean().backward()
    return [p.grad.cpu() for p in module.parameters()]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (3, 8)),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)),
            (2, 3, 8, 8),
        ),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    ],
)
def test_gradients_have_the_cpus_numbers(sim: Simulator, make, shape):
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    sim.order("late")
    for found, expected in zip(
        gradients(copy.deepcopy(module).to("sim"), x.to("sim")), gradients(module, x), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def options_there(options: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to("sim"), options)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bool_mask", "grouped"])
def test_attention_keeps_no_matrix_of_scores(sim: Simulator, kind: str):
    torch.manual_seed(0)
    heads = 2 if kind == "grouped" else 4
    q, k, v = (torch.randn(2, n, 64, 8, requires_grad=True) for n in (4, heads, heads))
    options: Any = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.randn(64, 64)},
        "bool_mask": {"attn_mask": torch.rand(2, 1, 64, 64) > 0.3},
        "grouped": {"enable_gqa": True},
    }[kind]
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    there = [t.detach().to("sim").requires_grad_() for t in (q, k, v)]
    moved = options_there(options)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    found = F.scaled_dot_product_attention(there[0], there[1], there[2], **moved)
    kept = torch.accelerator.memory_allocated() - before
    grads = torch.autograd.grad(found.square().sum(), there)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.cpu(), want, rtol=1e-4, atol=1e-5)
    if kind != "bool_mask":  # torch makes a mask of numbers
        assert kept < 2 * 4 * 64 * 64 * 4


def test_attention_with_dropout_takes_plain_products(sim: Simulator):
    q = torch.randn(1, 2, 16, 8, device="sim")
    assert F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).shape == q.shape


def test_autocast_has_cudas_lists(sim: Simulator):
    x = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        low = [F.linear(x, x), x @ x, torch.bmm(x[None], x[None]), F.conv1d(x[None], x[..., None])]
        half = x.to(torch.bfloat16)
        full = [
            F.softmax(half, -1),
            F.layer_norm(half, (4,)),
            half.exp(),
            half.sum(),
            F.mse_loss(half, half),
            half.norm(),
        ]
        mixed = torch.addcmul(x, half, half)
    assert {t.dtype for t in low} == {torch.bfloat16}
    assert {t.dtype for t in full} == {torch.float32}
    assert mixed.dtype == torch.float32


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


def test_tied_weights_stay_tied_on_the_device(sim: Simulator):
    model, x = Tied(), torch.tensor([[1, 2]])
    host = copy.deepcopy(model)
    parameter = model.head.weight
    model.to("sim")
    assert model.head.weight is model.table.weight is parameter
    assert len(list(model.parameters())) == 1
    model(x.to("sim")).square().sum().backward()
    host(x).square().sum().backward()
    torch.testing.assert_close(model.head.weight.grad.cpu(), host.head.weight.grad)
    assert model.to("cpu").head.weight is model.table.weight


def test_dropout_scales_and_drops_the_same_in_backward(sim: Simulator):
    x = torch.ones(1000, device="sim", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert sorted(y.detach().unique().tolist()) == pytest.approx([0, 4 / 3])
    assert (x.grad == y.detach()).all()


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_has_the_cpus_numbers(sim: Simulator, fused: bool):
    def trained(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(20).to(device).requires_grad_()
        optimizer = torch.optim.AdamW([x], lr=0.1, fused=fused, foreach=False if not fused else None)
        for _ in range(3):
            x.grad = x.detach() * 2
            optimizer.step()
        return x.detach().cpu()

    assert torch.equal(trained("sim"), trained("cpu"))
