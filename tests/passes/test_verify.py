"""verify_program: each rule, broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.errors import LowerError
from megatrain.passes.canonicalize import canonicalize, copied_graph
from megatrain.passes.check import verify_program
from megatrain.passes.partition import partition
from megatrain.passes.pipeline import lower
from megatrain.passes.program import OutputRef, Port, Program
from megatrain.tracer.spec import TensorSpec
from tests import captures

OTHER = TensorSpec((7,), torch.float32)
NOBODY = "nobody"


def block(p: Program, place: int, **changes: Any) -> Program:
    blocks = list(p.blocks)
    blocks[place] = replace(blocks[place], **changes)
    return replace(p, blocks=tuple(blocks))


def template(p: Program, **changes: Any) -> Program:
    return replace(p, templates={**p.templates, "t0": replace(p.templates["t0"], **changes)})


def value(p: Program, name: str, **changes: Any) -> Program:
    return replace(p, values={**p.values, name: replace(p.values[name], **changes)})


def unlifted_state(p: Program) -> Program:
    graph, _ = copied_graph(p.templates["t0"].graph)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.get_attr("stem.weight")
    return template(p, graph=graph)


def called_module(p: Program) -> Program:
    graph, _ = copied_graph(p.templates["t0"].graph)
    with graph.inserting_before(graph.output_node()):
        graph.call_module("stem")
    return template(p, graph=graph)


def input_from_the_future(p: Program) -> Program:
    late, first = p.blocks[2].outputs[-1], p.blocks[0].outputs[0]
    return block(p, 1, inputs=tuple(late if v == first else v for v in p.blocks[1].inputs))


BROKEN: list[tuple[Callable[[Program], Program], str]] = [
    (unlifted_state, "still reads state"),
    (called_module, "calls a module"),
    (lambda p: template(p, inputs=(Port("other", p.templates["t0"].inputs[0].spec),)), "has placeholders"),
    (lambda p: template(p, inputs=(replace(p.templates["t0"].inputs[0], spec=OTHER),)), "has placeholders"),
    (lambda p: template(p, outputs=()), "has outputs"),
    (lambda p: block(p, 0, template="t9"), "uses template t9"),
    (lambda p: replace(p, blocks=(p.blocks[1], p.blocks[0], *p.blocks[2:])), "numbers its blocks"),
    (lambda p: block(p, 0, index=99), "numbers its blocks"),
    (lambda p: block(p, 1, inputs=p.blocks[1].inputs[:-1]), r"binds \d tensors to \d ports"),
    (lambda p: block(p, 0, inputs=(NOBODY,)), "binds nobody, which doesn't exist"),
    (lambda p: value(p, "x", spec=OTHER), r"binds x: f32\[7\]"),
    (input_from_the_future, "before it is defined"),
    (lambda p: block(p, 2, outputs=p.blocks[1].outputs), "twice"),
    (lambda p: value(p, p.blocks[0].outputs[0], producer=3), "twice"),
    (lambda p: block(p, 0, binding=p.blocks[0].binding[:1]), "binds 1 tensor to 2 ports"),
    (lambda p: block(p, 0, binding=(NOBODY, p.blocks[0].binding[1])), "binds nobody"),
    (lambda p: block(p, 0, binding=p.blocks[0].binding[::-1]), r"binds stem\.bias"),
    (lambda p: replace(p, outputs=(OutputRef("value", NOBODY),)), "returns nobody"),
    (lambda p: replace(p, outputs=(OutputRef("state", NOBODY),)), "returns nobody"),
    (lambda p: replace(p, commits=(("blocks.0.mean", NOBODY),), buffers=()), "commits nobody"),
    (lambda p: replace(p, commits=(*p.commits, ("stem.weight", p.commits[0][1]))), r"to stem\.weight"),
    (lambda p: replace(p, commits=(*p.commits, (NOBODY, p.commits[0][1]))), "to nobody"),
    (lambda p: replace(p, commits=()), "without a commit"),
    (lambda p: replace(p, buffers=((NOBODY, p.buffers[0][1]),)), "as nobody"),
]


@pytest.mark.parametrize(("broken", "text"), BROKEN)
def test_a_broken_program_is_refused_with_the_rule(broken: Callable[[Program], Program], text: str):
    with pytest.raises(LowerError, match=text) as caught:
        verify_program(broken(captures.program("ema_buffer")))
    assert len(str(caught.value).splitlines()) == 2, "what, and the rule"


def test_the_pipeline_checks_what_every_pass_returns():
    def loses_a_block(program: Program) -> Program:
        return replace(program, blocks=program.blocks[1:])

    with pytest.raises(LowerError, match="numbers its blocks"):
        lower(captures.traced("stack"), passes=(canonicalize, partition, loses_a_block))
