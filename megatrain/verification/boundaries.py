"""Watches a compiled step at the boundaries of its blocks, from outside, and stops at the first wrong tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatrain.compiled.inside import Variant
from megatrain.device import Device
from megatrain.passes.program import Block
from megatrain.runtime.engine import Engine
from megatrain.runtime.executor import Executor
from megatrain.verification.compare import Tolerance, distance, scale_of
from megatrain.verification.reference import Truth
from megatrain.verification.report import FirstDifference
from megatrain.verification.trial import generators


class BoundaryWatch:
    """Compares passing tensors with the truth, and keeps the first difference.

    Args:
        truth: The tensors that should pass.
        step: Number of the step.
        tolerance: Relative difference that counts as equal.
    """

    def __init__(self, truth: Truth, step: int, tolerance: Tolerance):
        self.first: FirstDifference | None = None
        self._truth = truth
        self._step = step
        self._tolerance = tolerance

    def see(self, phase: str, block: Block, what: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Compares the tensors that pass at one place."""
        for name, tensor in zip(names, tensors, strict=True):
            if self.first is not None:
                return
            # A recompute repeats the forward: it reads and makes the same.
            expected = self._truth.at("forward" if phase == "recompute" else phase, block.index, what, name)
            absolute, reason = _apart(expected, tensor)
            if not absolute:
                continue
            relative = absolute / scale_of(expected)
            if relative > self._tolerance.of_value(expected):
                self.first = FirstDifference(
                    "runtime",
                    self._step,
                    block.index,
                    block.name,
                    phase,
                    f"{what} `{name}`",
                    absolute,
                    relative,
                    reason,
                )


def _apart(expected: torch.Tensor | None, found: torch.Tensor | None) -> tuple[float, str]:
    if expected is not None and found is not None:
        return distance(expected.detach(), found.detach())
    return distance(expected, found)


def watch(variant: Variant, engine: Engine, seen: BoundaryWatch) -> None:
    """Puts a watched runner in front of every block's."""
    lowered = variant.lowered
    if lowered.executor is None:
        lowered.executor = Executor(lowered.program, lowered.schedule, engine)
    runners: list[Any] = lowered.executor.loaded.runners
    runners[:] = [
        _WatchedRunner(runner, block, seen, engine.device)
        for runner, block in zip(runners, variant.program.blocks, strict=True)
    ]


class _WatchedRunner:
    """A block's runner that compares everything that goes in and comes out."""

    def __init__(self, runner: Any, block: Block, seen: BoundaryWatch, device: Device):
        self._runner = runner
        self._device = device
        self._block = block
        self._watch = seen
        self._has_run = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, inputs: Any, state: Any, *rest: Any, **options: Any) -> Any:
        phase = self._enter(inputs, state)
        outputs = self._runner.forward(inputs, state, *rest, **options)
        self._watch.see(phase, self._block, "output", self._block.outputs, outputs)
        return outputs

    def forward_with_graph(self, inputs: Any, state: Any, *rest: Any, **options: Any) -> Any:
        phase = self._enter(inputs, state)
        graph, outputs = self._runner.forward_with_graph(inputs, state, *rest, **options)
        if phase == "forward" or self._runner.repeats_outputs:
            self._watch.see(phase, self._block, "output", self._block.outputs, outputs)
        return _WatchedGraph(graph, self._block, self._watch), outputs

    def _enter(self, inputs: Any, state: Any) -> str:
        phase = "recompute" if self._has_run else "forward"
        self._has_run = True
        self._watch.see(phase, self._block, "input", self._block.inputs, inputs)
        self._watch.see(phase, self._block, "state", self._block.binding, state)
        if phase == "forward" or self._runner.rng_state() is not None:
            states = generators(self._device)
            self._watch.see(phase, self._block, "random state", list(states), list(states.values()))
        return phase


class _WatchedGraph:
    """A block's local graph, with the gradients that come in and go out compared."""

    def __init__(self, graph: Any, block: Block, seen: BoundaryWatch):
        self._graph = graph
        self._block = block
        self._watch = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def gradients(self, output_gradients: Any, *rest: Any, **options: Any) -> Any:
        block = self._block
        self._watch.see("backward", block, "gradient of", block.outputs, output_gradients)
        own, state = self._graph.gradients(output_gradients, *rest, **options)
        self._watch.see("backward", block, "gradient of input", block.inputs, own)
        self._watch.see("backward", block, "gradient of state", block.binding, state)
        return own, state
