"""lift_state: parameters and buffers become named inputs of their template."""

from __future__ import annotations

import dataclasses
import re
from itertools import chain, count

from torch import fx

from megatrain.passes.canonicalize import copied_graph
from megatrain.passes.program import Block, Port, Program, Template


def lift_state(program: Program) -> Program:
    """Returns `program` with templates that hold no state.

    linear = F.linear(x, layers.3.fc1.weight)
    ->  def t3(x, *, fc1_weight): linear = F.linear(x, fc1_weight)
        binding: fc1_weight = layers.3.fc1.weight
    """
    templates: dict[str, Template] = {}
    blocks: list[Block] = []
    for block in program.blocks:
        template, binding = _lift(program.templates[block.template], block.name)
        templates[template.name] = template
        blocks.append(dataclasses.replace(block, binding=binding))
    return dataclasses.replace(program, templates=templates, blocks=tuple(blocks))


def _lift(template: Template, block_name: str) -> tuple[Template, tuple[str, ...]]:
    graph, _ = copied_graph(template.graph)
    ports: list[Port] = []
    keys: list[str] = []
    last_input: fx.Node | None = None
    names = {node.name for node in graph.nodes}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        last_input = node
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        key = str(node.target)
        with graph.inserting_after(last_input) if last_input else graph.inserting_before(_first(graph)):
            lifted = graph.placeholder(_port_name(key, block_name))
        lifted.meta.update(spec=node.meta["spec"], requires_grad=node.meta["requires_grad"])
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
        names.remove(node.name)
        _rename(lifted, _port_name(key, block_name), names)
        ports.append(Port(lifted.name, lifted.meta["spec"]))
        keys.append(key)
        last_input = lifted
    return dataclasses.replace(template, graph=graph, state=tuple(ports)), tuple(keys)


def _first(graph: fx.Graph) -> fx.Node:
    return next(iter(graph.nodes))


def _rename(node: fx.Node, name: str, names: set[str]) -> None:
    """Gives a node its name, numbered if another has it; by itself the graph keeps an erased node's name taken."""
    legal = fx.Graph().placeholder(name).name
    node.name = next(n for n in chain([legal], (f"{legal}_{i}" for i in count(1))) if n not in names)
    names.add(node.name)


def _port_name(key: str, block_name: str) -> str:
    """Names a state input by its path inside the block."""
    inner = key.removeprefix(f"{block_name}.")
    if inner == key:
        inner = ".".join(key.split(".")[-2:])
    return re.sub(r"\W+", "_", inner).strip("_")
