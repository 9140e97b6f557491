"""The work of kernels, against sums done by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain.hardware.work import MEMORY, Kernels, Works, total_bytes, total_flops
from megatrain.passes.measuring.kernels import KernelWork
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program, TemplateCost
from megatrain.scheduler.from_program import workload
from megatrain.tracer.trace import trace

ATTENTION = torch.ops.aten
META = torch.device("meta")


def lowered(model: nn.Module, *inputs: torch.Tensor) -> Program:
    return lower(trace(model, inputs))


def cost_of(program: Program, block: int = 0) -> TemplateCost:
    cost = program.templates[program.blocks[block].template].cost
    assert cost is not None
    return cost


def noted(work) -> Works:
    """What kernels do on meta tensors."""
    with KernelWork(META) as kernels:
        work()
    return kernels.take()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def test_a_product_computes_and_an_addition_moves():
    x, y = meta(10, 20), meta(20, 30)
    assert noted(lambda: x @ y) == (Kernels("fp32", 2 * 10 * 20 * 30, 4 * (200 + 600 + 300)),)
    assert noted(lambda: x + x) == (Kernels(MEMORY, 0, 4 * 2 * 200),)
    assert noted(lambda: x + meta(10, 20)) == (Kernels(MEMORY, 0, 4 * 3 * 200),)
    assert noted(lambda: x.mul_(2)) == (Kernels(MEMORY, 0, 4 * 2 * 200),)
    assert noted(lambda: x.zero_()) == (Kernels(MEMORY, 0, 4 * 200),)
    assert noted(lambda: x.copy_(meta(1, 20))) == (Kernels(MEMORY, 0, 4 * 220),)
    assert noted(lambda: meta(1, 20).expand(10, 20) + x) == (Kernels(MEMORY, 0, 4 * (20 + 200 + 200)),)


def test_results_in_given_memory_are_written_and_not_read():
    x, y, z = meta(10, 20), meta(20, 30), meta(10, 30)
    assert noted(lambda: torch.mm(x, y, out=z)) == noted(lambda: x @ y)
    assert noted(lambda: torch.log_softmax(z, -1, out=z)) == (Kernels(MEMORY, 0, 4 * 2 * 300),)
    places, marks = meta(10, 1, dtype=torch.int64), meta(10, 1)
    assert noted(lambda: z.scatter_(1, places, marks)) == (Kernels(MEMORY, 0, (8 + 4 + 4) * 10),)


def test_views_and_new_memory_are_no_kernels():
    x = meta(4, 6)
    assert noted(lambda: x.view(2, 12)[0].expand(5, 12)) == ()
    assert noted(lambda: torch.empty_like(x)) == noted(lambda: x.detach()) == ()
    assert noted(lambda: x.t().contiguous()) == (Kernels(MEMORY, 0, 4 * 48),)


def test_a_lookup_reads_what_it_returns_and_its_gradient_writes_the_table():
    table, ids = meta(1000, 8), torch.empty(3, dtype=torch.int64, device="meta")
    assert noted(lambda: F.embedding(ids, table)) == (Kernels(MEMORY, 0, 24 + 2 * 4 * 24),)
    backward = torch.ops.aten.embedding_dense_backward.default
    assert total_bytes(noted(lambda: backward(meta(3, 8), ids, 1000, -1, False))) == 4 * 24 + 24 + 4 * 8000


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_what_a_causal_mask_leaves_and_heads_that_share_keys(kind: str, is_causal: bool):
    op = getattr(ATTENTION, f"_scaled_dot_product_{kind}_attention")
    query, key = meta(3, 8, 64, 16, dtype=torch.bfloat16), meta(3, 2, 64, 16, dtype=torch.bfloat16)
    more = (0.0, is_causal) if kind == "flash" else (None, False, 0.0, is_causal)
    pairs = 64 * 65 // 2 if is_causal else 64 * 64
    found = noted(lambda: op(query, key, key, *more))
    assert [(work.rate, work.flops) for work in found] == [("bf16 attention", 2 * 3 * 8 * pairs * (16 + 16))]


@pytest.mark.parametrize("is_causal", [False, True])
def test_attentions_backward_has_five_products_where_its_forward_has_two(is_causal: bool):
    class Attention(nn.Linear):
        def forward(self, x):
            q = super().forward(x)
            return F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)

    cost = cost_of(lowered(Attention(16, 16), torch.randn(2, 3, 32, 16)))
    forward, backward = (
        sum(work.flops for work in works if "attention" in work.rate) for works in (cost.forward, cost.backward)
    )
    pairs = 32 * 33 // 2 if is_causal else 32 * 32
    assert forward == 2 * 2 * 3 * pairs * 32
    assert backward == forward * 5 // 2


def flops_of(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    blocks = workload(lowered(model, x)).blocks
    return sum(total_flops(b.forward) for b in blocks), sum(total_flops(b.backward) for b in blocks)


def test_a_backward_computes_what_its_gradients_need():
    layer, x = nn.Linear(8, 16, bias=False), torch.randn(4, 8)
    one = 2 * 4 * 8 * 16
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 8, bias=False))
    # The input needs no gradient: the first layer has one product, the second has two.
    assert flops_of(model, x) == (2 * one, 3 * one)
    model[0].requires_grad_(False)
    assert flops_of(model, x) == (2 * one, one)  # nothing needs the second's input gradient either


def test_blocks_of_one_template_that_need_other_gradients_have_their_own_backwards():
    """The second of three equal layers is frozen: it hands gradients on, and has none of its own."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)))
    model[1].requires_grad_(False)
    program = lowered(model, torch.randn(4, 8))
    assert len({block.template for block in program.blocks}) == 1
    one = 2 * 4 * 8 * 8
    first, frozen, last = (total_flops(block.backward) for block in workload(program).blocks)
    assert (first, frozen, last) == (one, one, 2 * one)
    model[0].requires_grad_(False)
    assert workload(lowered(model, torch.randn(4, 8))).blocks[0].backward == ()


def test_products_have_the_rate_of_their_dtype_or_of_fewer_bits_where_torch_allows_them():
    def rates(dtype: torch.dtype) -> list[str]:
        return [work.rate for work in noted(lambda: meta(8, 8, dtype=dtype) @ meta(8, 8, dtype=dtype))]

    found = [*map(rates, (torch.bfloat16, torch.float16, torch.float32, torch.float64))]
    assert found == [["bf16"], ["bf16"], ["fp32"], ["fp64"]]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert rates(torch.float32) == ["tf32"]
    finally:
        torch.set_float32_matmul_precision(before)
