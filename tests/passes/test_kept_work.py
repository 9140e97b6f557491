"""Which calls may keep results for a repeated forward, by what their kernels do; near misses are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain.hardware.work import total_flops
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Program, ResultCost
from megatrain.tracer.trace import trace
from tests.attention import HEADS, TOKENS, WIDTH, Attention, Layers, text

pytestmark = pytest.mark.usefixtures("short_texts")


def results_of(program: Program) -> list[ResultCost | None]:
    costs = [program.templates[block.template].cost for block in program.blocks]
    assert all(cost is not None and not cost.unmeasured for cost in costs)
    return [cost.results if cost is not None else None for cost in costs]


def test_the_output_of_attention_and_its_statistics_may_be_kept():
    program = lower(trace(Layers(*["causal"] * 2), (text(),)))
    first, _ = results_of(program)
    cost = program.templates[program.blocks[0].template].cost
    assert first is not None
    assert cost is not None
    assert [spec.shape for spec in first.specs] == [(1, HEADS, TOKENS, WIDTH // HEADS), (1, HEADS, TOKENS)]
    assert first.nbytes == 4 * (TOKENS * WIDTH + TOKENS * HEADS)
    # Two products of a causal triangle, for each head.
    spared = total_flops(cost.forward) - total_flops(first.repeated)
    assert spared == 4 * HEADS * (TOKENS * (TOKENS + 1) // 2) * (WIDTH // HEADS)
    assert not any("attention" in work.rate for work in first.repeated)
    # They are no part of the workspace of the backward that finds them.
    assert first.backward_workspace_bytes == cost.backward_workspace_bytes - first.nbytes
    assert f"may keep {first.nbytes} B of attention for {spared / 1e6:.3g} MFLOP" in str(program)


class Changed(nn.Module):
    """A layer whose attention isn't worth keeping, or isn't alone."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change, self.attention = change, Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.attention.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.change(q)


def attended(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def written_later(q: torch.Tensor) -> torch.Tensor:
    """Without a gradient nothing says that the backward needs what was written over."""
    found = attended(q.detach())
    found.mul_(0.5)
    return (found * q).sum()


def by_hand(q: torch.Tensor) -> torch.Tensor:
    return (q @ q.transpose(-1, -2)).softmax(-1).matmul(q).sum()


LEFT_ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "it is the block's result": attended,
    "it is part of the block's result": lambda q: attended(q)[:, :1],
    "it is written into": written_later,
    "it is short": lambda q: attended(q[:, :, :256]).square().sum(),
    "it has dropout": lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).square().sum(),
    "it is no fused kernel": by_hand,
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_attention_is_left_alone_where(why: str):
    (found,) = results_of(lower(trace(Changed(LEFT_ALONE[why]), (text(),))))
    assert found is None


def test_attention_between_other_calls_may_be_kept_unless_texts_are_short(monkeypatch: pytest.MonkeyPatch):
    """The same layer as those that are left alone."""
    model = Changed(lambda q: attended(q).square().sum())
    (found,) = results_of(lower(trace(model, (text(),))))
    assert found is not None
    monkeypatch.undo()  # the limit of a short text
    for length, is_long in ((TOKENS, False), (4 * TOKENS, True)):
        (found,) = results_of(lower(trace(model, (text(length=length),))))
        assert (found is not None) == is_long


def test_a_module_of_torch_whose_call_is_one_node_may_keep_what_runs_in_it():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0].square().sum()

    (found,) = results_of(lower(trace(Model(), (text(),))))
    assert found is not None
    assert len(found.specs) == 2
