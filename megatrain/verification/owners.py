"""Which blocks a tensor belongs to."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megatrain.compiled.inside import Variant
from megatrain.passes.program import Block, Program
from megatrain.tracer.arguments import Structure
from megatrain.verification.leaves import named_leaves


class Owners:
    """Names the blocks of what a step produced.

    Args:
        variant: What was compiled.
        result: The compiled model's output, whose tensors stand in the order of the program's outputs.
    """

    def __init__(self, variant: Variant, result: Any):
        program = variant.program
        self._blocks = program.blocks
        self._of_state = _blocks_of_state(program)
        readers = program.readers()
        names = zip(variant.traced.input_names, program.inputs, strict=True)
        self._of_inputs = {argument: readers[value] for argument, value in names}
        places = {id(t): i for i, t in enumerate(Structure.of(result).placeholders)}
        self._of_outputs: dict[str, tuple[int, ...]] = {}
        for path, leaf in named_leaves(result):
            if id(leaf) in places:
                self._of_outputs[path] = self._of_output(program, places[id(leaf)])

    def _of_output(self, program: Program, place: int) -> tuple[int, ...]:
        ref = program.outputs[place]
        if ref.kind == "state":
            return self._of_state.get(ref.name, ())
        producer = program.values[ref.name].producer
        return () if producer is None else (producer,)

    def blocks(self, kind: str, name: str) -> tuple[Block, ...]:
        """Returns the blocks of a `(kind, name)` that `compare` knows, in order."""
        return tuple(self._blocks[i] for i in self._indices(kind, name))

    def __call__(self, kind: str, name: str) -> tuple[str, ...]:
        """Returns the blocks' labels, `block 3 layers.2`."""
        return tuple(f"block {block.index} {block.name}".rstrip() for block in self.blocks(kind, name))

    def _indices(self, kind: str, name: str) -> tuple[int, ...]:
        if kind == "output":
            return self._of_outputs.get(name, ())
        if kind == "input gradient":
            return self._of_inputs.get(name, ())
        return self._of_state.get(name, ()) if kind in ("gradient", "parameter", "buffer") else ()


def _blocks_of_state(program: Program) -> dict[str, tuple[int, ...]]:
    """Blocks that read a parameter or buffer, or make what a buffer holds afterwards, by each of its names."""
    found: dict[str, set[int]] = defaultdict(set)
    readers = program.readers()
    for block in program.blocks:
        for key in block.binding:
            found[program.state[key].owner].add(block.index)
    for value, key in program.buffers:
        found[key].update(readers[value])
    for key, value in program.commits:
        producer = program.values[value].producer
        if producer is not None:
            found[key].add(producer)
    names = {name: e.owner for e in program.state.values() for name in (e.owner, *e.ties)}
    return {name: tuple(sorted(found[key])) for name, key in names.items()}
