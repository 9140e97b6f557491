"""Device memory: a card of exactly what the schedule says, holes of the allocator, steps that run out, captures."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import megatrain
from megatrain.device import find
from megatrain.device.accelerator import beside
from megatrain.errors import DeviceMemoryWarning
from megatrain.scheduler.lifetimes import find_peak
from tests.attention import EAGER_TO_KEEP, Stack, forwards, kernels_of_attention, text
from tests.attention import WIDTH as TEXT_WIDTH
from tests.comparing import assert_same
from tests.draws import draws
from tests.gradients import grad_of
from tests.simulated_device.loading import load
from tests.simulated_device.simulator import GIB, Simulator
from tests.simulated_runs.on_device import (
    DEVICE,
    ORDERS,
    Chain,
    choose,
    compiled_copy,
    held_bytes,
    step_by_hand,
)
from tests.training.parity import MODES, adamw, generator_of, sgd, snapshot

WIDTH, ROWS, TOKENS = 128, 8, 512  # each tensor is a multiple of the 512 bytes to which the allocator rounds


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(result: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return result.square().mean()


def num_retries() -> int:
    """How often the allocator has waited for the device, and given back memory, because it had too little."""
    return torch.accelerator.memory_stats()["num_alloc_retries"]


@pytest.fixture
def plain(sim: Simulator) -> int:
    """An allocator that rounds to 512 bytes and no further; returns what other tests' leftovers hold."""
    gc.collect()
    torch.accelerator.empty_cache()
    sim.configure(segments=False)
    return held_bytes()


