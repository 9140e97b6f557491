"""Numbers of Python that are others at each step: one capture stands for all of them, with eager's bits."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from tests.comparing import assert_same, snapshot
from tests.training.parity import loop_step

X = [torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def square(result: torch.Tensor, batch: Any) -> torch.Tensor:
    return result.square().mean()


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    """A model and its optimizer for eager; the same compiled, its optimizer, and a TrainStep."""
    torch.manual_seed(0)
    eager = make()
    streamed = copy.deepcopy(eager)
    compiled = megatrain.compile(streamed, device="cpu", memory="64KiB", transfer="copy", **options)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (eager, streamed)]
    return eager, optimizers[0], compiled, optimizers[1], megatrain.TrainStep(compiled, optimizers[1], loss=square)


def captures(compiled: Any) -> int:
    return compiled.megatrain.variant.number


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.factor * gradients[0], None


class Given(nn.Module):
    """Computes with numbers that it is given."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use

    def forward(self, x: torch.Tensor, number: float = 0.5, also: float = 2.0) -> torch.Tensor:
        return self.second(self.use(self.first(x), number, also))


COMPUTES: dict[str, Callable[..., Any]] = {
    "product": lambda x, n, m: x * n,
    "reflected": lambda x, n, m: (1 - n) / (x.square() + 1) - (n - x),
    "arithmetic": lambda x, n, m: x + (n * 2 + 1) / (3 - m) - -(n**2) % 0.7 // 0.1,
    "power": lambda x, n, m: x.abs() ** (n + 1),
    "in_place": lambda x, n, m: (x * 1).mul_(n).add_(x, alpha=m),
    "function": lambda x, n, m: Reverse.apply(x, n * m),
    "by_name": lambda x, n, m: F.leaky_relu(torch.lerp(x, x.tanh(), weight=n), negative_slope=m),
    "tensor": lambda x, n, m: x * torch.tensor(n) + torch.full((8,), m, dtype=x.dtype),
    "softmax": lambda x, n, m: torch.softmax(x / (n + 0.1), -1).clamp(max=m),
    "double": lambda x, n, m: (x.double() * n).to(x.dtype) + x.to(torch.bfloat16) * n,
    "unused": lambda x, n, m: x * 1,
    "norm": lambda x, n, m: F.layer_norm(x, (8,), eps=n + 1e-3),
}
DECIDES: dict[str, Callable[..., Any]] = {
    "compares": lambda x, n, m: x * n if n < 0.4 else x * 2,
    "caught": lambda x, n, m: _caught(x, n),
    "by_type": lambda x, n, m: x * n if type(n) is float else x * 3,
    "math": lambda x, n, m: x * math.exp(n),
    "draws": lambda x, n, m: F.dropout(x, n),
    "shape": lambda x, n, m: x[:, : int(n * 8) + 1].sum(-1, keepdim=True) * x,
    "table": lambda x, n, m: x * {n: 1.5}[n] * n,
}


def _caught(x: torch.Tensor, number: float) -> torch.Tensor:
    try:
        return x * number if number < 0.4 else x * 2
    except Exception:
        return x * 4


class All(nn.Module):
    """Everything that computes, layer after layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Given(use) for use in COMPUTES.values())

    def forward(self, x: torch.Tensor, number: float, also: float) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, number, also=also))
        return x


def test_numbers_as_arguments_have_one_capture_where_python_only_computes():
    eager, expected, compiled, found, step = pair(All, activations="recompute")
    for number in (0.1, 0.25, 1 / 3, 1 / 7):
        batches = [(x, number + 0.05 * place, number + 1) for place, x in enumerate(X[: 1 if number < 1 / 3 else 2])]
        assert_same(step(batches), loop_step(eager, expected, batches, loss=square)[0])
    assert_same(snapshot(eager, expected), snapshot(compiled, found))
    assert captures(compiled) == 3
    assert compiled.traced.input_names == ("x", "number", "also")


def calls_as_eager(model: nn.Module, numbers: Any, set_number: Callable[..., Any] | None = None) -> Any:
    """Calls with other numbers, as arguments or set by a function; returns the compiled copy."""
    eager = copy.deepcopy(model)
    compiled: Any = megatrain.compile(model, device="cpu")
    for number in numbers:
        start = torch.get_rng_state()
        for one in (eager, compiled):
            torch.set_rng_state(start)
            if set_number is None:
                result = one(X[0], number)
            else:
                set_number(one, number)
                result = one(X[0])
            result.square().mean().backward()
            if one is eager:
                wanted = result
            else:
                assert_same(result.detach(), wanted.detach())
    assert_same([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])
    return compiled


@pytest.mark.filterwarnings("ignore::megatrain.ManyCapturesWarning")
@pytest.mark.parametrize("name", ["compares", "by_type", "math", "draws", "shape", "table"])
def test_numbers_that_python_decides_on_stay_constants(name: str):
    compiled = calls_as_eager(Given(DECIDES[name]), [0.1, 0.25, 0.75])
    assert captures(compiled) == 3
    assert compiled.traced.input_names == ("x",)


class Annealed(nn.Module):
    """Computes with numbers that its user sets."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner = Given(use)
        self.number, self.also, self.steps = 0.5, 2.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, self.number, self.also) + self.steps


