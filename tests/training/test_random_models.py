"""Random module trees, micro-batches, modes and budgets under chaos, against the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.errors import DrawsError, ScheduleError
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, largest, snapshot
from tests.draws import draws
from tests.strategies import (
    WIDTH,
    Branch,
    Halves,
    Odd,
    Start,
    WritesView,
    block_limits,
    has_shared_modules,
    module_trees,
)
from tests.training.parity import MODES, generator_of, loop_step, sgd

# What the micro-batches of one step can't do, and says so.
REFUSED = ("can't go from one micro-batch to the next", "differs from micro-batch 0")
# The budget is that of one batch; by its values another may take a branch that needs more.
LARGER_BRANCH = "is too small"


@dataclass(frozen=True)
class Choice:
    """How one example runs; `spare` is a budget that many times the least."""

    sizes: list[int]
    mode: str
    on_nonfinite: str | None
    activations: str
    spare: float | None
    block_bytes: int | None
    seed: int


CHOICES = st.builds(
    Choice,
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    mode=st.sampled_from(sorted(MODES)),
    on_nonfinite=st.sampled_from([None, "skip"]),
    activations=st.sampled_from(["recompute", "offload", "keep"]),
    spare=st.none() | st.floats(1.0, 2.0),
    block_bytes=block_limits().map(lambda limit: None if limit is None else max(1, limit)),
    seed=st.integers(0, 2**16),
)


def small(body: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    """An example, whose options differ from the plainest in a few."""
    plain = Choice([3], "deferred", None, "recompute", None, None, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"model": Start(body()), "choice": replace(plain, **options)}


def loss_of(result: torch.Tensor, batch: Any) -> torch.Tensor:
    return (result.double() * 1.5).sin().mean().float()


def compiled_with(model: nn.Module, largest: torch.Tensor, choice: Choice) -> megatrain.CompiledModule:
    options: dict[str, Any] = {"activations": choice.activations}
    # Cut finer than modules, a tensor and views of it cross blocks as values of their own, each with a sum of its own:
    # their terms are added in another order than eager's.
    has_views = any(isinstance(m, Halves | WritesView) for m in model.modules())
    block_bytes = None if has_views else choice.block_bytes
    if choice.spare is not None:
        # The least is that of the blocks that will run: finer ones take less.
        program = megatrain.lower(megatrain.trace(model, (largest,)), block_bytes=block_bytes)
        least = megatrain.schedule(
            program,
            num_slots=1,
            keep=0,
            activations="offload",
            micro_batches=len(choice.sizes),
            updates="serial",
            outputs="release",
        ).device_bytes
        # The loss is no part of the program: its result in double precision, and what sin and mean make of it, twice.
        least += 6 * 8 * largest.numel()
        options = {"memory": int(least * choice.spare), "activations": "auto"}
    chaos = Chaos(seed=choice.seed, max_delay_s=0.0002)
    return megatrain.compile(model, device="cpu", transfer="copy", chaos=chaos, block_bytes=block_bytes, **options)


@draws(30, usual=5)
@given(model=module_trees(), choice=CHOICES)
# The least budget, of blocks that are cut no finer than modules because of a view.
@example(**small(lambda: Halves(nn.Linear(WIDTH, WIDTH)), spare=1.0, block_bytes=1))
# Two steps that take two branches, with a schedule each.
@example(**small(lambda: Branch(nn.LayerNorm(WIDTH)), seed=38))
def test_two_steps_of_random_models_under_chaos(model: nn.Module, choice: Choice) -> None:
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    is_shared = has_shared_modules(model)
    # Eager clips a gradient without dimensions in double precision if any other gradient is of that dtype.
    is_odd = any(isinstance(m, Odd) for m in model.modules())
    max_norm = None if is_shared or is_odd else MODES[choice.mode].get("max_grad_norm")
    options = MODES[choice.mode] | {"max_grad_norm": max_norm, "on_nonfinite": choice.on_nonfinite}
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) if is_shared else sgd(m) for m in (eager, streamed)]
    generator = generator_of(choice.seed)
    steps = [[torch.randn(size, WIDTH, generator=generator) for size in choice.sizes] for _ in range(2)]
    losses, largest_bytes = [], 0
    torch.manual_seed(choice.seed)
    for batches in steps[: 1 if is_shared else 2]:
        try:
            found = loop_step(eager, optimizers[0], copy.deepcopy(batches), loss=loss_of, max_norm=max_norm)
        except RuntimeError:
            reject()  # eager PyTorch refuses this model: it overwrites what its own backward needs
        losses.append(found[0])
    expected = snapshot(eager, optimizers[0])
    torch.manual_seed(choice.seed)
    try:
        compiled = compiled_with(streamed, max(steps[0], key=len), choice)
        step = megatrain.TrainStep(compiled, optimizers[1], loss=loss_of, **options)
        for loss, batches in zip(losses, steps, strict=False):
            found = step(batches)
            assert_same(loss, found, "loss")
            # A step has the schedule of the branches that it took; it may have begun with those of the step before.
            largest_bytes = max(largest_bytes, step.schedule.device_bytes)
            assert compiled.peak_bytes <= largest_bytes or len(set(choice.sizes)) > 1
    except DrawsError:
        reject()
    except ScheduleError as error:
        texts = (*REFUSED, LARGER_BRANCH) if any(isinstance(m, Branch) for m in model.modules()) else REFUSED
        if not any(text in str(error) for text in texts):
            raise
        reject()
    step.flush()
    if is_shared:
        assert_same_but_for_order(expected, snapshot(streamed, optimizers[1]), model, len(choice.sizes))
    else:
        assert_same(expected, snapshot(streamed, optimizers[1]))


def assert_same_but_for_order(expected: dict[str, Any], found: dict[str, Any], before: nn.Module, count: int) -> None:
    """Compares one step of plain SGD of rate 1, whose only inexact terms are gradients added in another order.

    n terms added in two orders differ by less than 2 n roundings (2**-24) of the sum of their sizes. These trees use a
    module at most some ten times in each micro-batch, and a term may be ten times the sum.
    """
    for name, begun in before.named_parameters():
        left, right = expected["parameters"].pop(name), found["parameters"].pop(name)
        scale = max(largest(left - begun), largest(left))
        assert_same(left, right, name, 2 * 10 * 10 * count * 2**-24, scale=scale)
    assert_same(expected, found)
