"""Draws: the random numbers of a forward, drawn without the forward, to learn where the generators are behind it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx

from megatrain.device import Device
from megatrain.memory.block_image import stored_stride
from megatrain.passes.interpret import Code
from megatrain.passes.program import Program
from megatrain.tracer.spec import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    spec: TensorSpec
    requires_grad: bool

    def like_it(self, device: Device) -> torch.Tensor:
        """A tensor of ones: a probability, a weight, a standard deviation, or an index."""
        spec, place = self.spec, torch.device("cpu") if self.spec.on_host else device.torch_device
        made = torch.empty_strided(spec.shape, stored_stride(spec), dtype=spec.dtype, device=place).fill_(1)
        return (
            made.requires_grad_().clone() if self.requires_grad else made
        )  # a call may write into it, if it's no leaf


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One random call, with nothing but its operands' shapes."""

    code: Code
    operands: Sequence[_Operand]

    def make(self, device: Device) -> None:
        """Draws from the present generators."""
        with torch.enable_grad():
            self.code([operand.like_it(device) for operand in self.operands])


class Draws:
    """The random calls of a program, in the order of its forward.

    Args:
        calls: Of each block.
        are_hidden: Some of them draw from a state that torch doesn't show.
        are_opaque: There are opaque modules, which drew nothing when they were captured.
    """

    def __init__(self, calls: Sequence[Sequence[_Draw]], *, are_hidden: bool = False, are_opaque: bool = False) -> None:
        self._calls = calls
        self.are_hidden = are_hidden
        self.are_opaque = are_opaque

    @staticmethod
    def of(program: Program) -> Draws | None:
        """Finds the random calls; None if one can't be made alone, such as that of an opaque module that draws."""
        of_template = functools.cache(lambda name: _draws_of(program.templates[name].graph))  # pyright: ignore
        calls: list[Sequence[_Draw]] = []
        if any(template.hides_draws for template in program.templates.values()):
            return Draws(calls, are_hidden=True)
        for block in program.blocks:
            found = of_template(block.template)
            if found is None:
                return None
            calls.append(found)
        return Draws(calls, are_opaque=bool(program.opaque_calls))

    def make(self, device: Device) -> None:
        """Draws what a forward draws, from the present generators.

        How many numbers a call draws may depend on its operands' shapes, layouts and history, not on their values.
        """
        for call in chain.from_iterable(self._calls):
            call.make(device)


def _draws_of(graph: fx.Graph) -> list[_Draw] | None:
    nodes = [node for node in graph.nodes if node.meta.get("is_random") and not node.meta.get("drew_nothing")]
    found = [_draw_of(node) for node in nodes]
    return None if None in found else [draw for draw in found if draw is not None]


def _draw_of(node: fx.Node) -> _Draw | None:
    alone = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    operands: list[_Operand] = []
    for operand in node.all_input_nodes:
        spec = operand.meta.get("spec")
        if not isinstance(spec, TensorSpec):
            return None
        known[operand] = alone.placeholder(operand.name)
        operands.append(_Operand(spec, bool(operand.meta["requires_grad"])))
    alone.node_copy(node, known.__getitem__)
    alone.output(())
    code = Code(alone)
    return None if code.opaque else _Draw(code, operands)
