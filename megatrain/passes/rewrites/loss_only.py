"""loss_only: a training step that differentiates the model's own loss computes nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatrain.errors import ExecuteError
from megatrain.passes.canonicalize import copied_graph, without_dead
from megatrain.tracer.arguments import Structure
from megatrain.tracer.calls import call_name, is_property_get
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.traced import TracedModule

# They look at a tensor without its values, or give back one with the same values.
_HARMLESS = frozenset("size dim numel element_size is_floating_point is_complex float half bfloat16 detach".split())


class DeadOutput(torch.Tensor):
    """A tensor without values, of the shape and dtype of a result that isn't computed; to read it is an error."""

    @staticmethod
    def of(spec: TensorSpec) -> DeadOutput:
        """Returns the stand-in of a result."""
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta").as_subclass(DeadOutput)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> DeadOutput:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "<a result that this training step doesn't compute>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises at all that needs values."""
        if is_property_get(func) or call_name(func) in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs)
        raise ExecuteError(
            f"`{call_name(func)}` reads a result of the model that this training step doesn't compute.\n"
            "  A step on the model's own loss computes no logits, hidden states or caches that only the caller would "
            "read.\n"
            '  Give TrainStep a loss= that reads it, without reads="loss".'
        )


def own_loss(result: Any) -> Any:
    """Returns what a training step differentiates if its caller gives no loss: a result's `loss`, or the result."""
    return result["loss"] if isinstance(result, Mapping) and "loss" in result else getattr(result, "loss", result)


def loss_only(traced: TracedModule) -> TracedModule:
    """Returns the capture without results that nobody sees in a training step on the model's own loss: dead outputs.

    Logits, hidden states and caches are gone, with all that only they need. What the forward leaves in attributes, in
    buffers and in its inputs stays, and so do random draws, because later numbers depend on these. In the model's
    result a `DeadOutput` stands for each. Where the loss isn't one of the results (a property computes it, say), the
    capture is returned as it is.

        return cross_entropy, logits, keys, values   ->   return cross_entropy
    """
    marks = tuple(torch.empty(0) for _ in traced.outputs.placeholders)
    try:
        found = own_loss(traced.outputs.fill(marks))
    except Exception:  # the user's class computes its loss of tensors that aren't there
        return traced
    index = next((i for i, mark in enumerate(marks) if mark is found), None)
    if index is None or len(marks) == 1:
        return traced
    graph, copies = copied_graph(traced.graph)
    results = traced.results
    there = [m if i == index else DeadOutput.of(results[i].meta["spec"]) for i, m in enumerate(marks)]
    kept = [results[index], *results[len(marks) :]]
    graph.output_node().args = (tuple(copies[node] for node in kept),)
    return without_dead(
        dataclasses.replace(
            traced,
            graph=graph,
            outputs=Structure(traced.outputs.fill(there), (marks[index],)),
            writes_back=tuple((key, copies[node]) for key, node in traced.writes_back),
            guards=(),  # of nodes that may be gone; a step checks those of the whole capture
            returned_argument=None,
        )
    )
