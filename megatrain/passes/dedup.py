"""dedup: blocks with structurally equal code share one template."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from megatrain.passes.program import Program, Template


def dedup(program: Program) -> Program:
    """Returns `program` with equal templates merged and renumbered in order of first use.

    Equal means: the same calls with the same literals, in the same modes, on the same specs, with the same
    inputs and outputs. Two layers with equal parameter shapes and different code (a sliding window here, none
    there) keep separate templates.
    """
    by_key: dict[Any, str] = {}
    renamed: dict[str, str] = {}
    templates: dict[str, Template] = {}
    for block in program.blocks:
        template = program.templates[block.template]
        key = template_key(template)
        if key not in by_key:
            by_key[key] = f"t{len(by_key)}"
            templates[by_key[key]] = dataclasses.replace(template, name=by_key[key])
        renamed[block.template] = by_key[key]
    blocks = tuple(dataclasses.replace(b, template=renamed[b.template]) for b in program.blocks)
    return dataclasses.replace(program, templates=templates, blocks=blocks)


def template_key(template: Template) -> Any:
    """Returns a hashable description of everything that a template's results depend on; names don't count."""
    return graph_key(template.graph), len(template.inputs)


def graph_key(graph: fx.Graph) -> Any:
    """Returns a hashable description of everything that a graph computes."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    rows: list[Any] = []
    for node in graph.nodes:
        meta = node.meta
        target = node.target if node.op in ("call_function", "call_method") else None
        rows.append(
            (
                node.op,
                target,
                frozen(node.args, number),
                frozen(node.kwargs, number),
                meta.get("spec"),
                meta.get("grad"),
                meta.get("autocast"),
            )
        )
    return tuple(rows)


def frozen(value: Any, number: dict[fx.Node, int]) -> Any:
    """Makes an argument hashable; equal results mean equal arguments."""
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(frozen(v, number) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, frozen(v, number)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", *(frozen(v, number) for v in (value.start, value.stop, value.step)))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    # 1 == 1.0 == True, and 0.0 == -0.0, but they don't compute the same.
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)
