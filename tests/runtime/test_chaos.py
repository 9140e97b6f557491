"""Numbers under random delays on every stream and NaN in freed slots: an ordering that held by luck breaks here."""

from __future__ import annotations

import copy

import pytest
import torch

import megatrain
from megatrain.runtime.operations import Operations
from megatrain.runtime.stores.slots import Slots
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same
from tests.models import MODELS
from tests.runtime.parity import train


@pytest.mark.parametrize("slow", ["h2d", "d2h"])
def test_a_runtime_without_waits_is_caught(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversarial half: chaos must turn a missing wait into wrong numbers or an error."""
    model, args, kwargs = MODELS["gpt_loss"]()
    eager, streamed = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(eager, eager, args, kwargs)
    monkeypatch.setattr(Operations, "waits", lambda self, instruction: [])
    chaos = Chaos(seed=1, max_delay_s=0.01, slow=slow)
    compiled = megatrain.compile(streamed, device="cpu", transfer="copy", activations="offload", chaos=chaos)
    with pytest.raises((AssertionError, KeyError, megatrain.ExecuteError)):
        assert_same(expected, train(compiled, streamed, args, kwargs))


def test_poison_reaches_a_reader_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing slots one reader too early must give NaN."""
    model, args, kwargs = MODELS["gpt_loss"]()
    original = Slots.state

    def too_early(self, block, where):
        views = original(self, block, where)
        self._arena.slot(0, self._arena.nbytes).fill_(0xFF)
        return views

    monkeypatch.setattr(Slots, "state", too_early)
    compiled = megatrain.compile(model, device="cpu", transfer="copy", chaos=Chaos(seed=0, max_delay_s=0))
    assert not torch.isfinite(compiled(*args, **kwargs)[1])
