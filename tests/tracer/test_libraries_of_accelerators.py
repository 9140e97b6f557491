"""What torch's libraries for accelerators do besides computing: a capture leaves weights where they are."""

from __future__ import annotations

import pytest
import torch

from megatrain.tracer.recording.effect_watch import EffectWatch


def test_a_tensor_that_takes_over_a_storage_writes_nothing_into_it():
    weight = torch.ones(3)
    watch = EffectWatch(lambda _: None, lambda _: None, lambda call: (call(), False))
    with watch:
        torch.empty(0).set_(weight.untyped_storage())
        assert not watch.written
        weight.set_(torch.zeros(3))  # pyright: ignore[reportArgumentType]
        assert watch.written == [weight]


@pytest.mark.parametrize(
    ("dropout", "is_training", "draws"), [(0.0, True, False), (0.5, False, False), (0.5, True, True)]
)
def test_an_rnn_of_cudnn_is_random_only_with_dropout(dropout: float, is_training: bool, draws: bool):
    x = torch.empty(5, 3, 8, device="meta")
    weights = [torch.empty(32, 8, device="meta"), torch.empty(32, 8, device="meta")]
    state = torch.empty(1, 3, 8, device="meta")
    watch = EffectWatch(lambda _: None, lambda _: None, lambda call: (call(), False))
    with watch:
        torch.ops.aten._cudnn_rnn(
            x, weights, 2, None, state, state, 2, 8, 0, 1, False, dropout, is_training, False, [], None
        )
    assert watch.is_random == draws


@pytest.mark.parametrize(("kind", "dropout"), [("flash", 0.0), ("flash", 0.5), ("efficient", 0.0), ("efficient", 0.5)])
def test_fused_attention_is_random_only_with_dropout(kind: str, dropout: float):
    """It is tagged in any case. What is random is drawn ahead for each further micro-batch: all attention once more."""
    q = torch.empty(1, 2, 16, 8, device="meta", dtype=torch.bfloat16)
    watch = EffectWatch(lambda _: None, lambda _: None, lambda call: (call(), False))
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    options = (None, True, dropout) if kind == "efficient" else (dropout,)
    with watch:
        attend(q, q, q, *options)
    assert watch.is_random == (dropout > 0)
