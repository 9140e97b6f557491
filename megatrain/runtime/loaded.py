"""Loaded: a program on an engine, with everything that its operations look up; Facts: where gradients flow in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx

from megatrain.errors import ExecuteError
from megatrain.passes.interpret import has_inner_grad, looks_in_backward
from megatrain.passes.kept_results import kept_results
from megatrain.passes.measured_runs import launch_graph_sizes
from megatrain.passes.program import Block, Program, has_backward, shared_templates
from megatrain.runtime.block import HIDDEN_DRAWS, BlockRunner
from megatrain.runtime.engine import Engine
from megatrain.runtime.random_calls import Draws
from megatrain.scheduler.from_program import merge_programs
from megatrain.scheduler.schedule import Schedule
from megatrain.tracer.block_image import BlockImage
from megatrain.tracer.inventory import StateEntry


@dataclass(frozen=True, slots=True)
class Facts:
    """Which tensors take part in the backward.

    Args:
        trained: Keys of the trainable parameters that a backward can reach, in the order of eager's gradients.
        read_backward: Keys of the state that the backward reads.
        movable: Keys of the state that only linear layers read. Eager's graph keeps a view of their memory, and goes on
            with it when they get other memory; of other layers it keeps the parameter, and reads what that has then.
        watched: Values that the backward reads, or whose memory several outputs or inputs share: nobody may write
            into them before it.
        returned_buffers: Outputs of the model that are a buffer which the forward wrote in place: the value's name and
            the buffer's key.
        needs_grad: Per block: one flag per input, then one per state tensor.
        is_carried: Per block and input: a later block, the caller, or another device can give it a gradient first.
        completes: Per block: the state of which it is the last, in backward order, to give a gradient; first the
            parts of parameters, then the parameters, in the order of eager's backward.
        differentiable_outputs: Places of the model's outputs through which a gradient flows.
        differentiable_inputs: Places of the model's inputs that get one.
    """

    trained: tuple[str, ...]
    read_backward: tuple[str, ...]
    movable: frozenset[str]
    watched: frozenset[str]
    returned_buffers: Mapping[str, str]
    needs_grad: tuple[tuple[bool, ...], ...]
    is_carried: tuple[tuple[bool, ...], ...]
    completes: tuple[tuple[str, ...], ...]
    parts: tuple[StateEntry, ...]
    differentiable_outputs: tuple[int, ...]
    differentiable_inputs: tuple[int, ...]

    @staticmethod
    def of(program: Program, *, is_training: bool) -> Facts:
        """Reads the facts off a program; nothing is differentiable outside training."""
        values = program.values
        returned = [ref.name if ref.kind == "value" else None for ref in program.outputs]
        outputs = [i for i, name in enumerate(returned) if name is not None and values[name].requires_grad]
        inputs = [i for i, name in enumerate(program.inputs) if values[name].requires_grad]
        parts = {key: entry for key, entry in program.state.items() if entry.base is not None}
        places = {key: place for place, key in enumerate(chain.from_iterable(program.gradient_order))}
        completes = _completed_keys(program, places)
        trained = sorted(chain.from_iterable(completes), key=lambda key: places.get(key, -1))
        differentiated = [block for block in program.blocks if has_backward(program, block)]
        return Facts(
            trained=tuple(key for key in trained if key not in parts) if is_training else (),
            read_backward=tuple(dict.fromkeys(program.state[k].owner for b in differentiated for k in b.binding)),
            movable=_movable_state(program),
            watched=_watched_values(program, differentiated),
            returned_buffers=_returned_buffers(program),
            needs_grad=tuple(_needs_grad(program, block, is_training) for block in program.blocks),
            is_carried=_carried_inputs(program),
            completes=completes,
            parts=tuple(parts.values()),
            differentiable_outputs=tuple(outputs) if is_training else (),
            differentiable_inputs=tuple(inputs) if is_training else (),
        )


def _movable_state(program: Program) -> frozenset[str]:
    found: dict[str, bool] = {}
    for block in program.blocks:
        template = program.templates[block.template]
        places = [node for node in template.graph.nodes if node.op == "placeholder"][len(template.inputs) :]
        for key, node in zip(block.binding, places, strict=True):
            only = all(user.target is torch.nn.functional.linear for user in node.users)
            owner = program.state[key].owner
            found[owner] = found.get(owner, True) and only
    return frozenset(key for key, only in found.items() if only)


def _needs_grad(program: Program, block: Block, is_training: bool) -> tuple[bool, ...]:
    flags = [program.values[name].requires_grad for name in block.inputs]
    flags += [program.state[key].requires_grad for key in block.binding]
    # Without training nobody outside needs gradients, but a forward that differentiates inside does.
    is_needed = is_training or has_inner_grad(program.templates[block.template].graph)
    return tuple(flag and is_needed for flag in flags)


def _returned_buffers(program: Program) -> dict[str, str]:
    values = program.values
    written = {values[name].storage: (values[name].spec, key) for key, name in program.commits}
    found: dict[str, str] = {}
    for name in (ref.name for ref in program.outputs if ref.kind == "value"):
        spec, key = written.get(values[name].storage, (None, ""))
        if values[name].spec == spec and not values[name].requires_grad:
            found[name] = key
    return found


def _watched_values(program: Program, differentiated: Sequence[Block]) -> frozenset[str]:
    """Autograd follows writes through one name; a second name for the same memory would keep its old history."""
    ends = {ref.name for ref in program.outputs if ref.kind == "value"}
    ends.update(program.inputs)
    num_names = Counter(program.values[name].storage for name in ends)
    shared = {name for name in ends if num_names[program.values[name].storage] > 1}
    return frozenset(shared.union(*(block.inputs for block in differentiated)))


def _completed_keys(program: Program, places: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    first_user: dict[str, int] = {}
    first_of_parts: dict[str, int] = {}
    for block in reversed(program.blocks):
        if has_backward(program, block):
            trained = [program.state[key] for key in _differentiated_state(program, block)]
            first_user.update((entry.key, block.index) for entry in trained)
            first_of_parts.update((entry.owner, block.index) for entry in trained if entry.base is not None)
    completes: list[list[str]] = [[] for _ in program.blocks]

    def order(completed: tuple[str, int]) -> tuple[bool, int]:
        entry = program.state.get(completed[0])
        return entry is None or entry.base is None, places.get(completed[0], -1)

    for key, index in sorted((*first_user.items(), *first_of_parts.items()), key=order):
        completes[index].append(key)
    return tuple(map(tuple, completes))


def _differentiated_state(program: Program, block: Block) -> list[str]:
    """Lists the trained state through which a gradient may flow: not what a block only compares or detaches."""
    template = program.templates[block.template]
    places = list(template.graph.find_nodes(op="placeholder"))
    ports = places[len(template.inputs) :]
    flags = [program.values[name].requires_grad for name in block.inputs]
    flags += [program.state[key].requires_grad for key in block.binding]
    # The nodes tell of the first block with this template, and of others that train the same.
    is_told = all(node.meta.get("requires_grad") == flag for node, flag in zip(places, flags, strict=True))
    # A write into memory that several nodes share may reach readers that are no users.
    num_names = Counter(node.meta.get("storage") for node in template.graph.nodes)
    flows: set[fx.Node] = set()
    for node in reversed(template.graph.nodes):
        is_end = node.op == "output" or ("requires_grad" not in node.meta and not node.users)
        is_shared = "storage" in node.meta and num_names[node.meta["storage"]] > 1
        may_flow = not is_told or node.meta.get("requires_grad", True)
        if may_flow and (is_end or is_shared or not flows.isdisjoint(node.users)):
            flows.add(node)
    pairs = zip(ports, block.binding, strict=True)
    return [key for port, key in pairs if program.state[key].requires_grad and not flows.isdisjoint(port.users)]


def _carried_inputs(program: Program) -> tuple[tuple[bool, ...], ...]:
    readers = program.readers()
    returned = {ref.name for ref in program.outputs if ref.kind == "value"}
    return tuple(
        tuple(readers[name][-1] > block.index or name in returned for name in block.inputs) for block in program.blocks
    )


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A program whose state is in the host store of an engine.

    Args:
        names: The values' names, by their index in the schedule's workload; None for those of other micro-batches.
            After the program's values come the results that blocks may keep.
        entering: The value with which each buffer that the forward writes begins.
        written: The buffers that take a value, by the value's name.
        draws: The random calls of a whole forward, on all devices; None if they can't be made without it.
        results: The names of the results that each block may keep; blocks that have none are missing.
        looking: Blocks in whose backward the user's code may look at buffers, if the forward writes any.
    """

    program: Program
    images: Sequence[BlockImage]
    runners: list[BlockRunner]
    facts: Facts
    names: Sequence[str | None]
    entering: Mapping[str, str]
    written: Mapping[str, Sequence[str]]
    draws: Draws | None
    results: Mapping[int, Sequence[str]]
    looking: frozenset[int]

    @staticmethod
    def of_each(
        programs: Sequence[Program],
        merged: Sequence[Program] | None,
        engine: Engine,
        schedule: Schedule,
    ) -> dict[int, Loaded]:
        """Brings the programs of a step's micro-batches onto an engine, each once.

        Args:
            programs: One per micro-batch.
            merged: The same and maybe more, in the order in which their workloads were merged; None is that of first
                use.
            schedule: Says whether there is a backward, and which kernels are recorded.

        Returns:
            By the identity of the program.

        Raises:
            ScheduleError: If they can't share blocks.
        """
        merged = programs if merged is None else merged
        distinct = {id(program): program for program in merged}
        if not distinct.keys() >= {id(program) for program in programs}:
            raise ExecuteError(
                "merged lacks programs of the micro-batches.\n"
                "  A schedule serves the programs that it was made for.\n"
                "  Give the programs that run, or None."
            )
        places = dict(zip(map(id, merged), merge_programs(merged).places, strict=True))
        return {key: Loaded._of(program, places[key], engine, schedule) for key, program in distinct.items()}

    @staticmethod
    def _of(program: Program, places: Sequence[int | None], engine: Engine, schedule: Schedule) -> Loaded:
        is_training, recorded = schedule.kind.mode == "train", frozenset(schedule.recorded)
        results = {block.index: [name for name, _ in found] for block, found in kept_results(program)}
        names = [*program.values, *chain.from_iterable(results.values())]
        shared = shared_templates(program) if engine.runners.records_all else ()
        records = {b.index for b in program.blocks if b.index in recorded or b.template in shared}
        sizes = launch_graph_sizes(program) if records else {}
        return Loaded(
            program=program,
            images=engine.adopt(program),
            runners=[
                engine.runners.of(
                    program.templates[b.template], sizes.get(b.template, 0) if b.index in records else None
                )
                for b in program.blocks
            ],
            facts=Facts.of(program, is_training=is_training),
            names=[None if place is None else names[place] for place in places],
            entering={key: name for name, key in program.buffers},
            written={new: [key for key, name in program.commits if name == new] for _, new in program.commits},
            draws=Draws.of(program) if is_training else None,
            results=results,
            looking=frozenset(
                b.index
                for b in program.blocks
                if program.commits and looks_in_backward(program.templates[b.template].graph)
            ),
        )

    def check_recomputed(self, saves: Collection[int]) -> None:
        """Checks that a second run of each block that is recomputed draws the random numbers of its first."""
        for block in self.program.blocks:
            is_recomputed = block.index not in saves and any(self.facts.needs_grad[block.index])
            if is_recomputed and self.program.templates[block.template].hides_draws:
                raise ExecuteError(HIDDEN_DRAWS.format(f"block {block.index} {block.name}, which is recomputed, has"))


def serving(known: Mapping[int, Loaded], programs: Sequence[Program], schedule: Schedule) -> list[Loaded]:
    """Returns the programs of a step's micro-batches, in their order, as `Loaded.of_each` has them.

    Raises:
        ExecuteError: If a block that the schedule recomputes would draw other random numbers.
    """
    found = [known[id(program)] for program in programs]
    for each in found:
        each.check_recomputed(schedule.saves)
    return found
