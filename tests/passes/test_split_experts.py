"""split_state: which tensors are cut, into what, and that the parts compute what the whole did."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatrain import LowerError, lower, trace
from megatrain.passes.check import verify_program
from tests.draws import draws
from tests.experts import IDLE, Grouped, Layers, Listed
from tests.passes.splitting import assert_exact, largest, parts_of, seeded, tokens
from tests.tracer.parity import program_step


def test_a_layer_of_many_stacked_experts_is_cut_into_groups_and_stays_exact():
    stack = 64 * 8 * 16 * 4
    model = seeded(Layers, Layers.KINDS["gathered"], 1, 64, 8, 16)
    args = (tokens(6, 8),)
    program = assert_exact(model, args, stack // 4)
    quarters = [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert parts_of(program) == {"layers.0.up": quarters, "layers.0.down": quarters}
    assert largest(program) <= stack // 4
    found = program_step(trace(model, args), program, model, args, {})
    assert found.gradients["layers.0.up"].abs().sum() > 0
    assert torch.equal(found.gradients["layers.0.up"][IDLE], torch.zeros(8, 16)), "no token chose it"
    args[0][2, 3] = float("inf")  # it spoils no other expert's gradient
    assert_exact(model, args, stack // 4)


def test_experts_that_are_modules_are_cut_between_them():
    model: Any = seeded(Layers, Listed, 1, 16, 8, 16)
    expert = sum(p.numel() for p in model.layers[0].list[0].parameters()) * 4
    program = assert_exact(model, (tokens(6, 8),), 5 * expert)
    assert largest(program) <= 5 * expert
    assert not parts_of(program)
    assert len(program.blocks) < 8


@given(
    kind=st.sampled_from([*Layers.KINDS, "grouped"]),
    num_experts=st.integers(4, 13),
    width=st.integers(1, 3),
    inner=st.integers(1, 3),
    count=st.integers(1, 7),
    top_k=st.integers(1, 3),
    rows=st.integers(1, 6),
    is_shared=st.booleans(),
)
@draws(25)
def test_any_number_of_experts_and_parts_is_exact(
    kind: str, num_experts: int, width: int, inner: int, count: int, top_k: int, rows: int, is_shared: bool
):
    # Products of odd widths round by how many there are in a batch (a choice of MKL's); widths of 8 don't.
    dtype = torch.bfloat16 if kind == "grouped" else torch.float32
    builder = Grouped if kind == "grouped" else Layers.KINDS[kind]
    model = seeded(Layers, builder, 2, num_experts, 8 * width, 8 * inner, top_k, is_shared=is_shared).to(dtype)
    limit = rows * 64 * width * inner * dtype.itemsize
    program = assert_exact(model, (tokens(count, 8 * width, dtype),), limit)
    if rows < num_experts:
        assert {key.rsplit(".", 1)[1] for key in parts_of(program)} == {"up", "down"}
        state = {e.key: e.spec.nbytes for e in program.state.values() if e.base is not None}
        assert max(state.values()) <= limit
    for bounds in parts_of(program).values():
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == num_experts


IDS = torch.tensor([[0, 39, 7, 7], [10, 9, 20, 7]])

# -- the printed form and the checker ------------------------------------------------------------------------


def test_the_program_names_the_parts_of_each_tensor():
    model = seeded(Layers, Layers.KINDS["bmm"], 1, 8, 8, 8)
    program = lower(trace(model, (tokens(4, 8),)), block_bytes=1024)
    text = str(program)
    assert "  parts layers.0.up = [0:4] [4:8]\n  parts layers.0.down = [0:4] [4:8]\n" in text
    assert [b.name for b in program.blocks if "[" in b.name] == [
        "layers.0.up[0:4]",
        "layers.0.up[4:8]",
        "layers.0.down[0:4]",
        "layers.0.down[4:8]",
    ]
    assert program.provenance[:3] == ("canonicalize", "split_state", "partition")
    assert 'up_0_4: "f32[4, 8, 8]",' in text


def test_the_checker_refuses_parts_that_overlap_or_stand_beside_their_whole():
    program = lower(trace(seeded(nn.Embedding, 40, 8), (IDS,)), block_bytes=640)
    verify_program(program)
    first, second = program.state.values()
    overlapping = dataclasses.replace(second, rows=(first.rows[1] - 1, second.rows[1] - 1))
    whole = dataclasses.replace(first, key="weight", base=None)
    for state in ({first.key: first, second.key: overlapping}, {**program.state, "weight": whole}):
        with pytest.raises(LowerError, match="part"):
            verify_program(dataclasses.replace(program, state=state))
