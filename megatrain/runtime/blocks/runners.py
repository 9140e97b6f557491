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
        kernels: `"eager"` or `"inductor"`.
    """

    def __init__(self, device: Device, kernels: str) -> None:
        self._device, self._kernels = device, kernels
        # It grows only with new captures: a dropped capture drops its runners.
        self._there: weakref.WeakValueDictionary[Any, BlockRunner] = weakref.WeakValueDictionary()

    def of(self, template: Template) -> BlockRunner:
        """Returns the runner of a template."""
        runner = self._there.get(_key(template))
        if runner is None:
            runner = self._there[_key(template)] = BlockRunner(template, self._device, self._kernels)
        return runner

    def on_eager_kernels(self, program: Program) -> dict[str, str]:
        """Names the templates that run on eager's kernels though others were asked for, with the reasons."""
        there = {name: self._there.get(_key(template)) for name, template in program.templates.items()}
        return {name: runner.why_eager for name, runner in there.items() if runner is not None and runner.why_eager}


def _key(template: Template) -> Any:
    cost = template.cost
    return template_key(template), () if cost is None else (cost.held_state, cost.results)
