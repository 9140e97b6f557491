"""Two copies of a model, one eager, one compiled, driven by the same code; whatever they leave behind must be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

import megatrain
from megatrain.tracer.arguments import Structure
from tests.comparing import assert_same, assert_same_state

MODES: dict[str, dict[str, Any]] = {
    "bind": {"transfer": "bind", "activations": "recompute"},
    "recompute": {"transfer": "copy", "activations": "recompute"},
    "keep": {"transfer": "copy", "activations": "keep"},
    "offload": {"transfer": "copy", "activations": "offload", "block_bytes": 1},
}
"""Where weights lie and what is kept: each takes another path through the runtime."""

M = TypeVar("M", bound=nn.Module)
Drive = Callable[[Callable[..., Any], nn.Module], Any]


def seeded(build: Callable[[], M]) -> M:
    """Builds a model from a fixed seed; the caller's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return build()


def assert_twins(
    model: nn.Module, drive: Drive, *, seed: int = 3, **options: Any
) -> tuple[megatrain.CompiledModule, Any]:
    """Runs `drive(call, model)` on both copies and compares what it returns, gradients, state and random numbers.

    Args:
        model: Copied for each run.
        drive: Calls `call` as it likes; what it returns is compared tensor by tensor.
        seed: Of torch's generator, before each run.
        **options: Of `compile`.

    Returns:
        The compiled module and what `drive` returned for it.
    """
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device="cpu", **options)
    torch.manual_seed(seed)
    expected = drive(eager, eager)
    end = torch.get_rng_state()
    torch.manual_seed(seed)
    found = drive(compiled, streamed)
    assert_same(end, torch.get_rng_state(), "random generator")
    assert_same(list(Structure.of(expected).placeholders), list(Structure.of(found).placeholders), "result")
    assert_same_state(eager, streamed)
    return compiled, found
