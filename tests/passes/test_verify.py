"""verify_program: each rule, broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatrain.errors import LowerError
from megatrain.passes.canonicalize import copied_graph
from megatrain.passes.check import verify_program
from megatrain.passes.pipeline import lower
from megatrain.passes.program import OutputRef, Port, Program
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.trace import trace
from tests.models import MODELS

OTHER = TensorSpec((7,), torch.float32)


def _program() -> Program:
    return lower(trace(*MODELS["ema_buffer"]()))


def _with_block(program: Program, place: int, **changes: object) -> Program:
    blocks = list(program.blocks)
    blocks[place] = replace(blocks[place], **changes)
    return replace(program, blocks=tuple(blocks))


def _with_template(program: Program, name: str, **changes: object) -> Program:
    return replace(program, templates={**program.templates, name: replace(program.templates[name], **changes)})


def unlifted_state(p: Program) -> Program:
    graph, _ = copied_graph(p.templates["t0"].graph)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.get_attr("stem.weight")
    return _with_template(p, "t0", graph=graph)


def called_module(p: Program) -> Program:
    graph, _ = copied_graph(p.templates["t0"].graph)
    with graph.inserting_before(graph.output_node()):
        graph.call_module("stem")
    return _with_template(p, "t0", graph=graph)


def port_of_another_name(p: Program) -> Program:
    ports = (Port("other", p.templates["t0"].inputs[0].spec),)
    return _with_template(p, "t0", inputs=ports)


def port_of_another_spec(p: Program) -> Program:
    return _with_template(p, "t0", inputs=(replace(p.templates["t0"].inputs[0], spec=OTHER),))


def output_without_port(p: Program) -> Program:
    return _with_template(p, "t0", outputs=())


def unknown_template(p: Program) -> Program:
    return _with_block(p, 0, template="t9")


def blocks_swapped(p: Program) -> Program:
    return replace(p, blocks=(p.blocks[1], p.blocks[0], *p.blocks[2:]))


def index_out_of_range(p: Program) -> Program:
    return _with_block(p, 0, index=99)


def input_missing(p: Program) -> Program:
    return _with_block(p, 1, inputs=p.blocks[1].inputs[:-1])


def input_unknown(p: Program) -> Program:
    return _with_block(p, 0, inputs=("nobody",))


def input_of_another_spec(p: Program) -> Program:
    values = {**p.values, "x": replace(p.values["x"], spec=OTHER)}
    return replace(p, values=values)


def input_from_the_future(p: Program) -> Program:
    late = p.blocks[2].outputs[-1]
    return _with_block(p, 1, inputs=tuple(late if v == p.blocks[0].outputs[0] else v for v in p.blocks[1].inputs))


def output_defined_twice(p: Program) -> Program:
    mine = p.blocks[2].outputs
    theirs = p.blocks[1].outputs
    assert [p.values[v].spec for v in mine] == [p.values[v].spec for v in theirs]
    return _with_block(p, 2, outputs=theirs)


def output_of_another_producer(p: Program) -> Program:
    name = p.blocks[0].outputs[0]
    return replace(p, values={**p.values, name: replace(p.values[name], producer=3)})


def state_missing(p: Program) -> Program:
    return _with_block(p, 0, binding=p.blocks[0].binding[:1])


def state_unknown(p: Program) -> Program:
    return _with_block(p, 0, binding=("nobody", p.blocks[0].binding[1]))


def state_of_another_spec(p: Program) -> Program:
    return _with_block(p, 0, binding=p.blocks[0].binding[::-1])


def result_undefined(p: Program) -> Program:
    return replace(p, outputs=(OutputRef("value", "nobody"),))


def result_from_unknown_state(p: Program) -> Program:
    return replace(p, outputs=(OutputRef("state", "nobody"),))


def commit_of_nothing(p: Program) -> Program:
    return replace(p, commits=(("blocks.0.mean", "nobody"),), buffers=())


def commit_to_a_parameter(p: Program) -> Program:
    return replace(p, commits=(*p.commits, ("stem.weight", p.commits[0][1])))


def commit_to_nothing(p: Program) -> Program:
    return replace(p, commits=(*p.commits, ("nobody", p.commits[0][1])))


def buffer_without_commit(p: Program) -> Program:
    return replace(p, commits=())


def buffer_of_no_value(p: Program) -> Program:
    return replace(p, buffers=(("nobody", p.buffers[0][1]),))


BROKEN: dict[Callable[[Program], Program], str] = {
    unlifted_state: "still reads state",
    called_module: "calls a module",
    port_of_another_name: "has placeholders",
    port_of_another_spec: "has placeholders",
    output_without_port: "has outputs",
    unknown_template: "uses template t9",
    blocks_swapped: "numbers its blocks",
    index_out_of_range: "numbers its blocks",
    input_missing: r"binds \d tensors to \d ports",
    input_unknown: "binds nobody, which doesn't exist",
    input_of_another_spec: r"binds x: f32\[7\]",
    input_from_the_future: "before it is defined",
    output_defined_twice: "twice",
    output_of_another_producer: "twice",
    state_missing: "binds 1 tensor to 2 ports",
    state_unknown: "binds nobody",
    state_of_another_spec: r"binds stem\.bias",
    result_undefined: "returns nobody",
    result_from_unknown_state: "returns nobody",
    commit_of_nothing: "commits nobody",
    commit_to_a_parameter: r"to stem\.weight",
    commit_to_nothing: "to nobody",
    buffer_without_commit: "without a commit",
    buffer_of_no_value: "as nobody",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_program_is_refused_with_the_rule(broken: Callable[[Program], Program]):
    with pytest.raises(LowerError, match=BROKEN[broken]) as caught:
        verify_program(broken(_program()))
    assert len(str(caught.value).splitlines()) == 2, "what, and the rule"


def test_the_pipeline_checks_what_every_pass_returns():
    def loses_a_block(program: Program) -> Program:
        return replace(program, blocks=program.blocks[1:])

    from megatrain.passes.canonicalize import canonicalize
    from megatrain.passes.partition import partition

    with pytest.raises(LowerError, match="numbers its blocks"):
        lower(trace(*MODELS["stack"]()), passes=(canonicalize, partition, loses_a_block))