def anneal(model: Any, number: float) -> None:
    model.number, model.also, model.steps = number, number + 1, int(100 * number)


def test_attributes_that_the_user_changes_have_one_capture_where_python_only_computes():
    eager, expected, compiled, found, step = pair(lambda: Annealed(COMPUTES["arithmetic"]))
    for number in (0.1, 0.25, 1 / 3, 0.5, 0.75):
        for model in (eager, compiled):
            anneal(model, number)
        assert_same(step(X[:2]), loop_step(eager, expected, X[:2], loss=square)[0])
    assert_same(snapshot(eager, expected), snapshot(compiled, found))
    assert captures(compiled) == 3
    assert {"model.number", "model.also", "model.steps"} <= set(compiled.traced.input_names)
    assert "number" not in compiled.guards
    for model in (eager, compiled):
        anneal(model, 0.9)
    with torch.no_grad():
        assert_same(compiled(X[0]), eager(X[0]))
        assert_same(compiled.eval()(X[0]), eager.eval()(X[0]))
    del compiled.also
    with pytest.raises(AttributeError, match="also"):
        compiled(X[0])


class Counted(nn.Module):
    """Computes with a number that its forward reads from a buffer."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.layer, self.decides = nn.Linear(8, 8), decides
        self.steps: Any
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        steps = self.steps.item()
        return self.layer(x * 2 if self.decides and steps > 4 else x) / (1 + 0.1 * steps)


@pytest.mark.filterwarnings("ignore::megatrain.ManyCapturesWarning")
@pytest.mark.parametrize(("decides", "count"), [(False, 1), (True, 2)])
def test_numbers_that_a_forward_reads_from_buffers_leave_the_blocks(decides: bool, count: int):
    make: Any = lambda: nn.Sequential(*(Counted(decides=decides) for _ in range(3)))  # noqa: E731
    eager, expected, compiled, found, step = pair(make)
    for _ in range(5):
        assert_same(step(X[:count]), loop_step(eager, expected, X[:count], loss=square)[0])
    assert_same(snapshot(eager, expected), snapshot(compiled, found))
    assert_same(dict(compiled.state_dict()), dict(eager.state_dict()))
    assert len(compiled.program.blocks) == 3
    assert "opaque" in str(compiled.program) if decides else captures(compiled) == 3


def told(train: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train()
    return [str(one.message) for one in said if one.category is megatrain.ManyCapturesWarning]


def test_a_number_that_python_decides_on_is_told_with_its_place_after_five_captures():
    [text] = told(lambda: calls_as_eager(Given(DECIDES["compares"]), [number / 8 for number in range(1, 6)]))
    first, latest, advice = text.splitlines()
    assert first == "5 of the latest 5 calls were captured anew."
    assert latest.startswith("  The latest: `number` is 0.625, and was 0.5, read at test_changing_numbers.py:")
    assert latest.endswith('"compares": lambda x, n, m: x * n if n < 0.4 else x * 2,`.')
    assert "an argument of one element (torch.tensor(value))" in advice
    assert told(lambda: calls_as_eager(Given(DECIDES["compares"]), [number / 8 for number in range(1, 5)])) == []


class Longer(nn.Module):
    """Reads what its user changes: a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.listed = nn.Linear(8, 8), [0.5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * len(self.listed)


def test_other_values_that_change_are_told_by_name_after_five_captures():
    eager, expected, compiled, _, step = pair(Longer)

    def train() -> None:
        for _ in range(5):
            assert_same(step(X[0]), loop_step(eager, expected, X[0], loss=square)[0])
            for model in (eager, compiled):
                model.listed.append(0.5)

    [text] = told(train)
    assert "  The latest: model.listed == [0.5, 0.5, 0.5, 0.5] at test_changing_numbers.py" in text
