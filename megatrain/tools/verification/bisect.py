"""Finds where a step first goes wrong: in the model, in its capture, in a pass, or while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.passes.program import Block, OutputRef, Program
from megatrain.tools.verification.compare import Tolerance, compare, distance, named_leaves, scale_of
from megatrain.tools.verification.observed import (
    BlocksInOrder,
    Boundaries,
    BoundaryWatch,
    ModuleCall,
    WholeGraph,
    followed_calls,
)
from megatrain.tools.verification.report import Difference, FirstDifference
from megatrain.tools.verification.trial import Observation, Trial
from megatrain.tracer.arguments import Structure
from megatrain.training.compiled.inside import Variant
from megatrain.training.compiled.module import CompiledModule


def find_first_difference(trial: Trial, step: int, tolerance: Tolerance) -> FirstDifference:
    """Repeats a step that wasn't equal: eagerly, as one graph, as blocks in order, and as compiled.

    The fault is between the first two of these that disagree.
    """
    return _Search(trial, step, tolerance).run()


@dataclass(frozen=True, slots=True)
class _Search:
    trial: Trial
    step: int
    tolerance: Tolerance

    def run(self) -> FirstDifference:
        expected, calls = self._eager()
        again, others = self._eager()
        worst = self._worst(expected, again)
        if worst is not None:
            wrong = next((a for a, b in zip(calls, others, strict=False) if a != b), None)
            return self._at_module("model", wrong, worst, None)
        compiled, streamed = self.trial.compiled()
        self.trial.train(compiled, streamed, self.step)
        args, kwargs, _ = self.trial.fresh_arguments()
        variant = compiled.megatrain.prepare(*args, **kwargs)
        blocks, truth = self._blocks(variant)
        if self._worst(expected, blocks) is not None:
            return self._before_the_runtime(variant, expected, calls, blocks, truth)
        return self._in_the_runtime(compiled, streamed, variant, blocks, truth)

    def _worst(self, expected: Observation, found: Observation) -> Difference | None:
        differences = [d for d in compare(expected.values, found.values, self.step, self.tolerance) if not d.ok]
        return max(differences, key=lambda d: d.severity, default=None)

    # -- what is compared ----------------------------------------------------------------------------------

    def _eager(self) -> tuple[Observation, list[ModuleCall]]:
        eager = self.trial.eager(self.step)
        with followed_calls(eager) as calls:
            return self.trial.observe(eager, eager, self.step).on_host(), calls

    def _blocks(self, variant: Variant) -> tuple[Observation, Boundaries]:
        eager = self.trial.eager(self.step)
        blocks = BlocksInOrder(variant, eager)
        observed = self.trial.observe(blocks, eager, self.step, after_backward=blocks.backward)
        return observed.on_host(), blocks.boundaries

    # -- the model or its capture ----------------------------------------------------------------------------

    def _before_the_runtime(
        self,
        variant: Variant,
        expected: Observation,
        calls: list[ModuleCall],
        blocks: Observation,
        truth: Boundaries,
    ) -> FirstDifference:
        eager = self.trial.eager(self.step)
        graph = WholeGraph(variant.traced, variant.program, eager)
        observed = self.trial.observe(graph, eager, self.step).on_host()
        worst = self._worst(expected, observed)
        if worst is not None:
            wrong = graph.first_wrong_call(calls)
            return self._at_module("capture", wrong, worst, _block_of_module(variant, wrong))
        for block in variant.program.blocks:
            for name in block.outputs:
                found = self._beyond(truth.values[name], graph.values(name))
                if found is not None:
                    return self._in_block("passes", block, "forward", f"output `{name}`", found)
        worst = self._worst(expected, blocks)
        assert worst is not None
        return self._after("passes", worst, Owners(variant, None))

    def _at_module(
        self, culprit: str, call: ModuleCall | None, worst: Difference, block: int | None
    ) -> FirstDifference:
        phase = "backward" if call is None and "gradient" in worst.kind else "forward"
        name, what = "" if call is None else call.name, f"{worst.kind} `{worst.name}`"
        size = (worst.absolute, worst.relative, worst.reason)
        return FirstDifference(culprit, self.step, block, name, phase, what, *size)

    def _in_block(
        self, culprit: str, block: Block, phase: str, what: str, found: tuple[float, float, str]
    ) -> FirstDifference:
        return FirstDifference(culprit, self.step, block.index, block.name, phase, what, *found)

    def _beyond(self, found: torch.Tensor, expected: Sequence[torch.Tensor]) -> tuple[float, float, str] | None:
        """How far a tensor is from the nearest of its true versions; None if that is within the tolerance."""
        sizes: list[tuple[float, float, str]] = []
        for tensor in expected:
            absolute, reason = distance(tensor, found)
            relative = absolute / scale_of(tensor) if absolute else 0.0
            if relative <= self.tolerance.of_value(tensor):
                return None
            sizes.append((absolute, relative, reason))
        return min(sizes, default=None)

    # -- the runtime -----------------------------------------------------------------------------------------

    def _in_the_runtime(
        self, compiled: CompiledModule, streamed: Any, variant: Variant, blocks: Observation, truth: Boundaries
    ) -> FirstDifference:
        # Where eager repeats itself the blocks in order and the compiled step are the same bits, or something is wrong.
        is_exact = self.trial.device.repeats_itself
        watched = BoundaryWatch(truth, self.step, Tolerance(0.0) if is_exact else self.tolerance)
        watched.watch(variant, compiled.megatrain.engine)
        found = self.trial.observe(compiled, streamed, self.step)
        owners = Owners(variant, found.result)
        if watched.first is not None:
            return watched.first
        worst = self._worst(blocks, found)
        if worst is None:
            return FirstDifference("unrepeatable", self.step)
        return self._after("runtime", worst, owners)

    def _after(self, culprit: str, worst: Difference, owners: Owners) -> FirstDifference:
        # A gradient leaves with the first block that uses the parameter, an output with the block that makes it.
        block = next(iter(owners.blocks(worst.kind, worst.name)), None)
        size = (worst.absolute, worst.relative, worst.reason)
        what = f"{worst.kind} `{worst.name}`"
        if block is None:
            return FirstDifference(culprit, self.step, None, "", "after", what, *size)
        return self._in_block(culprit, block, "after", what, size)


def _block_of_module(variant: Variant, call: ModuleCall | None) -> int | None:
    """The first block that holds state of a module, or is named after it."""
    if call is None or not call.name:
        return None
    inside = f"{call.name}."
    for block in variant.program.blocks:
        if block.name == call.name or any(key.startswith(inside) for key in (*block.binding, f"{block.name}.")):
            return block.index
    return None


class Owners:
    """Names the blocks of what a step produced."""

    def __init__(self, variant: Variant, result: Any):
        program = self._program = variant.program
        state, readers = _blocks_of_state(program), program.readers()
        names = zip(variant.traced.input_names, program.inputs, strict=True)
        places = {id(t): i for i, t in enumerate(Structure.of(result).placeholders)}
        self._found: dict[str, dict[str, tuple[int, ...]]] = dict.fromkeys(("gradient", "parameter", "buffer"), state)
        self._found["input gradient"] = {argument: readers[value] for argument, value in names}
        self._found["output"] = {
            path: self._of_output(program.outputs[places[id(leaf)]], state)
            for path, leaf in named_leaves(result)
            if id(leaf) in places
        }

    def _of_output(self, ref: OutputRef, state: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        if ref.kind == "state":
            return state.get(ref.name, ())
        producer = self._program.values[ref.name].producer
        return () if producer is None else (producer,)

    def blocks(self, kind: str, name: str) -> tuple[Block, ...]:
        """Returns the blocks of a `(kind, name)` that `compare` knows, in order."""
        return tuple(self._program.blocks[i] for i in self._found.get(kind, {}).get(name, ()))

    def __call__(self, kind: str, name: str) -> tuple[str, ...]:
        """Returns the blocks' labels, `block 3 layers.2`."""
        return tuple(f"block {block.index} {block.name}".rstrip() for block in self.blocks(kind, name))


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
