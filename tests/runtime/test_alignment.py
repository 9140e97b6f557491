"""Tensors of a block's state begin where their device wants them to, in slots and on the host; plan and run agree."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.device import Accelerator, Cpu
from megatrain.errors import OptionError
from megatrain.runtime.stores.host_store import HostStore
from tests.runtime.parity import assert_same, train

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE.split("\n## A kind of device\n")[1], re.DOTALL | re.MULTILINE)[0]
PARTS: dict[str, Any] = {"__name__": "toy"}
exec(compile(CODE, "extending.md", "exec"), PARTS)


class Wide(PARTS["Toy"]):  # type: ignore[misc]
    """A toy that wants what an accelerator wants."""

    alignment = Accelerator.alignment


def build() -> nn.Module:
    """Biases of 12 and 20 bytes, so that all that follows them is at odd places without padding."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)) for _ in range(4)]
    return nn.Sequential(*layers)


def test_accelerators_align_to_512_bytes_and_the_host_to_64():
    assert (Accelerator.alignment, Cpu().alignment) == (512, 64)


def test_every_weight_in_a_slot_and_on_the_host_is_aligned(monkeypatch: pytest.MonkeyPatch):
    model, seen = build(), list[int]()
    views = HostStore.views

    def noted(layout: Any, buffer: torch.Tensor) -> list[torch.Tensor]:
        found = views(layout, buffer)
        seen.extend(t.data_ptr() for t in found)
        return found

    monkeypatch.setattr(HostStore, "views", staticmethod(noted))
    eager, inputs = copy.deepcopy(model), (torch.randn(2, 5),)
    compiled = megatrain.compile(model, device=Wide(), activations="offload")
    assert_same(train(eager, eager, inputs, {}), train(compiled, model, inputs, {}))
    assert seen
    assert all(address % 512 == 0 for address in seen)
    assert all(p.data_ptr() % 512 == 0 for p in model.parameters())
    assert "4 blocks, 1 template; state at multiples of 512 B" in str(compiled.program).replace("templates", "template")


@pytest.mark.parametrize("device", [Wide, Cpu])
def test_the_plan_for_a_device_and_the_run_on_it_agree_on_bytes(device: Any):
    model, target, inputs = build(), device(), torch.randn(2, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = megatrain.compile(model, device=target, activations="offload", memory="1MiB")
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda out, _: out.sum())
    step(inputs)
    engine, schedule = compiled.megatrain.engine, step.schedule
    plan = megatrain.plan(
        model,
        inputs,
        device=target,
        device_memory="1MiB",
        optimizer=optimizer,
        activations="offload",
        loss=lambda out, _: out.sum(),
    )
    assert plan.schedule == schedule
    assert engine.arena.nbytes == schedule.arena_bytes
    assert engine.arena.nbytes % target.alignment == 0
    assert engine.store is not None
    assert engine.store.nbytes == plan.host.bytes_of("parameters") == step.host_plan.bytes_of("parameters")
    assert engine.store.nbytes == len(list(model.parameters())) * target.alignment, "none is larger than 64 bytes"


def test_a_block_of_aligned_state_crosses_in_one_copy():
    model, toy = build(), Wide()
    compiled = megatrain.compile(model, device=toy)
    with torch.no_grad():
        compiled(torch.randn(2, 5))
    assert toy.num_copies == 4


@pytest.mark.parametrize("alignment", [0, 63, 96, 8192, True, "512"])
def test_an_alignment_is_a_power_of_two(alignment: Any):
    traced = megatrain.trace(nn.Linear(3, 3), (torch.ones(2, 3),))
    with pytest.raises(OptionError, match=r"^alignment"):
        megatrain.lower(traced, alignment=alignment)
    assert megatrain.lower(traced, alignment=128).alignment == 128
