"""What the tests of `split_state` share: models from a seed, the passes, and the parts they made."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain import lower, trace
from megatrain.passes.canonicalize import canonicalize, dedup
from megatrain.passes.partition import partition
from megatrain.passes.pipeline import lift_state
from megatrain.passes.split.split_state import split_state
from tests.tracer.parity import assert_same_step, eager_step, program_step


def seeded(build, *args, **kwargs) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return build(*args, **kwargs)


def tokens(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(4)).to(dtype)


def largest(program) -> int:
    return max(program.state_bytes(block) for block in program.blocks)


def parts_of(program) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for entry in program.state.values():
        if entry.base is not None:
            found.setdefault(entry.base, []).append(entry.rows)
    return found


def unmeasured(limit: int) -> tuple[Any, ...]:
    """The passes of `lower` but `measure`, which takes most of the time and changes no number."""
    return (canonicalize, partial(split_state, limit=limit), partial(partition, block_bytes=limit), lift_state, dedup)


def assert_exact(model: nn.Module, args: tuple[Any, ...], limit: int):
    eager = eager_step(model, args, {})
    traced = trace(model, args)
    program = lower(traced, passes=unmeasured(limit))
    assert_same_step(program_step(traced, program, model, args, {}), eager)
    return program
