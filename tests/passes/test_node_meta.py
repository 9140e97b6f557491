"""TracedModule.check: every key of every node's meta is there, and of its kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import fx

from megatrain.errors import TraceError
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


def test_what_is_written_back_is_of_this_graph_and_of_known_state():
    traced = captured()
    (key, node), *rest = traced.writes_back
    with pytest.raises(TraceError, match="belongs to another graph"):
        replace(traced, writes_back=((key, captured().writes_back[0][1]), *rest)).check()
    with pytest.raises(TraceError, match="is written back to `nobody`, which isn't in the inventory"):
        replace(traced, writes_back=(("nobody", node), *rest)).check()
