"""verify_program(): the rules that every program obeys, whatever pass made it."""

from __future__ import annotations

from megatrain.errors import LowerError
from megatrain.passes.program import Block, Program, Template


def verify_program(program: Program) -> None:
    """Checks a program; the pipeline runs it after each pass.

    Raises:
        LowerError: Naming the block or template at fault and the rule it breaks.
    """
    for template in program.templates.values():
        _check_template(template, "lift_state" in program.provenance)
    defined = {name for name, value in program.values.items() if value.producer is None}
    for block in program.blocks:
        _check_block(program, block, defined)
        defined.update(block.outputs)
    _check_ends(program, defined)


def _fail(where: str, what: str, rule: str) -> None:
    raise LowerError(f"{where} {what}.\n  {rule}")


def _check_template(template: Template, is_lifted: bool) -> None:
    where = f"template {template.name}"
    template.graph.lint()
    nodes = list(template.graph.nodes)
    if is_lifted and any(n.op == "get_attr" for n in nodes):
        _fail(where, "still reads state by name", "After lift_state a template holds no tensor.")
    if any(n.op in ("call_module",) for n in nodes):
        _fail(where, "calls a module", "A template consists of torch calls only.")
    placeholders = [n.name for n in nodes if n.op == "placeholder"]
    ports = [p.name for p in (*template.inputs, *template.state)]
    if placeholders != ports:
        _fail(
            where,
            f"has placeholders {placeholders} but ports {ports}",
            "Ports name the placeholders, in order.",
        )
    if len(template.graph.output_node().args[0]) != len(template.outputs):  # pyright: ignore[reportArgumentType]
        _fail(where, "returns another number of tensors than it has output ports", "One port per output.")


def _check_block(program: Program, block: Block, defined: set[str]) -> None:
    where = f"block {block.index} ({block.name})"
    template = program.templates.get(block.template)
    if template is None:
        _fail(where, f"uses template {block.template}, which doesn't exist", "Every block has a template.")
        return
    if program.blocks[block.index] is not block:
        _fail(where, "isn't at its own index", "Blocks are numbered in execution order.")
    for names, ports, kind in (
        (block.inputs, template.inputs, "inputs"),
        (block.outputs, template.outputs, "outputs"),
    ):
        if len(names) != len(ports):
            _fail(where, f"binds {len(names)} {kind} to {len(ports)} ports", "Every port is bound once.")
        for name, port in zip(names, ports, strict=True):
            if program.values[name].spec != port.spec:
                _fail(
                    where,
                    f"binds {name}: {program.values[name].spec} to {port.name}: {port.spec}",
                    "Specs agree.",
                )
    if len(block.binding) != len(template.state):
        _fail(
            where,
            f"binds {len(block.binding)} tensors of state to {len(template.state)} ports",
            "Each port once.",
        )
    for key, port in zip(block.binding, template.state, strict=True):
        if program.state[key].spec != port.spec:
            _fail(
                where, f"binds {key}: {program.state[key].spec} to {port.name}: {port.spec}", "Specs agree."
            )
    missing = [name for name in block.inputs if name not in defined]
    if missing:
        _fail(where, f"reads {missing[0]} before it is defined", "A block reads what earlier blocks define.")
    again = [
        name for name in block.outputs if name in defined or program.values[name].producer != block.index
    ]
    if again:
        _fail(where, f"defines {again[0]} a second time", "Every value has one definition.")


def _check_ends(program: Program, defined: set[str]) -> None:
    where = f"program {program.name}"
    for ref in program.outputs:
        known = defined if ref.kind == "value" else program.state
        if ref.name not in known:
            _fail(where, f"returns {ref.name}, which nothing defines", "Outputs are values or state.")
    for key, name in program.commits:
        if name not in defined or program.state[key].kind != "buffer":
            _fail(
                where, f"commits {name} to {key}", "Only defined values are committed, and only to buffers."
            )
    written = {key for key, _ in program.commits}
    for name, key in program.buffers:
        if key not in written or program.values[name].producer is not None:
            _fail(
                where,
                f"passes buffer {key} as {name} without a commit",
                "A buffer that is written is committed.",
            )
