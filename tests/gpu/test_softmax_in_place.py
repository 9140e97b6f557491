"""Chunks of a head that share memory have the bits of torch's own calls on an accelerator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatrain.passes.rewrites.chunked_log_probs import LogitsInPlace

ROWS, WIDTH = 24, 64


# Kernels differ between rows of at most 1024 words, of those that fit shared memory, and of others.
@pytest.mark.parametrize(
    "words", [1024, 4097, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1000, 32000, 50257, 150001))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("smooths", [False, True], ids=["labels", "smoothed"])
def test_log_probabilities_and_gradients_have_the_bits_of_torch(words: int, dtype: torch.dtype, smooths: bool):
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    weight = torch.randn(words, WIDTH, device=device).to(dtype)
    in_place = LogitsInPlace(weight, None, None, torch.float32, ROWS)
    for rows in (ROWS, ROWS - 7, ROWS):  # the memory has been used before
        hidden = torch.randn(rows, WIDTH, device=device).to(dtype)
        labels = torch.randint(words, (rows,), device=device)
        of_selected, of_sums = torch.randn(2, rows, device=device)
        logits = torch.mm(hidden, weight.t()).requires_grad_()
        expected = torch.log_softmax(logits.float(), -1)
        results, gradients = [-F.nll_loss(expected, labels, reduction="none")], [of_selected]
        if smooths:
            results, gradients = [*results, expected.sum(1)], [*gradients, of_sums]
        (of_logits,) = torch.autograd.grad(results, [logits], gradients)
        assert torch.equal(in_place.log_probs(hidden), expected)
        assert torch.equal(*in_place.gradients(hidden, labels, gradients), of_logits)
