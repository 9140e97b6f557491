"""Numbers under random delays on every stream and NaN in freed slots: an ordering that held by luck breaks here."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatrain
from megatrain.runtime.executor import Executor
from megatrain.runtime.slots import Slots
from megatrain.runtime.streams import Chaos
from tests.models import MODELS
from tests.runtime.harness import assert_same, train

NAMES = [
    "gpt_loss",
    "mlp",
    "cnn",
    "llama_labels",
    "t5_labels",
    "unet",
    "encoder_decoder",
    "block_called_twice",
]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    name=st.sampled_from(NAMES),
    num_slots=st.integers(1, 4),
    keep=st.integers(0, 4),
    activations=st.sampled_from(["recompute", "offload", "keep"]),
    spare=st.floats(1.0, 2.0),
    is_budgeted=st.booleans(),
)
def test_parity_under_chaos(
    seed: int, name: str, num_slots: int, keep: int, activations: str, spare: float, is_budgeted: bool
) -> None:
    model, args, kwargs = MODELS[name]()
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    chaos = Chaos(seed=seed, max_delay_s=0.0005)
    program = megatrain.lower(megatrain.trace(model, args, kwargs))
    if is_budgeted:
        least = megatrain.schedule(program, num_slots=1, keep=0, activations="offload").device_bytes
        options = {"memory": int(least * spare), "activations": "auto"}
    else:
        options = {"activations": activations}
    compiled = megatrain.compile(streamed, device="cpu", transfer="copy", chaos=chaos, **options)
    variant = compiled.prepare(*args, **kwargs)
    if not is_budgeted:
        variant.schedule = megatrain.schedule(variant.program, num_slots=num_slots, keep=keep, activations=activations)
        variant.schedule.check()
    expected = train(eager, eager, args, kwargs)
    found = train(compiled, streamed, args, kwargs)
    assert_same(expected, found)
    assert compiled.peak_bytes <= compiled.schedule.device_bytes


class WithoutWaits(Executor):
    """An executor that forgets what its operations wait for."""

    def _waits(self, step, events):
        return []


@pytest.mark.parametrize("slow", ["h2d", "d2h"])
def test_a_runtime_without_waits_is_caught(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversarial half: chaos must turn a missing wait into wrong numbers or an error."""
    model, args, kwargs = MODELS["gpt_loss"]()
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(eager, eager, args, kwargs)
    monkeypatch.setattr(Executor, "_waits", WithoutWaits._waits)
    chaos = Chaos(seed=1, max_delay_s=0.01, slow=slow)
    compiled = megatrain.compile(streamed, device="cpu", transfer="copy", activations="offload", chaos=chaos)
    with pytest.raises((AssertionError, KeyError, megatrain.ExecuteError)):
        assert_same(expected, train(compiled, streamed, args, kwargs))


def test_poison_reaches_a_reader_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing slots one reader too early must give NaN."""
    model, args, kwargs = MODELS["gpt_loss"]()
    original = Slots.state

    def too_early(self, block, slot):
        views = original(self, block, slot)
        self.poison([(s.offset, s.nbytes) for s in self._schedule.slots])
        return views

    monkeypatch.setattr(Slots, "state", too_early)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", chaos=Chaos(seed=0, max_delay_s=0))
    assert not torch.isfinite(compiled(*args, **kwargs)[1])
