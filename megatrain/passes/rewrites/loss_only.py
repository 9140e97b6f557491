"""loss_only: a training step that differentiates the model's own loss computes nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatrain.passes.canonicalize import copied_graph, without_dead
from megatrain.passes.rewrites.dead_output import DeadOutput
from megatrain.tracer.arguments import Structure
from megatrain.tracer.traced import TracedModule


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
