"""split_state beyond experts: rows picked from tables in every way, and tensors that stay whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatrain import lower, trace
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.split.split_state import split_state
from tests.passes.splitting import assert_exact, parts_of, seeded, tokens, unmeasured
from tests.tracer.parity import program_step

# -- what else picks rows ------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, pick, num_rows: int = 40, width: int = 8):
        super().__init__()
        self.table = nn.Parameter(torch.randn(num_rows, width))
        self.pick = pick

    def forward(self, ids):
        return self.pick(self.table, ids).sin()


IDS = torch.tensor([[0, 39, 7, 7], [10, 9, 20, 7]])

PICKS = {
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding_padding": lambda w, i: F.embedding(i, w, padding_idx=7),
    "embedding_padding_from_end": lambda w, i: F.embedding(i, w, -1),
    "index": lambda w, i: w[i],
    "index_tuple": lambda w, i: w[(i,)],
    "index_from_end": lambda w, i: w[i - 40],
    "index_int32": lambda w, i: w[i.int()],
    "index_select": lambda w, i: torch.index_select(w, 0, i.reshape(-1)),
    "index_select_method": lambda w, i: w.index_select(dim=0, index=i.reshape(-1)),
    "cast_before": lambda w, i: w.double()[i],
    "scaled_before": lambda w, i: (w * 3)[i],
    "row": lambda w, i: w[-2] + w[0] + w.select(0, 5),
    "twice": lambda w, i: w[i] + F.embedding(i + 0, w),
    "shared_view": lambda w, i: (lambda v: v[i] + v[i + 0])(w.unsqueeze(1)),
}


@pytest.mark.parametrize("name", PICKS)
def test_rows_picked_in_any_way_are_exact(name: str):
    model = seeded(Table, PICKS[name])
    program = assert_exact(model, (IDS,), 8 * 32)
    assert parts_of(program)["table"]


# -- what stays whole ----------------------------------------------------------------------------------------

WHOLE = {
    "linear": lambda w, i: F.linear(torch.ones(2, 8), w),
    "sum_over_experts": lambda w, i: torch.einsum("rw,rw->w", w, w + 1),
    "returned": lambda w, i: (w, w[i]),
    "tied_to_a_linear": lambda w, i: F.linear(F.embedding(i, w), w),
    "norm": lambda w, i: F.embedding(i, w) + w.norm(),
    "max_norm": lambda w, i: F.embedding(i, w.clone(), max_norm=0.5),
    "sparse": lambda w, i: F.embedding(i, w, sparse=True),
    "slice": lambda w, i: w[3:],
    "columns": lambda w, i: w[:, i],
    "cast_twice": lambda w, i: (lambda v: v[i] + v[i + 0])(w.double()),
}


class Whole(Table):
    def forward(self, ids):
        return self.pick(self.table, ids)


@pytest.mark.parametrize("name", WHOLE)
def test_a_tensor_that_some_call_needs_whole_stays_whole(name: str):
    model = seeded(Whole, WHOLE[name])
    split = split_state(canonicalize(trace(model, (IDS,))), limit=8 * 32)
    assert set(split.state) == {"table"}


def test_a_number_out_of_range_is_refused_as_ever():
    for name in ("index", "embedding", "index_select"):
        model = seeded(Table, PICKS[name])
        traced = trace(model, (IDS,))
        program = lower(traced, passes=unmeasured(8 * 32))
        for bad in (40, -41):
            with pytest.raises((IndexError, RuntimeError)):
                program_step(traced, program, model, (torch.full_like(IDS, bad),), {})


def test_a_target_below_a_row_makes_no_part_of_each_word():
    model = seeded(Table, PICKS["embedding"])
    model.table = nn.Parameter(torch.randn(520, 8))
    traced = trace(model, (IDS,))
    before = str(traced)
    rows = parts_of(split_state(canonicalize(traced), limit=1))["table"]
    assert str(traced) == before, "the pass leaves its argument as it was"
    assert 256 < len(rows) <= 512
    assert (rows[0][0], rows[-1][1]) == (0, 520)


def test_a_tensor_at_the_target_size_stays_whole():
    traced = trace(seeded(Table, PICKS["index"]), (IDS,))
    assert not parts_of(lower(traced, block_bytes=40 * 32))
    assert parts_of(lower(traced, block_bytes=40 * 32 - 1)) == {"table": [(0, 20), (20, 40)]}


def test_a_picked_weight_that_is_written_in_between_is_not_moved():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            # Frozen: in eager, too, its gradient would need the ids as they were.
            self.stack = nn.Parameter(torch.randn(8, 4, 8), requires_grad=False)

        def forward(self, x, ids):
            ids = ids + 0
            picked = self.stack[ids]
            ids.zero_()
            return torch.bmm(x.unsqueeze(1), picked).squeeze(1) + ids[:, None]

    args = (tokens(3, 4).requires_grad_(), torch.tensor([1, 7, 3]))
    assert parts_of(assert_exact(seeded(Writes), args, 300))
