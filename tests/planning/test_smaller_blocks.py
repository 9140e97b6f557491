"""What an error about a small budget says of `block_bytes` was planned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import TooSmallError
from tests.nightly import nightly

X = torch.zeros(2, 32)
HINT = "a smaller block_bytes"


def hidden(*widths: int) -> nn.Sequential:
    """A block of several linear layers, and one after it."""
    layers = [nn.Linear(one, other) for one, other in zip((32, *widths), (*widths, 32), strict=True)]
    return nn.Sequential(nn.Sequential(*layers), nn.Sequential(nn.Linear(32, 32)))


def refused(model: nn.Module, memory: int, *, trains: bool, **options: Any) -> TooSmallError:
    run: Any = megatrain.compile(model, device="cpu", memory=memory, **options)
    if trains:
        optimizer = torch.optim.SGD(run.parameters())
        run = megatrain.TrainStep(run, optimizer, loss=lambda result, batch: result.sum())
    with pytest.raises(TooSmallError) as error:
        run(X)
    return error.value


def uncut(model: nn.Module, memory: int, *, trains: bool) -> TooSmallError:
    """The error of the model's own blocks; steps cut them otherwise."""
    return refused(model, memory, trains=trains, chunking="never")


@pytest.mark.parametrize("trains", [nightly(False), True])
def test_blocks_that_can_be_cut_are_named_and_cut_they_fit(trains: bool):
    model = hidden(96, 96)
    least = uncut(model, 1000, trains=trains).least_bytes
    assert HINT in uncut(model, least - 1, trains=trains).helps
    compiled = megatrain.compile(model, device="cpu", memory=least - 1, block_bytes=1)
    compiled(X).sum().backward()


@pytest.mark.parametrize("trains", [False, True])
def test_a_tensor_that_cant_be_cut_isnt_blamed_on_blocks(trains: bool):
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 32))
    error = refused(model, 20_000, trains=trains, block_bytes=1)
    assert set(error.helps) - {'activations="offload"'} == {"a larger memory", "a smaller batch"}
    assert "block_bytes" not in str(error)


@pytest.mark.parametrize("trains", [False, nightly(True)])
def test_blocks_that_need_less_and_still_too_much_have_their_bytes(trains: bool):
    error = uncut(hidden(96, 1), 5_000, trains=trains)
    (hint,) = [hint for hint in error.helps if hint.startswith(HINT)]
    least = int(re.search(r"\((\d+) B are needed then\)", hint)[1])  # pyright: ignore
    assert 5_000 < least < error.least_bytes
    found = refused(hidden(96, 1), 5_000, trains=trains, block_bytes=1)
    assert found.least_bytes <= least
    assert "block_bytes" not in str(found)
