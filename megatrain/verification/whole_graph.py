"""Runs a capture as one graph, uncut, and notes the tensors at the places of the cuts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megatrain.passes.interpret import Code
from megatrain.passes.program import Program
from megatrain.passes.stateless import Stateless, stateless
from megatrain.tracer.arguments import tensors_given
from megatrain.tracer.inventory import inventory
from megatrain.tracer.traced import TracedModule
from megatrain.verification.fingerprint import Fingerprint, ModuleCall
from megatrain.verification.leaves import distinct_tensors

_MODES = {"grad": True, "autocast": ()}


class WholeGraph:
    """Stands for a model in a step: the traced graph on the model's own state, under one autograd graph.

    Args:
        traced: The capture.
        program: Made of it; names the values to keep.
        model: An eager copy on the compute device; its parameters get the gradients, its buffers the new values.
    """

    def __init__(self, traced: TracedModule, program: Program, model: nn.Module):
        self._traced = traced
        self._tensors = inventory(model)[1]
        self._kept = {name: _node_name(name, value.producer) for name, value in program.values.items()}
        self._versions: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._totals: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._prints: dict[str, set[Fingerprint]] = defaultdict(set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and returns the model's output."""
        lifted = self._lifted()
        written = {key for key, _ in self._traced.writes_back}
        inputs = list(tensors_given(args, kwargs))
        state = [self._state(key).clone() if key in written else self._state(key) for key in lifted.keys]
        found = Code(lifted.graph)([*inputs, *state])
        num_outputs = len(found) - len(self._traced.writes_back)
        with torch.no_grad():
            for (key, _), tensor in zip(self._traced.writes_back, found[num_outputs:], strict=True):
                self._tensors[key].copy_(tensor)
        return self._traced.outputs.fill(found[:num_outputs])

    def _state(self, key: str) -> torch.Tensor:
        # A constant may be written too; the next run must find it as it was.
        return self._tensors[key] if key in self._tensors else self._traced.constants[key].clone()

    def values(self, name: str) -> list[torch.Tensor]:
        """Returns what a value of the program held: once made, and after each write into it."""
        return self._versions[self._kept[name]]

    def totals(self, name: str) -> list[torch.Tensor]:
        """Returns the gradient of a value, before each write into it."""
        return self._totals[self._kept[name]]

    def first_wrong_call(self, calls: Iterable[ModuleCall]) -> ModuleCall | None:
        """Returns the first call of a module whose outputs the graph doesn't have where the module hands them on."""
        return next((call for call in calls if not self._handed_on(call).issuperset(call.outputs)), None)

    def _handed_on(self, call: ModuleCall) -> set[Fingerprint]:
        """What a module call may return: what others read of it, what nobody reads, and what isn't its own."""
        nodes = list(self._traced.graph.nodes)
        inside = {n for n in nodes if (call.name, call.number) in (n.meta.get("modules") or ())}
        hidden = {n for n in inside if n.users and inside.issuperset(n.users)}
        return set().union(*(self._prints[n.name] for n in nodes if n not in hidden))

    def _lifted(self) -> Stateless:
        """Makes state an input, and puts a probe behind every input and call, for its result and for what it writes."""
        lifted = stateless(self._traced)
        graph, kept = lifted.graph, set(self._kept.values())
        names = {placeholder: name for name, placeholder in lifted.placeholders.items()}
        last_input = [n for n in graph.nodes if n.op == "placeholder"][-1:]
        for node in [n for n in graph.nodes if n.op != "output"]:
            after = last_input[0] if node.op == "placeholder" else node
            for seen in (node, *(w for w in node.meta.get("writes", ()) if w.name in kept and w is not node)):
                name = names[seen] if seen in names else str(seen.name)
                with graph.inserting_after(after):
                    after = graph.call_function(self._probe(name, name in kept), (lifted.placeholders.get(name, seen),))
                after.meta.update(_MODES)
        return lifted

    def _probe(self, name: str, keeps: bool) -> Callable[[Any], None]:
        def probe(value: Any) -> None:
            self._prints[name].update(map(Fingerprint.of, distinct_tensors(value)))
            if keeps and isinstance(value, torch.Tensor):
                self._versions[name].append(value.detach().to("cpu", copy=True))
                if value.requires_grad:
                    value.register_hook(lambda g: self._totals[name].append(g.detach().to("cpu", copy=True)))

        return probe


def _node_name(value: str, producer: int | None) -> str:
    """Name of the node behind a value; one that block 3 writes into is called `x_in_3` from there on."""
    return value.removesuffix(f"_in_{producer}")
