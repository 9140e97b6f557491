"""lower(): which passes ran is written down, and what breaks a rule is refused by the name of the pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatrain.errors import LowerError, OptionError
from megatrain.passes.canonicalize import canonicalize, copied_graph, dedup
from megatrain.passes.measure import measure
from megatrain.passes.partition import partition
from megatrain.passes.pipeline import lift_state, lower
from megatrain.passes.program import Program
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule
from tests.models import MODELS

DEFAULT = ("canonicalize", "partition", "lift_state", "dedup", "measure")


def same(traced: TracedModule) -> TracedModule:
    return traced


def copied(traced: TracedModule, **changes) -> TracedModule:
    """A capture over a copy of its graph, which a test may spoil."""
    graph, copies = copied_graph(traced.graph)
    written = tuple((key, copies[node]) for key, node in traced.writes_back)
    return replace(traced, graph=graph, writes_back=written, **changes)


def _traced(name: str = "stack") -> TracedModule:
    return trace(*MODELS[name]())


def test_the_program_names_passes_of_the_users():
    class Halve:
        def __call__(self, traced: TracedModule) -> TracedModule:
            return traced

    def blocks_kept(program: Program, *, limit: int) -> Program:
        return program

    passes = (
        canonicalize,
        same,
        Halve(),
        partition,
        lift_state,
        partial(partial(blocks_kept), limit=3),
        dedup,
        measure,
    )
    program = lower(_traced(), passes=passes)
    assert program.provenance == (
        "canonicalize", "same", "Halve", "partition", "lift_state", "blocks_kept", "dedup", "measure",
    )  # fmt: skip
    assert "; from canonicalize, same, Halve, partition, lift_state, blocks_kept, " in str(program)
    assert lower(_traced(), rewrites=(same,)).provenance == (DEFAULT[0], "same", *DEFAULT[1:])
    assert lower(_traced(), block_bytes=64).provenance == (DEFAULT[0], "split_state", *DEFAULT[1:])

    def forger(program: Program) -> Program:
        return replace(program, provenance=("nothing",))

    seen: list[tuple[str, object, str]] = []
    program = lower(
        _traced(),
        passes=(partition, lift_state, forger),
        after_pass=lambda name, value: seen.append((name, value, str(value))),
    )
    assert program.provenance == tuple(name for name, _, _ in seen) == ("partition", "lift_state", "forger")
    assert [str(value) for _, value, _ in seen] == [text for _, _, text in seen], "a pass leaves its argument"
    assert seen[-1][1] == program


@pytest.mark.parametrize("step", [lambda traced: None, lambda traced: traced.graph, partition])
def test_a_rewrite_that_returns_no_capture_is_refused_by_name(step):
    with pytest.raises(LowerError, match=rf"the pass `{step.__name__}` returned (None|a Graph|a Program)\.") as caught:
        lower(_traced(), rewrites=(step,))
    assert "A rewrite takes a TracedModule and returns a TracedModule" in str(caught.value)


def test_a_pass_behind_partition_returns_a_program():
    def back(program: Program):
        return traced

    traced = _traced()
    with pytest.raises(LowerError, match=r"the pass `back` returned a TracedModule\.\n  A pass after partition"):
        lower(traced, passes=(partition, back))
    with pytest.raises(LowerError, match=r"the pass `<lambda>` returned an int\.\n  A pass takes a TracedModule"):
        lower(traced, passes=(lambda _: 3,))


def test_passes_that_leave_state_in_the_templates_are_refused():
    with pytest.raises(LowerError, match="templates read state by name") as caught:
        lower(_traced(), passes=(canonicalize, partition))
    assert "Add lift_state after partition" in str(caught.value)
    assert not partition(_traced()).is_lifted


def test_the_whole_order_and_options_of_the_default_order_exclude_each_other():
    options: Any
    for options in ({"rewrites": (same,)}, {"block_bytes": 64}):
        with pytest.raises(OptionError, match=rf"passes= and {next(iter(options))}= were given together"):
            lower(_traced(), passes=(canonicalize, partition, lift_state), **options)


def _other_result(traced: TracedModule) -> TracedModule:
    made = copied(traced)
    first = next(node for node in made.graph.nodes if node.op == "call_function")
    made.graph.output_node().args = ((first,),)
    return made


def _other_input(traced: TracedModule) -> TracedModule:
    made = copied(traced)
    made.inputs[0].name = "other"
    return made


def _unwritten(traced: TracedModule) -> TracedModule:
    return replace(copied(traced), writes_back=())


@pytest.mark.parametrize(
    ("step", "model", "what"),
    [
        (_other_result, "gpt_loss", r"outputs: f32\[2, 8, 16\] instead of f32\[2, 8, 32\], f32\[\]"),
        (_other_input, "stack", r"inputs: other: "),
        (_unwritten, "ema_buffer", r"written buffers: nothing instead of blocks.0.steps, "),
    ],
)
def test_a_pass_that_changes_what_callers_give_or_get_is_refused(step, model, what):
    with pytest.raises(LowerError, match=rf"the pass `{step.__name__}` gave \w+ other {what}"):
        lower(_traced(model), rewrites=(step,))


def test_a_node_without_meta_is_refused_by_the_names_of_pass_and_node():
    def forgets(traced: TracedModule) -> TracedModule:
        made = copied(traced)
        last = made.results[0]
        with made.graph.inserting_after(last):
            added = made.graph.call_function(torch.relu, (last,))
        last.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
        return made

    with pytest.raises(
        LowerError, match=r"the pass `forgets` broke a rule: node `relu\w*` has no `modules` in its meta"
    ):
        lower(_traced(), rewrites=(forgets,))


def test_a_capture_that_is_broken_before_any_pass_blames_none():
    made = copied(_traced())
    del made.inputs[0].meta["storage"]
    with pytest.raises(Exception, match=r"^node `x` has no `storage` in its meta"):
        lower(made)
