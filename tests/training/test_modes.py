"""Updates that are due are the same in whatever mode the code is that takes them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import megatrain
from tests.comparing import assert_same_bits
from tests.runtime.parity import seeded
from tests.tiers import one_in


class Refusing(TorchFunctionMode):
    """No function may get a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, torch.Tensor) for arg in args):
            raise KeyError(func)
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "function modes": lambda: nested(torch.device("meta"), Refusing(), torch.device("meta")),
}


@contextmanager
def nested(*modes: AbstractContextManager[object]) -> Generator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


OPTIMIZERS = {
    "one pass": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "own code": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def start(make: Callable[..., torch.optim.Optimizer]) -> tuple[megatrain.TrainStep, nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = make(model.parameters())
    compiled = megatrain.compile(model, device="cpu")
    step = megatrain.TrainStep(compiled, optimizer, loss=lambda result, _: result.square().mean(), max_grad_norm=1.0)
    step(torch.ones(2, 4))
    return step, model, optimizer


def dropped(step: megatrain.TrainStep) -> None:
    step.user = {"step": step}  # a cycle: only the collector finds it


@pytest.mark.parametrize(("optimizer", "mode", "way"), one_in(3, product(OPTIMIZERS, MODES, ["flush", "collector"])))
def test_the_first_updates_are_taken_in_any_mode(mode: str, way: str, optimizer: str) -> None:
    expected, plain, _ = start(OPTIMIZERS[optimizer])
    expected.flush()
    step, model, used = start(OPTIMIZERS[optimizer])
    gc.disable()
    try:
        if way == "collector":
            dropped(step)
            del step
        with MODES[mode]():
            gc.collect() if way == "collector" else step.flush()
    finally:
        gc.enable()
    again = megatrain.TrainStep(megatrain.compile(model, device="cpu"), used, loss=lambda result, _: result.sum())
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, plain.get_parameter(name), name)
    again(torch.ones(2, 4))  # what the updates made can be written to
    assert all(state["step"] == 2 for state in used.state.values())


class Parts(nn.Module):
    """Batch norm and dropouts of several kinds, in parts of which one may be frozen."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(p))
        self.rnn = nn.GRU(4, 4, num_layers=2, dropout=p)
        self.head = nn.Sequential(nn.AlphaDropout(p), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.encoder(x))[0]).square().mean()


def freeze_encoder(model: Parts) -> None:
    model.train()
    model.encoder.eval().requires_grad_(False)


EVAL_MODES: dict[str, tuple[float, Callable[[Parts], object], str | None]] = {
    "all": (0.5, lambda model: model.eval(), "`encoder.2` and 2 more"),
    "around a trained part": (0.5, lambda model: model.rnn.eval(), "`rnn` is"),
    "adapters": (
        0.5,
        lambda model: [part.eval().requires_grad_(part is model.head) for part in model.children()],
        "`hea",
    ),
    "training": (0.5, lambda model: model.train(), None),
    "no dropout": (0.0, lambda model: model.eval(), None),
    "a frozen encoder": (0.5, freeze_encoder, None),
    "batch norm": (0.5, lambda model: model.encoder[1].eval(), None),
    "a dropout": (0.5, lambda model: model.head[0].eval(), None),
}


@pytest.mark.parametrize("name", EVAL_MODES)
def test_dropout_in_eval_mode_is_warned_of_once_at_the_first_step(name: str) -> None:
    p, change, words = EVAL_MODES[name]
    torch.manual_seed(0)
    compiled = megatrain.compile(Parts(p).eval(), device="cpu")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), 0.1))
    compiled.train()
    change(cast(Any, compiled.megatrain.model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            step(torch.randn(3, 4))
    texts = [str(each.message) for each in said if each.category is megatrain.TrainStepWarning]
    assert len(texts) == (words is not None)
    if words is not None:
        assert texts[0].startswith(f"the model trains without dropout: {words}")
        assert "Call model.train() before the steps" in texts[0]
