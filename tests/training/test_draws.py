"""Random numbers of a step of several micro-batches: those of the plain loop over them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.device import Cpu
from megatrain.errors import DrawsError
from megatrain.runtime.random_calls import RngState
from tests.comparing import assert_same, snapshot
from tests.training.parity import loop_step

X = [torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Drops(nn.Module):
    """A layer that draws in many ways, with operands of many layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.first(x).transpose(1, 2), 0.3).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, x, dropout_p=0.2) + F.alpha_dropout(y, 0.1, training=True)
        y = y + 0.1 * torch.randn_like(y) + torch.rand(8, 1).to(y.dtype) + torch.bernoulli(torch.sigmoid(y.detach()))
        y = y * (1 + 0.1 * torch.normal(torch.zeros(16), torch.ones(16))) + F.gumbel_softmax(y, dim=-1)
        return self.second(F.dropout(F.dropout1d(y, 0.2) * 1, 0.1, inplace=True))


class Counts(nn.Module):
    """How much a draw takes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.layer(x + torch.poisson(20 * x.square())), training=True)


class Own(nn.Module):
    """Runs its own code, because it assigns to a tensor's attribute; from `quiet` calls on it draws."""

    def __init__(self, draws: Any = lambda: 1.0, quiet: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.draws = draws
        self.left = [quiet]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        x.requires_grad = True
        self.left[0] -= 1
        return self.layer(x) * (self.draws() if self.left[0] < 0 else 1.0)


def mean_square(result: Any, batch: Any) -> torch.Tensor:
    return result.square().mean()


def both(make: Any, activations: str = "auto") -> tuple[Any, Any, Any, Any]:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    compiled = megatrain.compile(models[1], device="cpu", transfer="copy", activations=activations)
    return (
        models[0],
        torch.optim.SGD(models[0].parameters(), 0.1),
        compiled,
        torch.optim.SGD(models[1].parameters(), 0.1),
    )


@pytest.mark.parametrize(
    ("count", "make"),
    [(2, lambda: nn.GRU(16, 16, 2, dropout=0.5)), (3, lambda: nn.Sequential(Own(), nn.Dropout(0.5), Drops(), Drops()))],
    ids=["recurrent", "own code and many draws"],
)
def test_micro_batches_draw_in_the_order_of_the_loop(make: Any, count: int):
    eager, expected, compiled, found = both(make)
    loss: Any = (lambda result, batch: result[0].square().mean()) if isinstance(eager, nn.GRU) else mean_square
    step = megatrain.TrainStep(compiled, found, loss=loss)
    for _ in range(2):
        start = torch.get_rng_state()
        wanted = loop_step(eager, expected, X[:count], loss=loss)[0]
        end = torch.get_rng_state()
        torch.set_rng_state(start)
        assert_same(step(X[:count]), wanted)
        assert torch.equal(torch.get_rng_state(), end)
    assert_same(dict(compiled.state_dict()), dict(eager.state_dict()))


class Kept(nn.Module):
    """Draws from a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(16, 16), np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(self.generator.normal())


def in_own_code(draw: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(16, 16), nn.Sequential(Own(draw), nn.Dropout(0.5)), nn.Linear(16, 16))


OF_VALUES = "drew another number of random values"
OF_LOSS = "the loss draws random numbers, and so does the model"
OF_OWN_CODE = "a module or a hook that runs its own code draws random numbers"
DRAWS: dict[str, tuple[Any, Any, str]] = {
    "of values": (Counts, mean_square, OF_VALUES),
    "loss, random": (Drops, lambda result, _: mean_square(result, _) * random.random(), OF_LOSS),
    "random": (in_own_code(random.random), mean_square, OF_OWN_CODE),
    "kept generator": (lambda: nn.Sequential(nn.Linear(16, 16), Kept()), mean_square, OF_OWN_CODE),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_eagers_for_one_micro_batch_and_refused_for_several_without_a_trace(name: str):
    make, loss, text = DRAWS[name]
    eager, expected, compiled, found = both(make, activations="recompute" if name == "random" else "auto")
    step = megatrain.TrainStep(compiled, found, loss=loss)
    for _ in range(2):
        start = RngState.of_all(Cpu())
        wanted = loop_step(eager, expected, X[0], loss=loss)[0]
        start.restore(Cpu())
        assert_same(step(X[0]), wanted)
    assert_same(dict(compiled.state_dict()), dict(eager.state_dict()))
    before, start = snapshot(compiled, found), RngState.of_all(Cpu())
    with pytest.raises(DrawsError, match=text):
        step(X)
    assert_same(snapshot(compiled, found), before)
    assert start.is_same(RngState.of_all(Cpu()))
    step(X[0])


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand], ids=["torch", "numpy"])
def test_a_module_that_draws_though_it_did_not_in_the_capture_is_refused_and_leaves_no_trace(draw: Any):
    _, _, compiled, found = both(lambda: nn.Sequential(Own(draw, quiet=10), nn.Dropout(0.5), nn.Linear(16, 16)))
    step = megatrain.TrainStep(compiled, found, loss=mean_square)
    step(X)
    own: Any = compiled[0]
    own.left[0] = 0
    before, start = snapshot(compiled, found), torch.get_rng_state()
    with pytest.raises(DrawsError, match=OF_VALUES):
        step(X)
    assert_same(snapshot(compiled, found), before)
    assert torch.equal(torch.get_rng_state(), start)
