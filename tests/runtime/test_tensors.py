"""Unusual tensors as parameters, buffers and inputs: dtypes, shapes, layouts, sharing; all bit for bit as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.errors import ExecuteError
from tests.runtime.parity import assert_parity_of, moved, paths, seeded

P = nn.Parameter


def module(forward: Callable[..., Any], **members: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Builds a module class with this forward; members that are tensors but no parameters become buffers."""

    class Made(nn.Module):
        pass

    Made.forward = forward

    def build() -> nn.Module:
        made = Made()
        for name, make in members.items():
            member = make()
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                made.register_buffer(name, member)
            else:
                setattr(made, name, member)
        return made

    return build


def linear(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(4, 4, **options)


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def assert_trains(build: Callable[[], nn.Module], *inputs: torch.Tensor, optimizer: Any = None, **options: Any) -> None:
    """Two steps, compared: outputs, gradients with their strides, input gradients, updates, buffers."""

    def drive(call, model):
        found = []
        trained = [p for p in model.parameters() if p.requires_grad]
        updates = (optimizer or (lambda p: torch.optim.AdamW(p, 0.05)))(trained) if trained else None
        for _ in range(2):
            model.zero_grad()
            for tensor in inputs:
                tensor.grad = None
            results = call(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            terms = [t.abs().double().square().sum() for t in results if t.requires_grad]
            if terms:
                torch.stack(terms).sum().float().backward()
            found.append([t.detach().clone() for t in results])
            found.append([None if t.grad is None else t.grad.clone() for t in inputs])
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            if any(p.grad is not None for p in trained):
                updates.step()
        return found

    assert_parity_of(seeded(build), drive, **options)


# -- dtypes and shapes ---------------------------------------------------------------------------------------


@paths
def test_many_dtypes_in_one_model(options) -> None:
    def forward(self, x):
        x = self.low(self.norm(x).bfloat16()).float()
        pairs = torch.view_as_complex(self.wide(x.double()).reshape(-1, 2, 2).contiguous()) * self.phase
        x = torch.view_as_real(pairs).reshape(-1, 4)
        return torch.where(self.mask, x, x * 2) + self.index.sum(), pairs, self.index + 1, self.mask.clone()

    build = module(
        forward,
        norm=lambda: nn.LayerNorm(4),
        low=linear(dtype=torch.bfloat16),
        wide=linear(dtype=torch.float64),
        phase=lambda: P(torch.randn(2, dtype=torch.complex128)),
        mask=lambda: torch.tensor([True, False, True, False]),
        index=lambda: torch.arange(3),
    )
    assert_trains(build, rows(6), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_one_other_dtype(dtype: torch.dtype) -> None:
    build = module(lambda self, x: self.b(torch.tanh(self.a(x))), a=linear(dtype=dtype), b=linear(dtype=dtype))
    assert_trains(build, rows().to(dtype).requires_grad_())


@moved
def test_tensors_without_dimensions(options) -> None:
    def forward(self, x, t):
        return self.factor * t + (self.layer(x) * self.factor).sum() + self.shift, t

    build = module(forward, factor=lambda: P(torch.tensor(2.0)), layer=linear(), shift=lambda: torch.tensor(1.0))
    assert_trains(build, rows(), torch.tensor(3.0, requires_grad=True), **options)


@moved
@pytest.mark.parametrize("count", [0, 3])
def test_tensors_without_elements(options, count: int) -> None:
    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) + self.empty.sum(), self.empty * 2

    build = module(forward, a=linear(), b=linear(), empty=lambda: P(torch.empty(0, 3)))
    assert_trains(build, rows(count).requires_grad_(), **options)


def test_outputs_of_other_dtypes() -> None:
    def forward(self, x):
        x = self.layer(x)
        return x.double(), x.half(), x.to(torch.complex64)

    assert_trains(module(forward, layer=linear()), rows().requires_grad_())


# -- layouts -------------------------------------------------------------------------------------------------


@paths
def test_strides_of_parameters(options) -> None:
    def forward(self, x):
        image = x[:, None, :2, None].expand(-1, 3, 2, 2)
        return x @ self.transposed + self.sliced * self.expanded + F.conv2d(image, self.last).sum()

    build = module(
        forward,
        transposed=lambda: P(torch.randn(4, 4).t()),
        sliced=lambda: P(torch.randn(8)[::2]),
        expanded=lambda: torch.randn(1).expand(4),
        last=lambda: P(torch.randn(3, 3, 2, 2).to(memory_format=torch.channels_last)),
    )
    assert_trains(build, rows(), **options)


@moved
@pytest.mark.parametrize("layout", ["channels_last", "expanded", "sliced"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_strides_of_inputs(options, layout: str, requires_grad: bool) -> None:
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = {
        "channels_last": lambda: images.to(memory_format=torch.channels_last),
        "expanded": lambda: images[:, :, :1, :1].expand(2, 3, 4, 4),
        "sliced": lambda: images[::2, :, ::2],
    }[layout]()
    build = module(
        lambda self, x: self.layers(x).square().mean((2, 3)),
        layers=lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)),
    )
    assert_trains(build, images.requires_grad_(requires_grad), **options)


@pytest.mark.parametrize("transfer", ["bind", "copy"])
def test_gradients_take_the_layout_of_their_parameters(transfer: str) -> None:
    """Sums over a gradient, as for its norm, round accordingly; `assert_parity_of` compares strides."""

    def drive(call, model):
        for _ in range(2):
            call(rows(4)).square().sum().backward()

    def forward(self, x):
        return x * self.plain.permute(1, 0) + F.linear(x, self.transposed.t().contiguous())

    build = module(forward, plain=lambda: P(torch.randn(4, 4)), transposed=lambda: P(torch.randn(4, 4).t()))
    assert_parity_of(seeded(build), drive, transfer=transfer)


# -- sparse gradients ----------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2, 2], [0, 1, 9]])


@moved
def test_sparse_embedding(options) -> None:
    build = module(lambda self, i: self.embed(i), embed=lambda: nn.Embedding(10, 4, sparse=True))
    assert_trains(build, IDS, optimizer=lambda p: torch.optim.SparseAdam(p, 0.1), **options)


@paths
def test_sparse_gradients_accumulate_and_stay_sparse(options) -> None:
    def drive(call, model):
        for ids in (IDS, IDS.flip(0), IDS[:1]):
            call(ids).square().sum().backward()

    build = module(
        lambda self, i: self.top(self.embed(i)), embed=lambda: nn.Embedding(10, 4, sparse=True), top=linear()
    )
    _, _ = assert_parity_of(seeded(build), drive, **options)


class Tied(nn.Module):
    """A weight with sparse gradients from an embedding, dense ones from a product, at either end of the model."""

    def __init__(self, start: str, end: str):
        super().__init__()
        self.start, self.end = start, end
        self.embed = nn.Embedding(10, 4, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids):
        x = self.use(self.start, ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.use(self.end, ids)

    def use(self, how, ids):
        if how == "sparse":
            return self.embed(ids)
        return F.one_hot(ids, 10).float() @ self.embed.weight


@moved
@pytest.mark.parametrize(("start", "end"), [("sparse", "sparse"), ("sparse", "dense"), ("dense", "sparse")])
def test_sparse_and_tied(options, start: str, end: str) -> None:
    def drive(call, model):
        for ids in (IDS, IDS.flip(0)):
            call(ids).square().sum().backward()

    assert_parity_of(seeded(lambda: Tied(start, end)), drive, **options)


# -- sharing -------------------------------------------------------------------------------------------------


@moved
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_flattened_into_one_storage(options, kind: Any) -> None:
    build = module(lambda self, x: self.top(self.cell(x[None])[0]), cell=lambda: kind(4, 4, 2), top=linear())
    assert_trains(build, rows(), **options)


@moved
def test_parameters_side_by_side_in_one_storage(options) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(8)
            self.left, self.right = P(both[:4]), P(both[4:])

        def forward(self, x):
            return x * self.left + self.right

    assert_trains(Halves, rows(), **options)


def test_parameters_that_overlap_are_refused() -> None:
    both = torch.randn(8)
    model = module(
        lambda self, x: x * self.left[:4] + self.right, left=lambda: P(both[:5]), right=lambda: P(both[4:])
    )()
    with pytest.raises(ExecuteError, match="share memory, but not as one tied tensor"):
        megatrain.compile(model, device="cpu")(rows())


@paths
def test_buffers_of_two_modules(options) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
            self.layers[2][1].running_mean = self.layers[0][1].running_mean

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert_trains(Shared, rows(), **options)


@moved
def test_a_parameter_that_is_a_buffer_too(options) -> None:
    def build():
        made: Any = module(lambda self, x: self.layer(x) * self.extra, layer=linear())()
        made.register_buffer("extra", made.layer.bias)
        return made

    assert_trains(build, rows(), **options)


def test_a_buffer_that_requires_grad() -> None:
    def drive(call, model):
        call(rows()).square().sum().backward()
        return model.extra.grad

    build = module(
        lambda self, x: self.layer(x) * self.extra, layer=linear(), extra=lambda: torch.ones(4, requires_grad=True)
    )
    assert_parity_of(seeded(build), drive)


@paths
def test_parameter_lists_and_dicts(options) -> None:
    def forward(self, x):
        for factor in self.factors:
            x = x * factor
        for name in self.shifts:
            x = x + self.shifts[name]
        for layer in self.layers.values():
            x = layer(x)
        return x

    build = module(
        forward,
        factors=lambda: nn.ParameterList([torch.randn(4) for _ in range(3)]),
        shifts=lambda: nn.ParameterDict({"a": P(torch.randn(4)), "b": P(torch.randn(()))}),
        layers=lambda: nn.ModuleDict({"q": nn.Linear(4, 4), "r": nn.Linear(4, 4)}),
    )
    assert_trains(build, rows(), **options)


@moved
def test_a_module_under_two_names(options) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.alias = self.first
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return self.alias(x)

    assert_trains(Twice, rows(), **options)


# -- models at the edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_model_without_state(requires_grad: bool) -> None:
    assert_trains(module(lambda self, x: F.dropout(torch.tanh(x)) * 2), rows().requires_grad_(requires_grad))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_frozen_model(requires_grad: bool) -> None:
    build = module(lambda self, x: self.b(torch.tanh(self.a(x))), a=linear(), b=linear())
    assert_trains(lambda: build().requires_grad_(False), rows().requires_grad_(requires_grad))


def test_a_model_that_returns_nothing() -> None:
    def forward(self, x):
        self.calls += 1
        self.layer(x)

    def drive(call, model):
        assert call(rows()) is None
        assert call(rows()) is None

    assert_parity_of(seeded(module(forward, layer=linear(), calls=lambda: torch.zeros(()))), drive)


def test_a_model_that_returns_parameters_alone() -> None:
    def drive(call, model):
        weight, row, shifted = call(rows())
        (weight.square().sum() + row.sum()).backward()
        return weight, row, shifted

    forward = lambda self, x: (self.layer.weight, self.layer.weight[0], x + 1)  # noqa: E731
    assert_parity_of(seeded(module(forward, layer=linear())), drive)


def test_deep_nesting() -> None:
    inner: nn.Module = nn.Linear(4, 4)
    for _ in range(100):
        inner = nn.Sequential(inner)
    assert_trains(lambda: nn.Sequential(inner, nn.Linear(4, 4)), rows())


# -- memory and gradients inside the forward -----------------------------------------------------------------


@moved
@pytest.mark.parametrize("requires_grad", [False, True])
def test_writes_through_views_across_blocks(options, requires_grad: bool) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            x = self.layers[0](x)
            left, right = x[:, :2], x[:, 2:]
            left.mul_(2)
            y = self.layers[1](x.clone())
            right += 1
            z = self.layers[2](x * 1 + y)
            made = torch.zeros(5, 4)
            middle = made[1:3]
            middle += z[:2]
            last = self.layers[3](made.clone())
            middle.sub_(1)
            return x, left, right.sum(), z, made, last

    assert_trains(Views, rows().requires_grad_(requires_grad), **options)


class Energy(nn.Module):
    """Returns a sum and its gradient, as models of molecules do."""

    def __init__(self, by: str):
        super().__init__()
        self.by = by
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.top = nn.Linear(4, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x if self.by == "input" else x.detach().clone().requires_grad_()
            y = x
            for layer in self.layers:
                y = torch.tanh(layer(y))
            energy = self.top(y).sum()
            source: Any = self.layers[1].weight if self.by == "weight" else x
            (slope,) = torch.autograd.grad(energy, source, create_graph=True)
        return energy, -slope


@moved
@pytest.mark.parametrize("by", ["copy", "input", "weight"])
def test_gradients_inside_the_forward(options, by: str) -> None:
    def drive(call, model):
        x = rows().requires_grad_(by == "input")
        with torch.no_grad():
            before = [t.detach() for t in call(x)]
        energy, slope = call(x)
        (energy.square() + slope.square().sum()).backward()
        return before, energy, slope, x.grad

    assert_parity_of(seeded(lambda: Energy(by)), drive, **options)


@paths
def test_views_of_weights_made_without_grad(options) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            with torch.no_grad():
                weight = self.layers[0].weight[:]
            return self.layers[2](self.layers[1](x @ weight) + weight.sum())

    assert_trains(Ends, rows(), **options)
