"""measure: what a template holds and computes, against sums done by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain.hardware.work import products, total_flops
from megatrain.passes.kernels import LiveBytes, private_bytes
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program, TemplateCost
from megatrain.tracer.trace import trace


def _cost(program: Program, block: int = 0) -> TemplateCost:
    cost = program.templates[program.blocks[block].template].cost
    assert cost is not None
    return cost


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def test_saved_bytes_and_flops_of_a_small_mlp_are_exact():
    cost = _cost(lower(trace(Mlp(), (torch.randn(5, 8),))))
    # What gelu read and what it made; the input and the weights are held anyway.
    assert cost.saved_bytes == 2 * 5 * 32 * 4
    assert total_flops(cost.forward) == 2 * 5 * 8 * 32 * 2
    # Both are alive at once, before the output is: its bytes are counted with the block's outputs.
    assert cost.forward_workspace_bytes == 2 * 5 * 32 * 4 - 5 * 8 * 4


def test_measuring_runs_under_the_shapes_of_the_capture_where_they_depend_on_values():
    class Selected(nn.Linear):
        def forward(self, x):
            return super().forward(x[x[:, 0] > 0])

    program = lower(trace(Selected(4, 4), (torch.tensor([[1.0] * 4, [-1.0] * 4]),)))
    assert total_flops(_cost(program).forward) == 2 * 1 * 4 * 4


def test_a_cost_prints_bytes_in_full_and_work_in_three_digits():
    texts = {
        0: "0 FLOP",
        999: "999 FLOP",
        1000: "1 KFLOP",
        999_499: "999 KFLOP",
        999_500: "1 MFLOP",
        4_194_304: "4.19 MFLOP",
    }
    for flops, text in texts.items():
        assert str(TemplateCost(1, 2, 3, products(flops))) == f"saves 1 B, workspace 3 B, {text}"
    both = TemplateCost(1, 2, 3, products(500_000), products(1_000_000))
    assert str(both) == "saves 1 B, workspace 3 B, 0.5 + 1 MFLOP"


ATTENTION = torch.ops.aten


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_the_fp32_sums_of_attentions_backward_are_counted(kind: str):
    """The kernel makes them for itself, so a run on fake tensors alone shows half of the gradient's memory."""
    batch, heads, rows, width = 2, 4, 1000, 64
    query, key, value, out, gradient = (
        torch.empty(batch, heads, rows, width, device="meta", dtype=torch.bfloat16) for _ in range(5)
    )
    softmax, seed = torch.empty(batch, heads, rows, device="meta"), torch.empty((), device="meta", dtype=torch.int64)
    given = (gradient, query, key, value)
    with LiveBytes([*given, out, softmax, seed], gradient.device) as live:
        if kind == "flash":
            op = ATTENTION._scaled_dot_product_flash_attention_backward.default
            op(*given, out, softmax, None, None, rows, rows, 0.0, True, seed, seed)
        else:
            op = ATTENTION._scaled_dot_product_efficient_attention_backward.default
            op(*given, None, out, softmax, seed, seed, 0.0, [True, True, True, False])
    gradients = 3 * query.nbytes
    assert live.peak == gradients + 4 * batch * heads * 1024 * (width + 1)


def test_rnns_of_cudnn_have_a_copy_of_their_weights():
    weights = [torch.empty(32, 8, device="meta"), torch.empty(32, device="meta")]
    x = torch.empty(5, 3, 8, device="meta")
    assert private_bytes(torch.ops.aten._cudnn_rnn.default, (x, weights, 2, None, x, x)) == 4 * (32 * 8 + 32)
    assert private_bytes(ATTENTION.mm.default, (x[0], x[0])) == 0, "other kernels have no such buffers"
