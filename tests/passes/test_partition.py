"""partition: total, contiguous, at the model's own modules, under a size limit, safe for in-place writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from megatrain.errors import LowerError
from megatrain.passes.canonicalize import canonicalize
from megatrain.passes.partition import find_intervals, partition
from megatrain.passes.pipeline import lift_state, lower
from megatrain.passes.program import Program
from megatrain.tracer.trace import trace
from tests import captures
from tests.draws import draws
from tests.models import Gpt, Stack
from tests.strategies import WIDTH, block_limits, module_trees


def _names(program: Program) -> list[str]:
    return [block.name for block in program.blocks]


@given(model=module_trees(), limit=block_limits())
@draws(40)
def test_random_trees_are_cut_completely_and_in_order(model: nn.Module, limit: int | None):
    traced = canonicalize(trace(model, (torch.randn(3, WIDTH),)))
    calls = [n for n in traced.graph.nodes if n.op in ("call_function", "call_method")]
    intervals = find_intervals(traced, limit)
    assert all(interval.nodes for interval in intervals)
    assert [n for interval in intervals for n in interval.nodes] == calls


def test_blocks_follow_repeated_modules_and_what_lies_between():
    program = captures.program("gpt")
    assert _names(program) == ["embed+positions", "blocks.0", "blocks.1", "blocks.2", "norm+head"]


def test_a_block_called_twice_is_two_blocks_on_one_state():
    program = captures.program("block_called_twice")
    assert _names(program) == ["stem", "blocks.0", "blocks.1", "blocks.0", "head"]
    assert program.blocks[1].binding == program.blocks[3].binding


def test_a_large_block_is_cut_at_its_children_and_small_ones_are_merged():
    traced = trace(Gpt(depth=4), (torch.zeros(1, 4, dtype=torch.int64),))
    whole = lower(traced)
    layer = whole.state_bytes(whole.blocks[1])
    finer = lower(traced, block_bytes=layer // 2)
    assert len(finer.blocks) > len(whole.blocks)
    assert "blocks.0.attn" in _names(finer)
    assert max(map(finer.state_bytes, finer.blocks)) <= layer // 2
    assert len(finer.templates) <= 8, "layers cut at their children share their pieces"
    assert "blocks.0.attn.qkv" in _names(lower(traced, block_bytes=layer // 4))
    assert len(lower(traced, block_bytes=3 * layer).blocks) < len(whole.blocks)
    assert len(lower(traced, block_bytes=10**9).blocks) == 1


def test_a_block_that_writes_into_its_input_works_on_a_copy():
    program = captures.program("inplace_input")
    assert _names(program) == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]
    calls = [str(n.target) for n in program.templates[program.blocks[1].template].graph.nodes]
    assert "clone" in calls


def test_blocks_that_write_what_another_name_still_shows_are_merged():
    program = captures.program("aliased_inplace")
    assert _names(program) == ["stem+blocks.0", "blocks.1", "head"]


def test_a_view_of_a_parameter_leaves_its_block_as_a_copy():
    program = captures.program("parameter_view")
    sources = {program.values[v].storage for b in program.blocks for v in b.inputs}
    assert len(sources) > 1
    first = program.templates[program.blocks[0].template].graph
    outputs: Any = first.output_node().args[0]
    assert [n.target for n in outputs].count("clone") >= 1


def test_a_buffer_that_is_written_enters_as_a_value_and_is_committed_once():
    program = captures.program("cnn")
    written = [key for key, _ in program.commits]
    assert len(written) == len(set(written)) == 15
    assert [key for _, key in program.buffers] == written
    assert not {k for b in program.blocks for k in b.binding} & set(written)


def test_a_buffer_bound_anew_is_committed_from_the_value_that_was_bound():
    program = captures.program("ema_buffer")
    commits = dict(program.commits)
    assert set(commits) == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("mean", "steps")}
    assert all(program.values[v].producer is not None for v in commits.values())


def test_values_that_share_memory_have_one_storage_number():
    class Views(Stack):
        def forward(self, x):
            x = self.stem(x)
            left, right = x.chunk(2, -1)
            for block in self.blocks:
                x = block(x) + left.sum() + right.sum()
            return self.head(x)

    program = partition(canonicalize(trace(Views(), (torch.randn(2, 3),))))
    stem = [program.values[v] for v in program.blocks[0].outputs]
    assert len(stem) == 3
    assert len({v.storage for v in stem}) == 1
    assert {v.storage_bytes for v in stem} == {32}


def test_a_model_that_computes_nothing_is_refused():
    with pytest.raises(LowerError, match="Identity computes nothing"):
        lower(trace(nn.Identity(), (torch.ones(1),)))


def test_a_pass_never_edits_its_argument():
    for name in ("gpt_loss", "cnn", "ema_buffer", "inplace_input", "mask_read"):
        traced = captures.traced(name)
        text, writes = str(traced), [n.meta.get("writes") for n in traced.graph.nodes]
        clean = canonicalize(traced)
        assert (str(traced), [n.meta.get("writes") for n in traced.graph.nodes]) == (text, writes)
        for step in (partition, lambda t: partition(t, block_bytes=50)):
            before = str(clean)
            cut = step(clean)
            assert str(clean) == before
            before = str(cut)
            lifted = lift_state(cut)
            assert str(cut) == before
            assert lifted is not cut
