"""Finds where a step first goes wrong: in the model, in its capture, in a pass, or while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.compiled import CompiledModule, Variant
from megatrain.verify.boundaries import Watch, watch
from megatrain.verify.compare import Tolerance, compare, distance, largest
from megatrain.verify.fingerprint import ModuleCall, followed_calls
from megatrain.verify.owners import Owners
from megatrain.verify.reference import BlocksInOrder, Truth
from megatrain.verify.report import Difference, FirstDifference
from megatrain.verify.trial import Observation, Trial
from megatrain.verify.whole_graph import WholeGraph


def find_first_difference(trial: Trial, step: int, tolerance: Tolerance) -> FirstDifference:
    """Repeats a step that wasn't equal: eagerly, as one graph, as blocks in order, and as compiled.

    Where the first two of these that disagree meet, the fault is.
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
        if self._worst(expected, again) is not None:
            return self._of_module("model", calls, others, self._worst(expected, again))
        compiled, streamed = self.trial.compiled()
        self.trial.train(compiled, streamed, self.step)
        args, kwargs, _ = self.trial.fresh_arguments()
        variant = compiled.prepare(*args, **kwargs)
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

    def _blocks(self, variant: Variant) -> tuple[Observation, Truth]:
        eager = self.trial.eager(self.step)
        blocks = BlocksInOrder(variant, eager)
        observed = self.trial.observe(blocks, eager, self.step, after_backward=blocks.backward)
        return observed.on_host(), blocks.truth()

    # -- the model or its capture ----------------------------------------------------------------------------

    def _before_the_runtime(
        self,
        variant: Variant,
        expected: Observation,
        calls: list[ModuleCall],
        blocks: Observation,
        truth: Truth,
    ) -> FirstDifference:
        eager = self.trial.eager(self.step)
        graph = WholeGraph(variant.traced, variant.program, eager)
        observed = self.trial.observe(graph, eager, self.step).on_host()
        worst = self._worst(expected, observed)
        if worst is not None:
            known = {p for p in graph.prints}
            wrong = next((c for c in calls if not known.issuperset(c.outputs)), None)
            return self._at_module("capture", wrong, worst, _block_of_module(variant, wrong))
        found = self._first_wrong_block(variant, graph, truth)
        worst = self._worst(expected, blocks)
        assert worst is not None
        return found or self._after("passes", variant, worst)

    def _of_module(
        self, culprit: str, calls: list[ModuleCall], others: list[ModuleCall], worst: Difference | None
    ) -> FirstDifference:
        wrong = next((a for a, b in zip(calls, others, strict=False) if a != b), None)
        return self._at_module(culprit, wrong, worst, None)

    def _at_module(
        self, culprit: str, call: ModuleCall | None, worst: Difference | None, block: int | None
    ) -> FirstDifference:
        assert worst is not None
        name = "" if call is None else call.name
        phase = "backward" if call is None and "gradient" in worst.kind else "forward"
        what = f"{worst.kind} `{worst.name}`"
        return FirstDifference(
            culprit, self.step, block, name, phase, what, worst.absolute, worst.relative, worst.reason
        )

    # -- a pass ----------------------------------------------------------------------------------------------

    def _first_wrong_block(self, variant: Variant, graph: WholeGraph, truth: Truth) -> FirstDifference | None:
        program = variant.program
        for block in program.blocks:
            for name in block.outputs:
                found = self._beyond(truth.values[name], graph.values(name))
                if found:
                    return FirstDifference(
                        "passes", self.step, block.index, block.name, "forward", f"output `{name}`", *found
                    )
        readers = program.readers()
        ends_at = {name: blocks[-1] for name, blocks in readers.items() if blocks}
        for block in reversed(program.blocks):
            for name in block.inputs:
                total = truth.totals.get(name)
                found = self._beyond(total, graph.totals(name)) if total is not None else None
                if found:
                    guilty = program.blocks[ends_at[name]]
                    what = f"gradient of input `{name}`"
                    return FirstDifference("passes", self.step, guilty.index, guilty.name, "backward", what, *found)
        return None

    def _beyond(self, found: torch.Tensor, expected: Iterable[torch.Tensor]) -> tuple[float, float, str] | None:
        """How far a tensor is from the nearest of its true versions; None if that is within the tolerance."""
        nearest: tuple[float, float, str] | None = None
        for tensor in expected:
            absolute, reason = distance(tensor, found)
            relative = absolute / (largest(tensor) or 1.0) if absolute else 0.0
            if relative <= self.tolerance.of_value(tensor):
                return None
            nearest = min(nearest or (absolute, relative, reason), (absolute, relative, reason))
        return nearest

    # -- the runtime -----------------------------------------------------------------------------------------

    def _in_the_runtime(
        self, compiled: CompiledModule, streamed: Any, variant: Variant, blocks: Observation, truth: Truth
    ) -> FirstDifference:
        # On the host the blocks in order and the compiled step are the same bits, or something is wrong.
        is_exact = self.trial.device.type == "cpu"
        watched = Watch(truth, self.step, Tolerance(0.0) if is_exact else self.tolerance)
        watch(variant, compiled.engine, watched)
        found = self.trial.observe(compiled, streamed, self.step)
        owners = Owners(variant, found.result)
        if watched.first is not None:
            return watched.first
        worst = self._worst(blocks, found)
        if worst is None:
            return FirstDifference("unrepeatable", self.step)
        return self._after("runtime", variant, worst, owners)

    def _after(
        self, culprit: str, variant: Variant, worst: Difference, owners: Owners | None = None
    ) -> FirstDifference:
        indices = () if owners is None else owners.indices(worst.kind, worst.name)
        # A gradient leaves with the first block that uses the parameter, an output with the block that makes it.
        block = variant.program.blocks[indices[0]] if indices else None
        return FirstDifference(
            culprit,
            self.step,
            None if block is None else block.index,
            "" if block is None else block.name,
            "after",
            f"{worst.kind} `{worst.name}`",
            worst.absolute,
            worst.relative,
            worst.reason,
        )


def _block_of_module(variant: Variant, call: ModuleCall | None) -> int | None:
    """The first block that holds state of a module, or is named after it."""
    if call is None or not call.name:
        return None
    inside = f"{call.name}."
    for block in variant.program.blocks:
        if block.name == call.name or any(key.startswith(inside) for key in (*block.binding, f"{block.name}.")):
            return block.index
    return None