@pytest.mark.parametrize(
    ("mode", "micro_batches", "options"),
    [
        ("deferred", 3, {"activations": "offload"}),
        ("overlap", 2, {"chunking": "always", "activations": "keep"}),
        pytest.param("spread", 3, {"memory": "900KiB"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_steps_run_in_exactly_the_memory_of_the_schedule(
    sim: Simulator, plain: int, mode: str, micro_batches: int, options: dict[str, Any]
):
    model = Blocks()
    compiled = megatrain.compile(model, device=DEVICE, **options)
    step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES[mode])
    dice, is_tiled = generator_of(0), "chunking" in options

    def taken() -> None:
        torch.accelerator.reset_peak_memory_stats()
        shape = (TOKENS if is_tiled else ROWS, WIDTH)
        step([torch.randn(shape, generator=dice).to(DEVICE) for _ in range(micro_batches)])
        torch.accelerator.synchronize()

    taken()
    taken()
    assert ("tiled(" in str(step.program)) == is_tiled
    sim.configure(capacity=plain + step.schedule.device_bytes)
    for seed, order in enumerate(("late", "seeded") if is_tiled else ORDERS):
        choose(sim, order, compiled, seed)
        held_bytes()
        before = num_retries()
        taken()
        assert torch.accelerator.max_memory_reserved() <= plain + step.schedule.device_bytes, order
        # Memory that waits for another stream would be there in the end, when the allocator has waited for the device.
        assert num_retries() == before, order


class Headed(Stack):
    """With a small last block, so that the memory is full at one that keeps results."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(*kinds)
        self.head = nn.Linear(TEXT_WIDTH, TEXT_WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


@pytest.mark.nightly
@pytest.mark.usefixtures("short_texts")
def test_kept_results_of_attention_have_eagers_bits_and_run_in_exactly_their_memory(sim: Simulator, plain: int):
    torch.manual_seed(0)
    model, number = Headed(*["grouped"] * 4), 3
    eager = copy.deepcopy(model)
    optimizer = sgd(eager)

    def step_of(model: nn.Module, **options: Any) -> megatrain.TrainStep:
        compiled = megatrain.compile(model, device=DEVICE, **options)
        return megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES["overlap"])

    def batches(step: int) -> list[torch.Tensor]:
        return [text(10 * step + each).to(DEVICE) for each in range(number)]

    def taken(count: int) -> list[str]:
        torch.accelerator.reset_peak_memory_stats()
        with kernels_of_attention() as kernels:
            step(batches(count))
        torch.accelerator.synchronize()
        return kernels

    frugal = step_of(copy.deepcopy(model), activations="recompute").prepare(batches(0)).device_bytes
    step = step_of(model, memory=frugal + 300_000, hardware=EAGER_TO_KEEP)
    taken(0)
    taken(1)
    peak = find_peak(step.schedule).op
    assert peak is not None
    assert peak.block in step.schedule.results
    sim.configure(capacity=plain + step.schedule.device_bytes)
    recomputed = {0, 1, 2, 3}.difference(step.schedule.results, step.schedule.saves)
    orders = ("late", "seeded")
    for seed, order in enumerate(orders, start=2):
        choose(sim, order, seed=seed)
        held_bytes()
        before = num_retries()
        assert forwards(taken(seed)) == number * (4 + len(recomputed)), order
        assert torch.accelerator.max_memory_reserved() <= plain + step.schedule.device_bytes, order
        assert num_retries() == before, order
    sim.configure(capacity=2**40)
    sim.order("early")
    for count in range(2 + len(orders)):
        step_by_hand(eager, optimizer, batches(count), loss_of, None)
    assert_same(list(eager.parameters()), list(model.parameters()))


def test_recorded_kernels_run_on_a_card_of_their_budget_and_their_memory_goes_with_the_model(
    sim: Simulator, plain: int
):
    """What the schedule takes and what recordings hold, first run and recording included."""
    budget, dice = 1_600_000, generator_of(0)
    sim.configure(capacity=GIB)
    model = Blocks()
    compiled = megatrain.compile(model, device=DEVICE, kernels="graphs", memory=budget)
    step = megatrain.TrainStep(compiled, sgd(model), loss=loss_of, **MODES["deferred"])
    for number, order in enumerate(("early", "early", "early", "late", "seeded")):
        batch = [torch.randn(ROWS, WIDTH, generator=dice).to(DEVICE) for _ in range(3)]
        if number == 0:
            assert step.prepare(batch).device_bytes < budget
            sim.configure(capacity=plain + budget)
        choose(sim, order, compiled)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeviceMemoryWarning)  # of a step that ran out of memory
            step(batch)
    sim.order("early")
    step.flush()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() > plain
    del model, compiled, step, batch
    held_bytes()
    assert torch.accelerator.memory_reserved() <= plain


# -- host memory -------------------------------------------------------------------------------------------------


def test_gradients_are_page_locked_and_weights_until_their_copies_are_done(sim: Simulator):
    sim.order("late")
    held = sim.locked_bytes
    compiled, model = compiled_copy(Chain(), activations="offload", block_bytes=1)
    places: list[list[int]] = []
    for _ in range(2):
        compiled(torch.randn(4, 32).to(DEVICE)).sum().backward()
        assert all(grad_of(p).is_pinned() for p in model.parameters())
        places.append([grad_of(p).data_ptr() for p in model.parameters()])
        model.zero_grad()
    assert places[0] == places[1]
    assert sim.locked_bytes > held
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    found = [parameter.detach().to(DEVICE, non_blocking=True) for parameter in model.parameters()]  # the user's own
    assert sim.pending(torch.accelerator.current_stream()) > 0
    del compiled, model
    gc.collect()
    assert sim.locked_bytes == held
    assert sim.violations() == []
    assert all(torch.equal(left, right.cpu()) for left, right in zip(expected, found, strict=True))


# -- holes of the allocator --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Its inner tensors are no multiple of what it returns."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Layers(nn.Module):
    """Layers, and a head over a vocabulary, whose logits and whose gradient are the largest tensors."""

    def __init__(self, depth: int, width: int, inner: int, words: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), torch.zeros(x.shape[0], dtype=torch.long, device=x.device))


def runs_on_the_smallest_card(
    sim: Simulator, model: nn.Module, batch: list[torch.Tensor], mode: str, activations: str
) -> None:
    """Plans for all the memory there is, and then takes steps on the smallest card on which that plan is made."""

    def made() -> megatrain.TrainStep:
        compiled = megatrain.compile(model, device=DEVICE, activations=activations)
        return megatrain.TrainStep(compiled, sgd(model), **MODES[mode])

    needed = made().prepare(batch).device_bytes
    gc.collect()
    torch.accelerator.empty_cache()
    sim.configure(capacity=torch.accelerator.memory_reserved() + needed + beside(needed))
    step = made()
    for _ in range(2):
        step(batch)
    torch.accelerator.synchronize()
    # The plan is as large as the card allows: otherwise nothing here is tight.
    assert step.schedule.device_bytes > 0.9 * needed


def hole_batch(count: int, rows: int, width: int) -> list[torch.Tensor]:
    return [torch.empty(rows, width, device=DEVICE) for _ in range(count)]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Layers, list[torch.Tensor]]:
    """Models whose tensors are of all proportions, at sizes of cards."""
    width = 64 * draw(st.integers(1, 16))
    inner, words = 64 * draw(st.integers(1, 48)), 64 * draw(st.integers(1, 1000))
    rows = draw(st.integers(1 << 12, 1 << 16))
    # So that nothing takes more memory than a card has.
    rows = min(rows, (3 << 30) // (4 * words), (1 << 30) // (4 * inner))
    return Layers(draw(st.integers(1, 8)), width, inner, words), hole_batch(draw(st.integers(1, 6)), rows, width)


@pytest.mark.nightly
@given(shapes(), st.sampled_from(list(MODES)), st.sampled_from(["auto", "recompute", "keep", "offload"]))
@draws(20)
def test_a_default_budget_runs_on_the_smallest_card_for_it(
    shape: tuple[Layers, list[torch.Tensor]], mode: str, activations: str
):
    sim = load()
    sim.reset()
    sim.configure(compute=False, poison=False, capacity=110 << 30)
    runs_on_the_smallest_card(sim, *shape, mode, activations)


# -- steps that run out of memory --------------------------------------------------------------------------------


MIB = 1 << 20


def stack(depth: int = 12, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def test_a_budget_that_nobody_gave_gets_smaller_where_it_is_too_much(sim: Simulator):
    """Another process takes a part of the card after the budget was found, as holes of the allocator do."""
    _, total = torch.accelerator.get_memory_info(0)
    steps, optimizers, planned = list[megatrain.TrainStep](), list[torch.optim.Optimizer](), list[int]()
    models = (stack(), stack())
    batches = [[torch.randn(16384, 64).to(DEVICE) for _ in range(2)] for _ in range(2)]
    for model in models:
        torch.accelerator.empty_cache()
        sim.configure(capacity=torch.accelerator.memory_reserved() + 220 * MIB)
        optimizers.append(adamw(model))
        compiled = megatrain.compile(model, device=DEVICE, block_bytes="16KiB")
        steps.append(megatrain.TrainStep(compiled, optimizers[-1], loss=loss_of, **MODES["deferred"]))
        planned.append(steps[-1].prepare(batches[0]).device_bytes)
        sim.configure(capacity=total)
    for number, batch in enumerate(batches):
        losses = [steps[0](batch)]
        steps[0].flush()
        if number == 0:
            held_bytes()
            sim.configure(capacity=torch.accelerator.memory_reserved() + planned[1] * 3 // 4)
            with pytest.warns(DeviceMemoryWarning, match="repeated with a smaller budget, which further ones keep"):
                losses.append(steps[1](batch))
            sim.configure(capacity=total)
        else:
            losses.append(steps[1](batch))
        assert torch.equal(losses[0].cpu(), losses[1].cpu())
        steps[1].flush()
        here, there = (snapshot(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
        assert_same(here, there)
    assert steps[1].schedule.device_bytes < planned[1] == planned[0]
    assert "lowered after a step ran out of memory" in repr(steps[1])


def test_what_the_allocator_keeps_counts_as_free():
    torch.accelerator.empty_cache()
    free = find("sim").memory().free
    x = torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)
    del x
    assert torch.accelerator.memory_reserved() > torch.accelerator.memory_allocated()
    assert find("sim").memory().free == free
