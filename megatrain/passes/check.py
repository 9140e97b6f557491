"""verify_program(): the rules that every program obeys, after any pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatrain.base.counts import counted
from megatrain.errors import LowerError
from megatrain.passes.program import Block, Port, Program, Template
from megatrain.tracer.spec import TensorSpec


def verify_program(program: Program) -> None:
    """Checks a program; the pipeline runs it after each pass."""
    is_lifted = any(template.state for template in program.templates.values())
    for template in program.templates.values():
        _check_template(template, is_lifted)
    defined = {name for name, value in program.values.items() if value.producer is None}
    if [block.index for block in program.blocks] != list(range(len(program.blocks))):
        _fail(f"program {program.name}", "numbers its blocks wrongly", "Indices follow the execution order.")
    values = {name: value.spec for name, value in program.values.items()}
    state = {key: entry.spec for key, entry in program.state.items()}
    for block in program.blocks:
        _check_block(program, block, defined, values, state)
        defined.update(block.outputs)
    _check_ends(program, defined)
    _check_parts(program)


def _fail(where: str, what: str, rule: str) -> NoReturn:
    raise LowerError(f"{where} {what}.\n  {rule}")


def _check_template(template: Template, is_lifted: bool) -> None:
    where = f"template {template.name}"
    template.graph.lint()
    nodes = list(template.graph.nodes)
    if is_lifted and template.reads_by_name:
        _fail(where, "still reads state by name", "Either all templates take their state as inputs, or none does.")
    if any(n.op in ("call_module",) for n in nodes):
        _fail(where, "calls a module", "A template consists of torch calls only.")
    outputs: Any = template.graph.output_node().args[0]
    for kind, found, ports in (
        ("placeholders", [n for n in nodes if n.op == "placeholder"], (*template.inputs, *template.state)),
        ("outputs", outputs, template.outputs),
    ):
        if [(n.name, n.meta["spec"]) for n in found] != [(p.name, p.spec) for p in ports]:
            _fail(
                where,
                f"has {kind} {[n.name for n in found]} but ports {[p.name for p in ports]}, or other specs",
                "Ports name the placeholders and outputs, in order.",
            )


def _check_block(
    program: Program,
    block: Block,
    defined: set[str],
    values: Mapping[str, TensorSpec],
    state: Mapping[str, TensorSpec],
) -> None:
    where = f"block {block.index} ({block.name})"
    template = program.templates.get(block.template)
    if template is None:
        _fail(where, f"uses template {block.template}, which doesn't exist", "Every block has a template.")
    _check_ports(where, block.inputs, template.inputs, values)
    _check_ports(where, block.outputs, template.outputs, values)
    _check_ports(where, block.binding, template.state, state)
    missing = [name for name in block.inputs if name not in defined]
    if missing:
        _fail(where, f"reads {missing[0]} before it is defined", "A block reads what earlier blocks define.")
    again = [n for n in block.outputs if n in defined or program.values[n].producer != block.index]
    if again or len(set(block.outputs)) != len(block.outputs):
        _fail(where, f"defines {', '.join(again or block.outputs)} twice", "Every value has one definition.")


def _check_ports(where: str, names: Sequence[str], ports: Sequence[Port], specs: Mapping[str, TensorSpec]) -> None:
    if len(names) != len(ports):
        _fail(
            where,
            f"binds {counted(len(names), 'tensor')} to {counted(len(ports), 'port')}",
            "Every port is bound once.",
        )
    for name, port in zip(names, ports, strict=True):
        if name not in specs:
            _fail(where, f"binds {name}, which doesn't exist", "Only values and state can be bound.")
        if specs[name] != port.spec:
            _fail(where, f"binds {name}: {specs[name]} to {port.name}: {port.spec}", "Specs agree.")


def _check_ends(program: Program, defined: set[str]) -> None:
    where = f"program {program.name}"
    for ref in program.outputs:
        known = defined if ref.kind == "value" else program.state
        if ref.name not in known:
            _fail(where, f"returns {ref.name}, which nothing defines", "Outputs are values or state.")
    for key, name in program.commits:
        if name not in defined or key not in program.state or not program.state[key].is_writable:
            _fail(where, f"commits {name} to {key}", "Only defined values are committed, and only to writable state.")
    written = {key for key, _ in program.commits}
    for name, key in program.buffers:
        if key not in written or name not in program.values or program.values[name].producer is not None:
            _fail(
                where,
                f"passes buffer {key} as {name} without a commit",
                "A buffer that is written is committed.",
            )
    for key in sorted(program.rebinds - written):
        _fail(where, f"binds {key} anew, which it doesn't commit", "A buffer that is bound anew has a value.")


def _check_parts(program: Program) -> None:
    ends: dict[str, int] = {}
    for key, entry in sorted(program.state.items(), key=lambda item: item[1].rows):
        if entry.base is None:
            continue
        start, end = entry.rows
        if entry.base in program.state:
            _fail(f"state {key}", f"is part of {entry.base}, which is read whole", "A tensor is whole or in parts.")
        if entry.spec.shape[0] != end - start or start < ends.get(entry.base, 0):
            _fail(f"state {key}", "has rows of another part, or too few", "Parts are disjoint ranges of rows.")
        ends[entry.base] = end
