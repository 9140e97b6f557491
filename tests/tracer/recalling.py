"""Captures of one call with equal calls recalled, and with every call run: both must say the same, word by word."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from megatrain.tracer.calls import literal_text
from megatrain.tracer.recording.opaque import Observer, Opaque
from megatrain.tracer.recording.recall import Recall
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule


@contextmanager
def every_call_run() -> Generator[None]:
    """Captures in the body recall nothing."""
    with patch.object(Recall, "asked", lambda *_: None):
        yield


@contextmanager
def counted_recalls() -> Generator[list[str]]:
    """Lists the names of the calls that captures in the body recall."""
    found: list[str] = []
    made = Recall.bind

    def count(recall: Any, recipe: Any, *rest: Any) -> None:
        found.append(str(recipe.node.target))
        made(recall, recipe, *rest)

    with patch.object(Recall, "bind", count):
        yield found


def told(traced: TracedModule) -> list[str]:
    """All that a capture says, a fact a line: nodes with their whole meta, guards, assumptions."""
    lines = [str(traced), str(traced.outputs), str(traced.gradient_order), str(traced.side_outputs.names)]
    lines += [f"{key}: {entry}" for key, entry in traced.state.items()]
    lines += [f"{node.name}: {_target(node)} {node.args} {node.kwargs} {_meta(node)}" for node in traced.graph.nodes]
    lines += [f"guard {guard} at {guard.place}: {guard.args}" for guard in traced.guards]
    lines += [str(traced.assumptions), *map(str, traced.assumptions.values)]
    lines += [f"{unset.path}: {sorted(unset.names)}" for unset in traced.assumptions.unset]
    others = "name input_names written_inputs writes_back block_modules device returned_argument num_numbers rebinds"
    lines += [f"{name}: {_sorted(getattr(traced, name))}" for name in others.split()]
    return [re.sub(r" at 0x[0-9a-f]+", "", line) for line in lines]


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _target(node: fx.Node) -> str:
    if isinstance(node.target, Opaque | Observer):
        return type(node.target).__name__  # made anew by each capture
    return literal_text(node.target) if hasattr(node.target, "call_text") else f"{node.op} {node.target}"


def _meta(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in sorted(node.meta)}


def both(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, copies: bool = False
) -> Iterator[Any]:
    """Captures with every call run, and with recall: yields what each says, or its error.

    With `copies` each is of a copy: a first forward of some models changes their configuration.
    """
    for is_whole in (True, False):
        state = torch.get_rng_state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with every_call_run() if is_whole else nullcontext():
                    found = told(trace(copy.deepcopy(model) if copies else model, args, kwargs))
        except Exception as error:
            found = [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
        assert torch.equal(state, torch.get_rng_state())
        yield found
