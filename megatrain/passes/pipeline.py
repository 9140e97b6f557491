"""The pipeline: a captured model in, a program of blocks over shared templates out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

from torch import fx

from megatrain.base.checks import checked, function, named, optional, sequence_of
from megatrain.base.sizes import ALIGNMENTS, SIZE, parse_bytes
from megatrain.device import find
from megatrain.errors import LowerError, OptionError, TraceError
from megatrain.passes.canonicalize import canonicalize, copied_graph, dedup
from megatrain.passes.check import verify_program
from megatrain.passes.measure import KnownCosts, measure
from megatrain.passes.partition import partition
from megatrain.passes.program import Block, Port, Program, Template
from megatrain.passes.split.split_state import split_state
from megatrain.tracer.traced import TracedModule


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
    names = {node.name for node in graph.nodes if node.op != "get_attr"}
    ports: list[Port] = []
    keys: list[str] = []
    for read, lifted in _lifted(graph):
        _rename(lifted, _port_name(str(read.target), block_name), names)
        lifted.meta = {key: lifted.meta[key] for key in ("spec", "requires_grad")}
        ports.append(Port(lifted.name, lifted.meta["spec"]))
        keys.append(str(read.target))
    return dataclasses.replace(template, graph=graph, state=tuple(ports)), tuple(keys)


def _lifted(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Puts a placeholder, after all others, in place of each read of state; returns the two of each."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last = placeholders[-1] if placeholders else None
    found: list[tuple[fx.Node, fx.Node]] = []
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(f"{node.name}_state")
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        found.append((node, last))
    return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stateless:
    """A whole capture as a graph without `get_attr` nodes, so that it runs on any tensors.

    Args:
        graph: Its inputs are those of the capture and then the state; its results are those of the capture and then the
            buffers that the capture writes back.
        keys: Of the state, in the order of the inputs.
        placeholders: Of the state, by the name that its node has in the capture.
    """

    graph: fx.Graph
    keys: tuple[str, ...]
    placeholders: Mapping[str, fx.Node]


def stateless(traced: TracedModule) -> Stateless:
    """Makes a capture's state an input, and adds the buffers that it writes back to the results."""
    graph, copies = copied_graph(traced.graph)
    lifted = dict(_lifted(graph))
    end = graph.output_node()
    results: Any = end.args[0]
    end.args = ((*results, *(lifted.get(copies[n], copies[n]) for _, n in traced.writes_back)),)
    keys = tuple(str(node.target) for node in lifted)
    return Stateless(graph, keys, {node.name: placeholder for node, placeholder in lifted.items()})


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


Pass = Callable[[Any], Any]
"""`TracedModule -> TracedModule`, `TracedModule -> Program` (`partition` alone) or `Program -> Program`."""
Rewrite = Callable[[TracedModule], TracedModule]
"""A pass that changes the graph, and is checked after it like those of megatrain."""
AfterPass = Callable[[str, TracedModule | Program], None]

PASSES = sequence_of(function(1), (tuple, list), "a list of passes")
"""What a list of passes may be, wherever it enters."""


@checked(block_bytes=optional(SIZE), passes=optional(PASSES), rewrites=PASSES, alignment=optional(ALIGNMENTS))
def lower(
    traced: TracedModule,
    *,
    block_bytes: int | str | None = None,
    rewrites: Sequence[Rewrite] = (),
    passes: Sequence[Pass] | None = None,
    after_pass: AfterPass | None = None,
    alignment: int | None = None,
) -> Program:
    """Turns a capture into blocks over shared, parameter-free templates.

    Args:
        traced: The capture.
        block_bytes: Target size of a block's state, in bytes or as `"64MiB"`; None keeps the model's own
            repeated modules.
        rewrites: Your own passes on the graph, run after canonicalize; the option `passes` of `compile`.
        passes: Replaces the default order canonicalize, your rewrites, split_state (with `block_bytes` only),
            partition, lift_state, dedup, measure.
        after_pass: Called with the pass's name and its result, after the checker; for dumps and timing.
        alignment: Tensors of a block's state begin at multiples of so many bytes; None is what the capture's device
            wants, 64 on the CPU and 512 on an accelerator.

    Returns:
        A program that passes `verify_program`, and whose `provenance` names the passes that ran.

    Raises:
        OptionError: If an option has a wrong value.
        LowerError: If a pass breaks a rule, or the passes don't end in a program whose state is lifted.
    """
    return lowered_with(
        KnownCosts(),
        traced,
        block_bytes=None if block_bytes is None else parse_bytes(block_bytes),
        rewrites=rewrites,
        passes=passes,
        after_pass=after_pass,
        alignment=alignment,
    )


