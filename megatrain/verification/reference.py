"""Runs a program's blocks one after the other, with nothing of the runtime: the truth about each boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.compiled.inside import Variant
from megatrain.device import find
from megatrain.passes.interpret import Code
from megatrain.passes.program import Block
from megatrain.tracer.arguments import tensors_given
from megatrain.tracer.inventory import inventory
from megatrain.verification.trial import generators

Seen = tuple[str, int, str, str]
"""`(phase, block, what, name)`, such as `("forward", 3, "output", "add_3")`."""


@dataclass(slots=True, eq=False)
class _Ran:
    """A block after its forward: leaves, their aliases for what later blocks leave, and outputs with history."""

    block: Block
    inputs: list[torch.Tensor]
    state: list[torch.Tensor]
    carries: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]


class BlocksInOrder:
    """Stands for a model in a step: forward block by block, and `backward` in reverse once the loss has been.

    Every partial sum of gradients is formed in the order of the runtime, so that the two are the same bits.

    Args:
        variant: What was compiled.
        model: An eager copy on the compute device; its parameters get the gradients, its buffers the new values.
    """

    def __init__(self, variant: Variant, model: nn.Module):
        self._program = variant.program
        self._outputs = variant.traced.outputs
        self._tensors = inventory(model)[1]
        self._codes = {name: Code(t.graph) for name, t in variant.program.templates.items()}
        self._ran: list[_Ran] = []
        self._values: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._returned: list[torch.Tensor] = []
        self._given: tuple[torch.Tensor, ...] = ()
        self._seen: dict[Seen, torch.Tensor | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and returns the model's output, its differentiable tensors being leaves."""
        program = self._program
        self._given = tensors_given(args, kwargs)
        for name, tensor in zip(program.inputs, self._given, strict=True):
            self._values[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        self._values |= {name: self._tensors[key].detach().clone() for name, key in program.buffers}
        self._values |= program.constants
        for block in program.blocks:
            self._forward(block)
        with torch.no_grad():
            for key, name in program.commits:
                self._tensors[key].copy_(self._values[name])
        self._returned = [self._output(ref.kind, ref.name) for ref in program.outputs]
        return self._outputs.fill(self._returned)

    def _output(self, kind: str, name: str) -> torch.Tensor:
        if kind == "state":
            return self._tensors[name]
        value = self._values[name]
        has_grad = torch.is_grad_enabled() and value.requires_grad
        return value.detach().requires_grad_(has_grad)

    def _forward(self, block: Block) -> None:
        program = self._program
        has_grad = torch.is_grad_enabled()
        inputs = [self._leaf(self._values[n], has_grad and program.values[n].requires_grad) for n in block.inputs]
        entries = [program.state[key] for key in block.binding]
        state = [self._leaf(e.of(self._tensors), has_grad and e.requires_grad) for e in entries]
        for name, generator in generators(find(program.device)).items():
            self._seen["forward", block.index, "random state", name] = generator
        outputs = self._codes[block.template]([*inputs, *state])
        carries = [torch.ops.aten.alias.default(t) for t in inputs]
        self._ran.append(_Ran(block, inputs, state, carries, outputs))
        for name, tensor in zip(block.outputs, outputs, strict=True):
            self._values[name] = tensor.detach().requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:
                tensor.register_hook(self._total_of(name))

    def _leaf(self, tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
        return tensor.detach().requires_grad_(needs_grad)

    def _total_of(self, name: str) -> Callable[[torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            self._totals[name] = gradient

        return keep

    def backward(self) -> None:
        """Takes the gradients that the loss left at the outputs through the blocks, last block first."""
        for ref, tensor in zip(self._program.outputs, self._returned, strict=True):
            if ref.kind == "value" and tensor.grad is not None:
                known = self._gradients.get(ref.name)
                self._gradients[ref.name] = tensor.grad if known is None else known + tensor.grad
        sums: dict[str, torch.Tensor] = {}
        while self._ran:
            self._backward(self._ran.pop(), sums)
        for key, total in self._whole(sums).items():
            # By way of autograd, which runs the hooks on parameters.
            torch.autograd.backward([self._tensors[key]], [total])
        for name, tensor in zip(self._program.inputs, self._given, strict=True):
            if tensor.requires_grad:
                tensor.grad = self._gradients.get(name)

    def _whole(self, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Joins the gradients of parts; rows of parts without one are zero."""
        found: dict[str, torch.Tensor] = {}
        for key, total in sums.items():
            entry = self._program.state[key]
            if entry.base is None:
                found[key] = total
                continue
            if entry.base not in found:
                found[entry.base] = torch.zeros_like(self._tensors[entry.base], requires_grad=False)
            found[entry.base][slice(*entry.rows)] = total
        return found

    def _backward(self, ran: _Ran, sums: dict[str, torch.Tensor]) -> None:
        block = ran.block
        roots = [self._gradients.get(n) for n in block.outputs]
        self._note("backward", block, "gradient of", block.outputs, roots)
        carried = [self._gradients.get(n) for n in block.inputs]
        pairs = [
            (root, gradient)
            for root, gradient in zip([*ran.outputs, *ran.carries], [*roots, *carried], strict=True)
            if gradient is not None and root.requires_grad
        ]
        leaves = [t for t in (*ran.inputs, *ran.state) if t.requires_grad]
        if not leaves or all(g is None for g in roots):
            return
        found = iter(torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
        own = [next(found) if t.requires_grad else None for t in ran.inputs]
        state = [next(found) if t.requires_grad else None for t in ran.state]
        self._note("backward", block, "gradient of input", block.inputs, own)
        self._note("backward", block, "gradient of state", block.binding, state)
        self._gradients |= {n: g for n, g in zip(block.inputs, own, strict=True) if g is not None}
        for key, gradient in zip(block.binding, state, strict=True):
            if gradient is not None:
                sums[key] = sums[key] + gradient if key in sums else gradient

    def _note(
        self, phase: str, block: Block, what: str, names: Sequence[str], tensors: Sequence[torch.Tensor | None]
    ) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            self._seen[phase, block.index, what, name] = None if tensor is None else _on_host(tensor)

    def truth(self) -> Truth:
        """Returns what was seen, on the host; call it when the step is over."""
        values = {name: _on_host(t) for name, t in self._values.items()}
        totals = {name: _on_host(t) for name, t in self._totals.items()}
        parts = {key: entry.of(self._tensors) for key, entry in self._program.state.items() if entry.base}
        state = {k: t.detach() for k, t in {**self._tensors, **parts}.items()}
        return Truth(values, totals, state, dict(self._seen))


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What passes every boundary of a program in one step.

    Args:
        values: By name, as the forward makes them.
        totals: Gradients of the blocks' outputs, with what they are used for inside their own block.
        state: Parameters and buffers, and parts of them, by key.
        seen: Everything else.
    """

    values: dict[str, torch.Tensor]
    totals: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    seen: dict[Seen, torch.Tensor | None]

    def at(self, phase: str, block: int, what: str, name: str) -> torch.Tensor | None:
        """Looks up what should be there."""
        if what in ("input", "output"):
            return self.values[name]
        return self.state[name] if what == "state" else self.seen.get((phase, block, what, name))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
