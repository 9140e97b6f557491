"""Runners: the runners of a model's templates, shared by all programs that have equal ones."""

from __future__ import annotations

import weakref
from typing import Any

from megatrain.device import Device
from megatrain.passes.dedup import template_key
from megatrain.passes.program import Program, Template
from megatrain.runtime.blocks.block import BlockRunner


class Runners:
    """Makes runners, and finds those that are there.

    Args:
        device: Compute device.
        kernels: `"eager"`, `"graphs"` or `"inductor"`.
    """

    def __init__(self, device: Device, kernels: str) -> None:
        self._device, self._kernels = device, kernels
        self._graphs = device.launch_graphs() if kernels == "graphs" else None
        # It grows only with new captures: a dropped capture drops its runners.
        self._there: weakref.WeakValueDictionary[Any, BlockRunner] = weakref.WeakValueDictionary()

    def of(self, template: Template, *, is_shared: bool = False) -> BlockRunner:
        """Returns the runner of a template.

        Args:
            template: The template.
            is_shared: Several blocks run it. Only their kernels are recorded: a recording keeps its memory.
        """
        graphs = self._graphs if is_shared else None
        key = _key(template), graphs is not None
        runner = self._there.get(key)
        if runner is None:
            kernels = "eager" if self._kernels == "graphs" else self._kernels
            runner = self._there[key] = BlockRunner(template, self._device, kernels, graphs)
        return runner

    def on_eager_kernels(self, program: Program) -> dict[str, str]:
        """Names the templates that run on eager's kernels though others were asked for, with the reasons."""
        there = {
            name: self._there.get((_key(template), is_recorded))
            for name, template in program.templates.items()
            for is_recorded in (False, True)
            if (_key(template), is_recorded) in self._there
        }
        return {name: runner.why_eager for name, runner in there.items() if runner is not None and runner.why_eager}


def _key(template: Template) -> Any:
    cost = template.cost
    return template_key(template), () if cost is None else (cost.held_state, cost.results)
