"""Whatever order the streams of the device work in, the bits are those of eager PyTorch on that device."""

from __future__ import annotations

import pytest
import torch

import megatrain
from tests.comparing import assert_same
from tests.draws import is_wide
from tests.models import MODELS
from tests.simulated_device import Simulator
from tests.simulated_runs.on_device import (
    DEVICE,
    ORDERS,
    choose,
    compiled_copy,
    eager_copy,
    host_copy,
    on_device,
    step_by_hand,
    trained,
)
from tests.tiers import diagonal, one_in
from tests.training.parity import MODES, TASKS, adamw, padded_in_some

NAMES = ("gpt_loss", "mlp", "llama_labels", "torch_encoder", "t5_labels", "cnn", "encoder_decoder", "tied_blocks")


@pytest.mark.parametrize(("name", "activations"), one_in(3, [
    *((name, "offload") for name in NAMES), ("gpt_loss", "recompute"), ("gpt_loss", "keep"), ("cnn", "keep"),
]))  # fmt: skip
def test_calls_have_the_bits_of_eager(sim: Simulator, name: str, activations: str):
    model, args, kwargs = MODELS[name]()
    eager = eager_copy(model)
    compiled, streamed = compiled_copy(model, activations=activations, block_bytes=1)
    for seed, order in enumerate(ORDERS):
        sim.order("early")
        expected = trained(eager, eager, args, kwargs, seed=seed)
        choose(sim, order, compiled)
        assert_same(expected, trained(compiled, streamed, args, kwargs, seed=seed), order)
    assert sim.violations() == []


@pytest.mark.parametrize(("mode", "case"), diagonal(MODES, [("gpt", 1), ("stack", 3), ("llama", 3)]))
def test_training_steps_have_the_bits_of_a_loop(sim: Simulator, case: tuple[str, int], mode: str):
    name, micro_batches = case
    task = TASKS[name]
    model, eager = task.build(), task.build()
    compiled = megatrain.compile(model, device=DEVICE, activations="offload")
    own, other = adamw(model), adamw(eager)
    step = megatrain.TrainStep(compiled, own, loss=task.loss, **MODES[mode])
    for seed, order in enumerate((2 if is_wide() else 1) * ORDERS):
        batches = [task.batch(10 * seed + number, 2) for number in range(micro_batches)]
        batches = padded_in_some(seed) if name == "llama" else batches
        torch.manual_seed(seed)
        sim.order("early")
        expected = step_by_hand(eager, other, on_device(batches), task.loss, MODES[mode].get("max_grad_norm"))
        choose(sim, order, compiled, seed)
        torch.manual_seed(seed)
        found = step(on_device(batches))
        assert torch.equal(expected.cpu(), found.cpu()), order
    step.flush()
    assert_same(host_copy(list(eager.parameters())), host_copy(list(model.parameters())), "parameters")
    assert sim.violations() == []
