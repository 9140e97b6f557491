"""Factors of micro-batches that stay on the device are to the bit those of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.errors import OptionError
from megatrain.training import shares
from megatrain.training.batch import MicroBatch
from megatrain.training.shares import Counts, Shares

COUNTS = [7, 1021, 333]
BATCHES = [MicroBatch.of(torch.tensor(count)) for count in COUNTS]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "is_on_host", lambda tensor: False)


def products(found: Shares, dtype: torch.dtype) -> list[Any]:
    products: list[Any] = []
    for number in range(len(COUNTS)):
        loss = torch.tensor(3.1415926 + number, dtype=dtype, requires_grad=True)
        share = found.share(loss, number)
        share.backward(torch.tensor(1.7, dtype=dtype))
        products += [share.dtype, share.item(), loss.grad]
    return products


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_factors_on_the_device_have_the_bits_of_numbers(dtype: torch.dtype):
    there = Shares(Counts(BATCHES, lambda batch: batch))
    assert products(there, dtype) == products(Shares(Counts(BATCHES, int)), dtype)
    there.check()


@pytest.mark.usefixtures("on_device")
def test_counts_on_the_device_are_read_by_the_check_alone():
    bad = Shares(Counts(BATCHES, lambda batch: batch * float("nan")))
    for _ in range(2):
        with pytest.raises(OptionError, match=r"^weight= counts the micro-batches as \[nan, nan, nan\]"):
            bad.check()
    Shares(Counts(BATCHES[:1], lambda batch: batch)).check()
    with pytest.raises(OptionError, match="weight= counts a micro-batch as"):
        Shares(Counts(BATCHES, lambda batch: torch.ones(2)))
