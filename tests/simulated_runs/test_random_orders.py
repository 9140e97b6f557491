"""Random models, budgets, modes and orders of the streams: the bits of eager. Memory: test_memory.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.errors import DrawsError
from tests.comparing import assert_same
from tests.draws import draws
from tests.simulated_device.loading import load
from tests.simulated_device.simulator import OrderName, Simulator
from tests.simulated_runs.on_device import DEVICE, choose, host_copy, on_device, step_by_hand
from tests.strategies import WIDTH, Halves, Odd, WritesView, has_shared_modules, module_trees
from tests.training.parity import MODES, generator_of, sgd
from tests.training.test_random_models import LARGER_BRANCH, REFUSED

KINDS: tuple[OrderName, ...] = ("early", "late", "seeded")
ORDERS = 6  # of each example


@dataclass(frozen=True)
class Choice:
    """How one example runs; `spare` is a budget that many times the least."""

    sizes: list[int]
    mode: str
    activations: str
    spare: float | None
    is_fine: bool
    seed: int


CHOICES = st.builds(
    Choice,
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    mode=st.sampled_from(sorted(MODES)),
    activations=st.sampled_from(["recompute", "offload", "keep"]),
    spare=st.none() | st.floats(1.0, 2.0),
    is_fine=st.booleans(),
    seed=st.integers(0, 2**16),
)


def loss_of(result: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return result.sin().mean()


def orders(sim: Simulator, compiled: megatrain.CompiledModule, seed: int) -> Iterator[str]:
    """Chooses orders: first all streams late, then all seeded, then random ones for each stream."""
    dice, transfers = random.Random(seed), compiled.megatrain.engine.streams
    found = (transfers.h2d.device_stream, transfers.d2h.device_stream, torch.accelerator.current_stream())
    streams = [stream for stream in found if isinstance(stream, torch.Stream)]
    for order in ("late", "seeded"):
        choose(sim, order, seed=seed)
        yield order
    for number in range(ORDERS - 2):
        sim.order("early")
        kinds: list[OrderName] = [dice.choice(KINDS) for _ in streams]
        for stream, kind in zip(streams, kinds, strict=True):
            sim.order(kind, stream, seed=seed + number)
        yield " ".join(kinds)


def start(model: nn.Module, optimizer: torch.optim.Optimizer, initial: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(initial)
    optimizer.state.clear()


def options_of(model: nn.Module, choice: Choice, largest: torch.Tensor) -> dict[str, Any]:
    """Of `compile`. With a budget, the least that the same model takes times `spare`."""
    has_views = any(isinstance(m, Halves | WritesView) for m in model.modules())
    found: dict[str, Any] = {"block_bytes": 1 if choice.is_fine and not has_views else None}
    if choice.spare is None:
        return found | {"activations": choice.activations}
    compiled = megatrain.compile(copy.deepcopy(model), device=DEVICE, activations="offload", **found)
    step = megatrain.TrainStep(compiled, sgd(compiled), loss=loss_of, overlap=False)
    least = step.prepare([largest] * len(choice.sizes)).device_bytes
    return found | {"memory": int(least * choice.spare)}


@draws(100, usual=10)
@given(model=module_trees(), choice=CHOICES)
def test_random_models_have_the_bits_of_eager_in_every_order(model: nn.Module, choice: Choice):
    # The terms of a gradient with several uses are added in another order than eager's, if there are several batches.
    assume(not has_shared_modules(model))
    sim = load()
    sim.reset()
    is_odd = any(isinstance(m, Odd) for m in model.modules())
    max_norm = None if is_odd else MODES[choice.mode].get("max_grad_norm")
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    initial = copy.deepcopy(model.state_dict())
    reference, own = sgd(eager), sgd(streamed)
    dice = generator_of(choice.seed)
    steps = [[torch.randn(size, WIDTH, generator=dice) for size in choice.sizes] for _ in range(2)]
    torch.manual_seed(choice.seed)
    try:
        expected = [step_by_hand(eager, reference, on_device(batches), loss_of, max_norm).cpu() for batches in steps]
    except RuntimeError:
        reject()  # eager PyTorch refuses this model: it overwrites what its own backward needs
    state = host_copy([*eager.parameters(), *eager.buffers()])
    modes: dict[str, Any] = MODES[choice.mode] | {"max_grad_norm": max_norm}
    try:
        largest = on_device([max(steps[0], key=len)])[0]
        compiled = megatrain.compile(streamed, device=DEVICE, **options_of(streamed, choice, largest))
        step = megatrain.TrainStep(compiled, own, loss=loss_of, **modes)
        step.prepare([largest] * len(choice.sizes))
        step(on_device(steps[0]))  # captures
        for order in orders(sim, compiled, choice.seed):
            step.flush()
            start(streamed, own, initial)
            torch.manual_seed(choice.seed)
            for batches, loss in zip(steps, expected, strict=True):
                assert torch.equal(loss, step(on_device(batches)).cpu()), order
            step.flush()
            torch.accelerator.synchronize()
            assert_same(state, host_copy([*streamed.parameters(), *streamed.buffers()]), order)
    except DrawsError:
        reject()
    except megatrain.MegatrainError as error:
        if not any(words in str(error) for words in (*REFUSED, LARGER_BRANCH)):
            raise
        reject()
    assert sim.violations() == []
