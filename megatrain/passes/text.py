"""The printed forms of templates and programs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from megatrain.tracer.targets import call_text

if TYPE_CHECKING:
    from megatrain.passes.program import Program, Template


def template_text(template: Template, heading: str = "") -> str:
    """Prints a template as a Python function whose state is keyword-only."""
    lines = [heading] if heading else []
    lines.append(f"def {template.name}(")
    lines += [f'    {port.name}: "{port.spec}",' for port in template.inputs]
    if template.state:
        lines.append("    *,")
        lines += [f'    {port.name}: "{port.spec}",' for port in template.state]
    lines.append(") -> (" + ", ".join(f'"{port.spec}"' for port in template.outputs) + "):")
    modes = ""
    for node in template.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        here = _modes_text(node.meta["grad"], node.meta["autocast"])
        if here and here != modes:
            lines.append(f"    with {here}:")
        modes = here
        spec = f': "{node.meta["spec"]}"' if "spec" in node.meta else ""
        lines.append(f"    {'    ' if here else ''}{node.name}{spec} = {call_text(node)}")
    outputs = [p.name for p in template.outputs]
    lines.append(f"    return ({', '.join(outputs)}{',' if len(outputs) == 1 else ''})")
    return "\n".join(lines)


def _modes_text(has_grad: bool, autocast: tuple[tuple[str, torch.dtype], ...]) -> str:
    modes = [] if has_grad else ["torch.no_grad()"]
    modes += [f"torch.autocast({d!r}, {t}, cache_enabled=False)" for d, t in autocast]
    return ", ".join(modes)


def program_text(program: Program) -> str:
    """Prints every template once and one line per block."""
    users: dict[str, list[int]] = defaultdict(list)
    for block in program.blocks:
        users[block.template].append(block.index)
    passes = ", ".join(program.provenance)
    lines = [
        f"program {program.name}: {len(program.blocks)} blocks, {len(program.templates)} templates; from {passes}",
        f"  inputs {_list(program.inputs)}; outputs {_list(tuple(o.name for o in program.outputs))}",
    ]
    lines += [f"  buffer {value} = {key}" for value, key in program.buffers]
    lines += [f"  constant {value}: {program.values[value].spec}" for value in program.constants]
    lines += [f"  commit {key} = {value}" for key, value in program.commits]
    lines += _part_lines(program)
    for block in program.blocks:
        frozen = "" if any(program.state[k].requires_grad for k in block.binding) or not block.binding else ", frozen"
        lines.append(
            f"  block {block.index} {block.name}: {block.template}({', '.join(block.inputs)}) -> "
            f"{_list(block.outputs)}; state {program.state_bytes(block)} bytes{frozen}"
        )
        lines += [f"    opaque {call.name or 'the model'}: {call.reason}" for call in program.opaque(block)]
    for template in program.templates.values():
        blocks = ", ".join(map(str, users[template.name]))
        lines += ["", template_text(template, f"# template {template.name}: blocks {blocks}")]
    return "\n".join(lines)


def _part_lines(program: Program) -> list[str]:
    """Prints each tensor that is cut into parts, with the rows of each part."""
    parts: dict[str, list[str]] = defaultdict(list)
    for entry in program.state.values():
        if entry.base is not None:
            parts[entry.base].append(f"[{entry.rows[0]}:{entry.rows[1]}]")
    return [f"  parts {base} = {' '.join(rows)}" for base, rows in parts.items()]


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "nothing"
