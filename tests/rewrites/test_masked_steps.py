"""Steps that don't fit leave masks of positions out, in plans and in steps alike; they train as eager does."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import TooSmallError
from megatrain.passes.masks.attention import ATTENTION
from megatrain.passes.masks.banded_attention import BandedAttention
from megatrain.sizes import parse_bytes
from tests.rewrites.test_masked_attention import WORDS, Model, added, causal, padded, window
from tests.tiers import every_other, wide

MODELS: dict[str, Any] = {"flags": causal, "added": added, "padded": padded, "window": window(200)}


def batch(step: int, tokens: int = 1200) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(1, WORDS, (1, tokens), generator=torch.Generator().manual_seed(step))}


def step_of(model: nn.Module, **options: Any) -> Any:
    compiled = megatrain.compile(model, device="cpu", **options)
    return megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9))


def masks_of(program: Any) -> set[str]:
    """What became of masks: the text for each call of attention."""
    nodes = [node for template in program.templates.values() for node in template.graph.nodes]
    calls = [node for node in nodes if node.target in ATTENTION or isinstance(node.target, BandedAttention)]
    return {node.meta["mask"].text if "mask" in node.meta else "whole" for node in calls}


# A mask of flags has 1.4 MB, one of numbers 5.8 MB, which the kernel makes of flags as well.
CASES = {
    "flags": ("4MiB", "causality"),
    "added": ("4MiB", "causality"),
    "padded": ("8500KiB", "a mask made here"),
    "window": ("11MiB", "a mask made here"),
    "a smaller window": ("6MiB", "512 queries at a time"),
    "less padded": ("6MiB", "512 queries at a time"),
}


@pytest.mark.usefixtures("no_smaller_blocks")
@pytest.mark.parametrize("name", every_other(CASES))
def test_masks_are_left_out_where_a_step_doesnt_fit_and_it_trains_as_eager_does(name: str):
    """All but parts of a window keep all bits: losses, gradients, and weights after updates."""
    memory, text = CASES[name]
    model = Model(MODELS[name.split()[-1]])
    loop = copy.deepcopy(model)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1, momentum=0.9)
    for options in ({}, {"memory": "1GiB"}):
        large = step_of(copy.deepcopy(model), **options)
        large.prepare(batch(0))
        assert masks_of(large.program) == {"whole"}
    with pytest.raises(TooSmallError):
        step_of(copy.deepcopy(model), memory=memory, chunking="never").prepare(batch(0))
    step = step_of(model, memory=memory)
    schedule = step.prepare(batch(0))
    assert masks_of(step.program) == {text}
    assert not [v for v in step.program.values.values() if v.spec.shape[-2:] == (1200, 1200)]
    for number in range(3):
        loss = loop(**batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = step(batch(number))
        exact = "queries" not in text or number == 0
        torch.testing.assert_close(found, loss.detach(), rtol=0 if exact else 1e-5, atol=0)
    step.flush()
    assert step._compiled.peak_bytes <= schedule.device_bytes <= parse_bytes(memory)
    for one, other in zip(loop.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other) if "queries" not in text else (one - other).detach().abs().mean() < 1e-6


@pytest.mark.usefixtures("no_smaller_blocks")
@pytest.mark.parametrize(
    ("tokens", "mask", "size", "instead"),
    [
        (524288, causal, "256.00 GiB", "causality"),
        wide((65536, window(8192), "4.00 GiB", "4096 queries at a time on 12288 keys")),
    ],
)
def test_a_plan_says_what_became_of_masks_and_needs_no_memory_for_them(tokens: int, mask: Any, size: str, instead: str):
    """Nothing of these sizes exists while a plan is made."""
    with torch.device("meta"):
        model, ids = Model(mask), torch.zeros(1, tokens, dtype=torch.long)
    never, auto = (
        megatrain.plan(model, ids, device_memory="1KiB", optimizer="AdamW", chunking=chunking)
        for chunking in ("never", "auto")
    )
    assert never.schedule.device_bytes > 2 * tokens**2 > 10 * auto.schedule.device_bytes
    line = next(line for line in str(auto).splitlines() if "masks:" in line)
    text = rf"  masks: attention in blocks \d+, \d+ with {instead} instead of a mask of {size}"
    assert re.fullmatch(text, line)


def test_never_and_always():
    step = step_of(Model(causal), chunking="always")
    step.prepare(batch(0))
    assert masks_of(step.program) == {"causality"}
    compiled = megatrain.compile(Model(window(200)), device="cpu", chunking="always", example_kwargs=batch(0))
    assert masks_of(compiled.program) == {"512 queries at a time"}
    report = megatrain.verify(Model(causal), batch(0)["ids"], device="cpu", compile_options={"chunking": "always"})
    assert report.ok, report


def test_a_model_without_masks_isnt_lowered_once_more(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: Any) -> Any:
        raise AssertionError("lowered without a reason")

    step = step_of(Model(lambda ids: None, is_causal=True))
    step.prepare(batch(0))
    _, programs = step._compiled.prepare(**batch(0)).for_step(is_own_loss=True)
    plain = programs.at(0)
    monkeypatch.setattr(programs, "_lower", refuse)
    assert programs.at(1) is plain
