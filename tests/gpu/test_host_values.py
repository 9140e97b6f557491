"""Tensors that are on the CPU in eager too, in a model that computes on an accelerator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import megatrain
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.workload import Workload
from tests.gpu.test_cuda_training import device
from tests.simulated_device import is_loaded
from tests.simulated_device.lstm_cell import lstm_cell

ACTIVATIONS = ["recompute", "keep", "offload", "auto"]
WIDTH, WORDS = 8, 11


@pytest.fixture(autouse=True)
def _late_streams(request: pytest.FixtureRequest) -> Generator[None]:
    """On the simulated device streams work as late as the waits allow: a copy that nobody waits for isn't there."""
    if not is_loaded():
        yield
        return
    with lstm_cell():  # kernels in Python aren't recorded, of which other tests must know nothing
        request.getfixturevalue("sim").order("late")
        yield


class PackedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.rnn(packed)[0]


class PackedStack(nn.Module):
    """Its blocks hand each other a packed sequence, whose `batch_sizes` torch wants on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(PackedLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed = layer(packed)
        states, _ = pad_packed_sequence(packed, batch_first=True)
        return F.cross_entropy(self.head(states).flatten(0, 1), ids[:, : states.shape[1]].flatten())


LENGTHS = ([5, 2, 4], [3, 5, 1], [5, 5, 5], [5, 2, 4])


def batch(number: int) -> dict[str, torch.Tensor]:
    """Token numbers on the accelerator, and lengths on the CPU, as `pack_padded_sequence` wants them."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(WORDS, (3, 5), generator=generator)
    return {"ids": ids.to(device()), "lengths": torch.tensor(LENGTHS[number])}


class Body(nn.Module):
    def __init__(self, rule: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rule = rule

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.rule(self.linear(x), *more)


class Ruled(nn.Module):
    """Layers that do the same with further tensors, which are given, or made first."""

    def __init__(
        self, rule: Callable[..., torch.Tensor], made: Callable[..., Any] | None = None, returned: Any = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body(rule) for _ in range(3))
        self.made, self.returned = made, returned

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        x, more = (x, more) if self.made is None else self.made(x, *more)
        for layer in self.layers:
            x = layer(x, *more)
        return x.sum() if self.returned is None else self.returned(x, *more)


def patched(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Does what vision models do with their grids: sizes from the numbers, and rows from sums of them."""
    ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0)
    return x * ends.to(x.device)[-1] + sum(grid[0].tolist())


X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
GRID = torch.tensor([[2, 2, 3], [1, 4, 2]])
RULES: dict[str, tuple[Ruled, list[torch.Tensor], bool]] = {
    # The model, its inputs besides one on the device, and whether a value between its blocks is on the host.
    "a number given": (Ruled(lambda x, scale: x * scale), [torch.tensor(0.5)], True),
    "an index given": (Ruled(lambda x, order: x[order]), [torch.tensor([1, 0, 3, 2])], True),
    "an index made": (Ruled(lambda x, i: x[i], lambda x: (x, (torch.arange(len(x) - 1, -1, -1),))), [], True),
    "a grid": (Ruled(patched), [GRID], True),
    "there and back": (Ruled(lambda x: x.cpu().tanh().to(x.device)), [], False),
    "kept on the host": (Ruled(lambda x, y: x + y.to(x.device), lambda x: (x.tanh(), (x.cpu() * 2,))), [], True),
    "a host input with a gradient": (Ruled(lambda x, y: x + y.to(x.device)), [X.clone().requires_grad_()], True),
    "a host input that is written": (Ruled(lambda x, y: x * y.add_(1)[0].to(x.device)), [torch.ones(2)], True),
    "a result on the host": (Ruled(lambda x: x, returned=lambda x: (x.sum(), x.cpu() * 2)), [], True),
    "only results on the host": (Ruled(lambda x: x, returned=lambda x: x.cpu().sum()), [], True),
    "moved in the forward": (Ruled(lambda x, y: x + y, lambda x, y: (x, (y.to(x.device),))), [X * 3], True),
}


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """The same place, and the same bits."""
    assert found.device == expected.device, f"{what} is on {found.device}, not {expected.device}"
    assert torch.equal(found, expected), what


def differentiated(model: Any, args: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Runs a call and its backward; returns outputs, gradients of parameters on the host, those of inputs, inputs."""
    given = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    result = model(*given)
    outputs = list(result) if isinstance(result, tuple) else [result]
    losses = [t.sum().to(device()) for t in outputs if t.requires_grad]
    torch.stack(losses).sum().backward()
    parameters = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return [*(t.detach() for t in outputs), *parameters, *(g.grad for g in given), *(g.detach() for g in given)]


def assert_plan(schedule: Schedule, *, has_host_values: bool) -> None:
    """Values on the host take host bytes only, and never move."""
    workload = schedule.known_workload()
    on_host = {index for index, value in enumerate(workload.values) if value.on_host}
    assert bool(on_host) == has_host_values
    assert not on_host.intersection(value for values in schedule.parked().values() for value in values)
    assert (schedule.host_value_bytes > 0) == has_host_values
    schedule.check()
    assert Workload.from_dict(workload.to_dict()) == workload


@pytest.mark.parametrize("name", RULES)
def test_a_call_is_like_eager(name: str) -> None:
    model, more, has_host_values = RULES[name]
    args, activations = [X.to(device()), *more], ACTIVATIONS[list(RULES).index(name) % 3]
    expected = differentiated(copy.deepcopy(model).to(device()), args)
    compiled = megatrain.compile(copy.deepcopy(model), device=device(), activations=activations, memory="1MiB")
    for _ in range(2):
        compiled.zero_grad()
        found = differentiated(compiled, args)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one is None) == (other is None), place
            if one is not None and other is not None:
                assert_same(one, other, f"{name}, tensor {place}")
    assert_plan(compiled.schedule, has_host_values=has_host_values)
    assert compiled.peak_bytes <= compiled.schedule.peak_bytes


@pytest.mark.parametrize("activations", ["offload", pytest.param("auto", marks=pytest.mark.nightly)])
def test_packed_sequences_are_like_eager(activations: str) -> None:
    torch.manual_seed(0)
    model = PackedStack()
    eager = copy.deepcopy(model).to(device())
    compiled = megatrain.compile(model, device=device(), activations=activations, memory="1MiB")
    for number in range(len(LENGTHS)):
        given = batch(number)
        expected, found = eager(**given), compiled(**given)
        expected.backward()
        found.backward()
        assert_same(found.detach(), expected.detach(), f"loss {number}")
        for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert_same(one.grad, other.grad.cpu(), f"{name}, batch {number}")
        assert_plan(compiled.schedule, has_host_values=True)
    assert '"i64[5] cpu"' in str(compiled.program)


def test_a_tensor_on_the_host_that_eager_refuses_is_refused_with_its_words() -> None:
    model = Ruled(lambda x, y: x + y)
    with pytest.raises(RuntimeError) as expected:
        copy.deepcopy(model).to(device())(X.to(device()), X)
    compiled = megatrain.compile(model, device=device(), memory="1MiB")
    with pytest.raises(RuntimeError) as found:
        compiled(X.to(device()), X)
    assert str(found.value) == str(expected.value)
    assert "on the CPU: `more_0`; the model computes on" in found.value.__notes__[-1]


def test_verify_takes_host_values() -> None:
    model, more, _ = RULES["a host input with a gradient"]
    assert megatrain.verify(model, X.to(device()), *more, device=device(), memory="1MiB").ok
