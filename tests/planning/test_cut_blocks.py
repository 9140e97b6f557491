"""Steps cut their blocks where these don't fit, or make a step on a known machine longer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from megatrain.base.sizes import parse_bytes
from megatrain.errors import ScheduleError, TooSmallError
from tests.nightly import nightly

WORDS, WIDTH, MEMORY = 600, 16, "60KiB"


class Model(nn.Module):
    """Its embedding is larger than any layer, which has two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden), ids.roll(-1) % 8)


def batch(step: int, length: int = 8) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(step))}


MODES: dict[str, dict[str, Any]] = {
    "serial": {"overlap": False},
    "deferred, clipped": {"max_grad_norm": 0.1},
    "spread": {"spread": True},
}


def step_of(model: nn.Module, memory: int | str, mode: str = "serial", **options: Any) -> megatrain.TrainStep:
    compiled = megatrain.compile(model, device="cpu", memory=memory, transfer="copy", **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    return megatrain.TrainStep(compiled, optimizer, **MODES[mode])


def trained(model: nn.Module, batches: list[dict[str, torch.Tensor]], mode: str) -> list[float]:
    """What the loop does."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), list[float]()
    for each in batches:
        loss = model(**each)
        loss.backward()
        if "max_grad_norm" in MODES[mode]:
            nn.utils.clip_grad_norm_(model.parameters(), MODES[mode]["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_as_loop(model: nn.Module, eager: nn.Module, losses: list[float], want: list[float]) -> None:
    """Rows of an embedding, and layers that are cut at their modules, keep all bits."""
    assert losses == want
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(other, one), name


@pytest.mark.parametrize("mode", [mode if mode == "deferred, clipped" else nightly(mode) for mode in MODES])
def test_blocks_that_dont_fit_are_cut_and_train_as_the_loop_does(mode: str):
    model, eager = Model(), Model()
    with pytest.raises(TooSmallError):
        step_of(Model(), MEMORY, mode, chunking="never").prepare(batch(0))
    step = step_of(model, MEMORY, mode)
    batches = [batch(number) for number in range(4)]
    losses = [step(each).item() for each in batches]
    step.flush()
    assert len(step.program.blocks) > 5
    assert step._compiled.peak_bytes <= step.schedule.device_bytes <= parse_bytes(MEMORY)
    assert_as_loop(model, eager, losses, trained(eager, batches, mode))


def test_a_size_that_was_given_is_kept():
    with pytest.raises(TooSmallError):
        step_of(Model(), MEMORY, block_bytes=WORDS * WIDTH * 4).prepare(batch(0))


@functools.cache
def planned() -> megatrain.Plan:
    """With blocks that are cut."""
    return megatrain.plan(Model(), example_kwargs=batch(0), optimizer="AdamW", device_memory=MEMORY, overlap=False)


def test_the_plan_is_that_of_the_step_and_says_what_was_cut():
    model, plan = Model(), planned()
    assert plan.fits
    line = next(line for line in str(plan).splitlines() if line.startswith("  blocks:"))
    assert line.startswith(f"  blocks: {len(plan.program.blocks)} of about ")
    step = step_of(model, MEMORY)
    step(batch(0))
    assert str(step.schedule) == str(plan.schedule)
    roomy = megatrain.plan(model, example_kwargs=batch(0), optimizer="AdamW", device_memory="1MiB")
    assert "blocks: " not in str(roomy).partition("\n")[2]
    assert len(roomy.program.blocks) == 5


def test_a_plan_with_cut_blocks_may_be_given():
    model, eager, plan = Model(), Model(), planned()
    compiled = megatrain.compile(model, device="cpu", memory="1MiB", transfer="copy")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    step = megatrain.TrainStep(compiled, optimizer, overlap=False, plan=plan)
    with pytest.raises(ScheduleError) as error:
        step(batch(0, 9))
    assert "blocks:" not in str(error.value), "the longer batch is named, not the blocks that were cut"
    losses = [step(batch(0)).item()]
    assert str(step.schedule) == str(plan.schedule)
    assert_as_loop(model, eager, losses, trained(eager, [batch(0)], "serial"))


@pytest.mark.nightly
def test_smaller_blocks_that_make_a_step_shorter_are_taken_on_a_known_machine():
    """Four layers of a 70B, with head and embedding larger than a layer, in half of an RTX 4090."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=4, use_cache=False, **sizes)  # pyright: ignore
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(2, 2048, dtype=torch.long)
    options: dict[str, Any] = {
        "example_kwargs": {"input_ids": ids, "labels": ids}, "optimizer": "AdamW", "precision": "bf16",
        "device_memory": "12GiB", "host_memory": "1TiB", "micro_batches": 2,
    }  # fmt: skip
    own, cut = (
        megatrain.plan(model, **options, hardware="rtx-4090", chunking=chunking) for chunking in ("never", "auto")
    )
    assert own.fits
    assert cut.fits
    assert own.simulation is not None
    assert cut.simulation is not None
    assert len(cut.program.blocks) > len(own.program.blocks)
    assert cut.simulation.step_s < 0.95 * own.simulation.step_s
    by_rule = megatrain.plan(model, **options)
    assert len(by_rule.program.blocks) == len(own.program.blocks), "without times the model's own blocks stay"
