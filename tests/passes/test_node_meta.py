"""TracedModule.check: every key of every node's meta is there, and of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from megatrain.errors import TraceError
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule
from tests.models import MODELS

TENSOR = ("spec", "requires_grad", "storage", "storage_bytes")
CALL = ("modules", "source", "grad", "autocast", "is_random")
KEYS = {
    "placeholder": TENSOR,
    "get_attr": (*TENSOR, "key"),
    "call_function": (*TENSOR, *CALL),
    "call_method": (*TENSOR, *CALL),
}


def captured() -> TracedModule:
    return trace(*MODELS["ema_buffer"]())


def node_of(traced: TracedModule, op: str) -> fx.Node:
    """A node of that kind whose result is read."""
    return next(node for node in traced.graph.nodes if node.op == op and node.users)


@pytest.mark.parametrize("op", KEYS)
def test_a_key_that_is_missing_or_of_another_kind_is_refused_by_both_names(op: str):
    traced = captured()
    node = node_of(traced, op)
    for key in KEYS[op]:
        traced.check()
        before = node.meta.pop(key)
        with pytest.raises(TraceError, match=rf"^node `{node.name}` has no `{key}` in its meta\.\n") as caught:
            traced.check()
        assert "spec.py" in str(caught.value)
        assert "Rewriter.call" in str(caught.value)
        node.meta[key] = 1.5
        with pytest.raises(TraceError, match=rf"has a float as `{key}` in its meta, not "):
            traced.check()
        node.meta[key] = before


def calls_a_module(traced: TracedModule) -> None:
    with traced.graph.inserting_before(traced.graph.output_node()):
        traced.graph.create_node("call_module", "stem")


def reads_the_future(traced: TracedModule) -> None:
    first, last = node_of(traced, "call_function"), traced.results[0]
    first.args = (last, *first.args[1:])


def reads_other_state(traced: TracedModule) -> None:
    node_of(traced, "get_attr").target = "nobody"


def returns_no_tuple(traced: TracedModule) -> None:
    traced.graph.output_node().args = (traced.results[0],)


def with_meta(op: str, key: str, value: Callable[[TracedModule], Any]) -> Callable[[TracedModule], None]:
    return lambda traced: node_of(traced, op).meta.update({key: value(traced)})


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (calls_a_module, "is a `call_module`"),
        (reads_other_state, "reads state `nobody`, which isn't in the inventory"),
        (with_meta("get_attr", "spec", lambda _: TensorSpec((7,), torch.float32)), r"but its meta says \S+: f32\[7\]"),
        (with_meta("get_attr", "key", lambda _: "nobody"), "but its meta says nobody: "),
        (with_meta("call_function", "modules", lambda _: ("stem",)), r"something other than `\(name, number\)`"),
        (with_meta("call_function", "writes", lambda traced: [traced.inputs[0]]), "has a list as `writes`"),
        (
            with_meta("call_function", "writes", lambda _: (captured().inputs[0],)),
            "something other than nodes of this graph in",
        ),
        (reads_the_future, "is not well-formed"),
        (returns_no_tuple, "doesn't return a tuple of its nodes"),
    ],
)
def test_a_graph_that_is_not_described_is_refused(spoil: Callable[[TracedModule], None], text: str):
    traced = captured()
    spoil(traced)
    with pytest.raises(TraceError, match=text) as caught:
        traced.check()
    assert len(str(caught.value).splitlines()) == 3, "what, the rule, and the way out"


def test_what_is_written_back_is_of_this_graph_and_of_known_state():
    traced = captured()
    (key, node), *rest = traced.writes_back
    with pytest.raises(TraceError, match="belongs to another graph"):
        replace(traced, writes_back=((key, captured().writes_back[0][1]), *rest)).check()
    with pytest.raises(TraceError, match="is written back to `nobody`, which isn't in the inventory"):
        replace(traced, writes_back=(("nobody", node), *rest)).check()
