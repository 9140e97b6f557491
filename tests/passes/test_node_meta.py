"""TracedModule.check: every key of every node's meta is there, and of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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


def _traced() -> TracedModule:
    return trace(*MODELS["ema_buffer"]())


def _node(traced: TracedModule, op: str) -> fx.Node:
    """A node of that kind whose result is read."""
    return next(node for node in traced.graph.nodes if node.op == op and node.users)


KEYS = [
    *(("placeholder", key) for key in TENSOR),
    *(("get_attr", key) for key in (*TENSOR, "key")),
    *(("call_function", key) for key in (*TENSOR, *CALL)),
    *(("call_method", key) for key in (*TENSOR, *CALL)),
]


@pytest.mark.parametrize(("op", "key"), KEYS)
def test_a_node_without_a_key_is_refused_by_both_names(op: str, key: str):
    traced = _traced()
    traced.check()
    node = _node(traced, op)
    del node.meta[key]
    with pytest.raises(TraceError, match=rf"^node `{node.name}` has no `{key}` in its meta\.\n") as caught:
        traced.check()
    assert "node_meta.py" in str(caught.value)
    assert "Rewriter.call" in str(caught.value)


@pytest.mark.parametrize(("op", "key"), KEYS)
def test_a_key_of_another_kind_is_refused(op: str, key: str):
    traced = _traced()
    _node(traced, op).meta[key] = 1.5
    with pytest.raises(TraceError, match=rf"has a float as `{key}` in its meta, not "):
        traced.check()


def test_a_call_without_any_meta_is_refused():
    traced = _traced()
    _node(traced, "call_function").meta.clear()
    with pytest.raises(TraceError, match="has no `modules`"):
        traced.check()


def _calls_a_module(traced: TracedModule) -> None:
    with traced.graph.inserting_before(traced.graph.output_node()):
        traced.graph.create_node("call_module", "stem")


def _reads_other_state(traced: TracedModule) -> None:
    _node(traced, "get_attr").target = "nobody"


def _state_of_another_shape(traced: TracedModule) -> None:
    _node(traced, "get_attr").meta["spec"] = TensorSpec((7,), torch.float32)


def _state_of_another_key(traced: TracedModule) -> None:
    _node(traced, "get_attr").meta["key"] = "nobody"


def _odd_modules(traced: TracedModule) -> None:
    _node(traced, "call_function").meta["modules"] = ("stem",)


def _writes_no_tuple(traced: TracedModule) -> None:
    _node(traced, "call_function").meta["writes"] = [traced.inputs[0]]


def _writes_elsewhere(traced: TracedModule) -> None:
    _node(traced, "call_function").meta["writes"] = (_traced().inputs[0],)


def _reads_the_future(traced: TracedModule) -> None:
    first, last = _node(traced, "call_function"), traced.results[0]
    first.args = (last, *first.args[1:])


def _returns_no_tuple(traced: TracedModule) -> None:
    traced.graph.output_node().args = (traced.results[0],)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_calls_a_module, "is a `call_module`"),
        (_reads_other_state, "reads state `nobody`, which isn't in the inventory"),
        (_state_of_another_shape, r"but its meta says \S+: f32\[7\]"),
        (_state_of_another_key, "but its meta says nobody: "),
        (_odd_modules, r"something other than `\(name, number\)`"),
        (_writes_no_tuple, "has a list as `writes`"),
        (_writes_elsewhere, "something other than nodes of this graph in"),
        (_reads_the_future, "is not well-formed"),
        (_returns_no_tuple, "doesn't return a tuple of its nodes"),
    ],
)
def test_a_graph_that_is_not_described_is_refused(spoil: Callable[[TracedModule], None], text: str):
    traced = _traced()
    spoil(traced)
    with pytest.raises(TraceError, match=text) as caught:
        traced.check()
    assert len(str(caught.value).splitlines()) == 3, "what, the rule, and the way out"


def test_what_is_written_back_is_of_this_graph_and_of_known_state():
    traced = _traced()
    (key, node), *rest = traced.writes_back
    with pytest.raises(TraceError, match="belongs to another graph"):
        replace(traced, writes_back=((key, _traced().writes_back[0][1]), *rest)).check()
    with pytest.raises(TraceError, match="is written back to `nobody`, which isn't in the inventory"):
        replace(traced, writes_back=(("nobody", node), *rest)).check()
