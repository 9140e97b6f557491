"""InductorCode: a template's graph, compiled once by torch.compile for all blocks of the template."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import Any
from weakref import finalize

import torch
from torch import fx

from megatrain.device import Device
from megatrain.errors import EagerKernelsWarning
from megatrain.passes.distance import largest, tensor_distance
from megatrain.passes.interpret import Code
from megatrain.passes.measuring.fixed_work import fixed_work_obstacle
from megatrain.passes.program import Template
from megatrain.runtime.rng import RngState, repeated_rng
from megatrain.torch_private import patch_functorch

# Dropout draws eager's own numbers, in their order.
_OPTIONS: dict[str, Any] = {"fallback_random": True}
# Of a result's largest value. Rounding moves less; where a dropout drops another element, it moves more.
_OTHER_DRAWS = 0.05


_numbers = count()


class _OtherDrawsError(Exception):
    """The compiled form of a template isn't the same model."""


_Function = Callable[..., tuple[torch.Tensor, ...]]


class InductorCode(Code):
    """Runs a graph by kernels that inductor has made of it, forward and backward; by eager's where it can't.

    The kernels are made at the first call for each combination of grad mode and tensors that require gradients, and
    inductor's cache on disk keeps them. Weights are arguments, so that blocks share the kernels. A block that is
    repeated runs those of its first run.

    Args:
        graph: As in `Code`.
        template: Whose graph it is.
        device: Compute device.

    Attributes:
        why_eager: Why the graph runs on eager's kernels; empty if it doesn't.
    """

    __slots__ = ("_device", "_is_to_be_tried", "_name", "why_eager")

    def __init__(self, graph: fx.Graph, template: Template, device: Device):
        super().__init__(graph)
        self._name, self._device = template.name, device
        # Decompositions may draw in another order, or other numbers: the first run shows.
        self._is_to_be_tried = template.is_random
        self.why_eager = fixed_work_obstacle(template)
        self._warn()

    def _made(self) -> _Function:
        eager = super()._made()
        if self.why_eager:
            return eager
        _give_a_file(eager, self._name)
        compiled: _Function = torch.compile(eager, fullgraph=True, dynamic=False, options=_OPTIONS)

        def run(is_checked: bool, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if self.why_eager:
                return eager(is_checked, *arguments)
            start = RngState.now(self._device) if self._is_to_be_tried else None
            try:
                # A backward may come twice (retain_graph), so that it must not write into what the forward has saved.
                with patch_functorch(donated_buffer=False):
                    if start is not None:
                        self._try(eager, compiled, arguments, start)
                    return compiled(True, *arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, of what it made, or of the model, whose own comes again here
                if start is not None:
                    start.restore(self._device)
                result = eager(is_checked, *arguments)
                self.why_eager = _told(error)
                self._warn()
                return result

        return run

    def _try(self, eager: _Function, compiled: _Function, arguments: Sequence[torch.Tensor], start: RngState) -> None:
        """Runs a template that draws random numbers in both ways, for nothing but to compare them.

        Raises:
            _OtherDrawsError: If they drew other numbers.
        """
        ran: list[tuple[list[torch.Tensor], RngState]] = []
        for function in (eager, compiled):
            with repeated_rng(start, self._device):
                result = function(True, *(a.detach().clone().requires_grad_(a.requires_grad) for a in arguments))
                ran.append(([tensor.detach().cpu() for tensor in result], RngState.now(self._device)))
        (expected, end), (found, other_end) = ran
        gaps = (tensor_distance(e, f)[0] / (largest(e) or 1.0) for e, f in zip(expected, found, strict=True))
        if not end.is_same(other_end) or any(gap > _OTHER_DRAWS for gap in gaps):
            raise _OtherDrawsError("compiled, it draws other random numbers than eager PyTorch")
        self._is_to_be_tried = False

    def _warn(self) -> None:
        if self.why_eager:
            warnings.warn(
                f"template {self._name} runs on eager's kernels: {self.why_eager}", EagerKernelsWarning, stacklevel=2
            )


def _give_a_file(function: _Function, name: str) -> None:
    """Gives a function that came from text a file of its own, which is empty.

    torch.compile calls functions without a file from one wrapper. torch 2.11 counts what it compiles for all of them
    together, and refuses the ninth.
    """
    assert isinstance(function, FunctionType)
    file = f"<megatrain {name} {next(_numbers)}>"
    linecache.cache[file] = (0, None, [], file)
    function.__code__ = function.__code__.replace(co_filename=file)
    finalize(function, linecache.cache.pop, file, None)


def _told(error: Exception) -> str:
    """The first lines of an error of the compiler; the first one alone may say no more than who raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