def lowered_with(
    costs: KnownCosts,
    traced: TracedModule,
    *,
    block_bytes: int | None,
    rewrites: Sequence[Rewrite],
    passes: Sequence[Pass] | None = None,
    after_pass: AfterPass | None,
    alignment: int | None,
    fuses: bool = False,
) -> Program:
    """Does what `lower` does; of templates whose costs are known nothing is measured, and others are added to them.

    With `fuses`, kernels count as a compiler makes them; see `measure`.
    """
    alignment = find(traced.device).alignment if alignment is None else alignment
    if passes is None:
        splits = () if block_bytes is None else (partial(split_state, limit=block_bytes, alignment=alignment),)
        of_program = lift_state, dedup, partial(measure, costs=costs, fuses=fuses)
        passes = (canonicalize, *rewrites, *splits, partial(partition, block_bytes=block_bytes), *of_program)
    elif rewrites or block_bytes is not None:
        raise OptionError(
            f"passes= and {'rewrites' if rewrites else 'block_bytes'}= were given together.\n"
            "  `passes` is the whole sequence of passes; the other option is for the default sequence.\n"
            "  Put your rewrites, and partial(partition, block_bytes=...), among the passes."
        )
    value = _run(traced, passes, rewrites, after_pass, alignment)
    if not isinstance(value, Program):
        raise LowerError(
            f"the passes end in {named(value)}.\n  The last pass must return a program.\n"
            "  Add partition and the passes after it, or leave out `passes`."
        )
    if not value.is_lifted:
        raise LowerError(
            f"the passes end in a program of {value.name} whose templates read state by name.\n"
            "  A program must have templates without state, which are bound to the state of each block.\n"
            "  Add lift_state after partition, or leave out `passes`."
        )
    return value


def _run(
    traced: TracedModule,
    passes: Sequence[Pass],
    rewrites: Sequence[Rewrite],
    after_pass: AfterPass | None,
    alignment: int,
) -> TracedModule | Program:
    value: TracedModule | Program = traced
    traced.check()
    provenance: list[str] = []
    for step in passes:
        name = pass_name(step)
        made = run_pass(step, value, is_rewrite=any(step is rewrite for rewrite in rewrites))
        provenance.append(name)
        value = made
        if isinstance(made, Program):
            value = dataclasses.replace(made, provenance=tuple(provenance), alignment=alignment)
        if after_pass is not None:
            after_pass(name, value)
    return value


def run_pass(step: Pass, value: TracedModule | Program, *, is_rewrite: bool) -> TracedModule | Program:
    """Runs one pass, and the checker on what it returns; a LowerError names the pass and the rule that it broke."""
    name, made = pass_name(step), step(value)
    _check_kind(name, made, value, is_rewrite=is_rewrite)
    _check(name, made, value)
    return made


def pass_name(step: Pass) -> str:
    """Returns the name of a pass: of its function, or of the class of an object that is called."""
    while isinstance(step, partial):
        step = step.func
    return str(getattr(step, "__name__", type(step).__name__))


def _check_kind(name: str, made: object, given: TracedModule | Program, *, is_rewrite: bool) -> None:
    """Refuses what isn't a value that passes make, or not in this place."""
    if isinstance(made, TracedModule) and isinstance(given, TracedModule):
        return
    if isinstance(made, Program) and not is_rewrite:
        return
    rule, way_out = "A pass takes a TracedModule and returns another one, or a Program.", "what `Rewriter.done()` gives"
    if is_rewrite:
        rule = "A rewrite takes a TracedModule and returns a TracedModule."
    elif isinstance(given, Program):
        rule = "A pass after partition takes a Program and returns a Program."
        way_out = "the result of dataclasses.replace(program, ...)"
    raise LowerError(f"the pass `{name}` returned {named(made)}.\n  {rule}\n  Return {way_out}.")


def _check(name: str, made: TracedModule | Program, given: TracedModule | Program) -> None:
    """Runs the checker on the result of a pass."""
    try:
        if isinstance(made, Program):
            verify_program(made)
            return
        made.check()
    except (LowerError, TraceError) as error:
        raise LowerError(f"the pass `{name}` broke a rule: {error}") from error
    if isinstance(given, TracedModule):
        _check_ends(name, made, given)


def _check_ends(name: str, made: TracedModule, given: TracedModule) -> None:
    """What callers give and get stays: the capture's guards, and the structure of its result, tell of nothing else."""
    for what, old, new in (
        ("inputs", _described(given.inputs), _described(made.inputs)),
        ("outputs", _described(given.results), _described(made.results)),
        ("written buffers", [k for k, _ in given.writes_back], [k for k, _ in made.writes_back]),
    ):
        # Names of results are of no account: another call may make them.
        if old != new:
            raise LowerError(
                f"the pass `{name}` gave {given.name} other {what}: {_listed(new)} instead of {_listed(old)}.\n"
                "  A pass may change how results are computed, but not the inputs and outputs.\n"
                "  Replace each by a tensor of the same shape, dtype and strides."
            )


def _described(nodes: Sequence[Any]) -> list[str]:
    return [
        f"{node.name}: {node.meta['spec']}" if node.op == "placeholder" else str(node.meta["spec"]) for node in nodes
    ]


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items) if items else "nothing"
