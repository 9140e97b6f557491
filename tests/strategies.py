"""Random models for hypothesis: nested containers, shared modules, in-place calls, branches by value, opaque parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH = 16  # a device updates tensors of so many elements, and of multiples


class Skip(nn.Module):
    """Adds its input to what its body makes of it."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Dead(nn.Module):
    """Computes a branch, random numbers included, and throws it away."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        self.body(F.dropout(x.clone(), 0.5, self.training))
        return x * 2


class Listed(nn.Module):
    """Runs a ModuleList; every member also sees the mean of all outputs before it."""

    def __init__(self, members: list[nn.Module]):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        seen = [x.mean(-1, keepdim=True)]
        for member in self.members:
            x = member(x + torch.cat(seen, -1).mean(-1, keepdim=True))
            seen.append(x.mean(-1, keepdim=True))
        return x


class Halves(nn.Module):
    """Cuts its input into two views and writes into one of them."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        x = x.clone()
        left, right = x[:, :2], x[:, 2:]
        left.mul_(0.5)
        return self.body(x) + torch.cat([right, left], -1)


class WritesInput(nn.Module):
    """Writes into the tensor that it is given."""

    def forward(self, x):
        x += 0.25
        return torch.relu_(x)


class Counter(nn.Module):
    """Two buffers: one written in place, one bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


class Frozen(nn.Linear):
    """A layer that isn't trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Odd(nn.Module):
    """Parameters without dimensions, without elements, transposed, of another dtype, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return (x @ self.turned * self.factor + self.empty.sum() + self.wide).float()


class WritesView(nn.Module):
    """Writes into parts of the tensor that it is given, one of them with its own result."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        x = x * 1
        first, rest = x[:1], x[1:]
        rest.add_(first)
        x[:, 1:3] *= 0.5
        y = self.body(x.clone())
        first.sub_(y[:1].detach())
        return x + y


class NoGrad(nn.Module):
    """Runs its body without a graph."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            gate = self.body(x.clone())
        return x * gate


class Branch(nn.Module):
    """Takes a branch by what it is given, and scales by a number that it reads of it."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        if x.sum() > 0:
            return self.body(x * 1) * min(2.0, x.abs().max().item())
        return x * 0.5


class Mapped(nn.Module):
    """Runs a transform, which no graph of calls can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.func.vmap(lambda row: torch.sin(row @ self.turn))(x)


class Start(nn.Module):
    """Gives the tree a tensor of its own, so that it may write into its input."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x):
        return self.body(self.first(x))


LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Dropout(0.3),
    lambda: nn.ReLU(inplace=True),
    nn.Tanh,
    WritesInput,
    Counter,
    Frozen,
    Odd,
    Mapped,
)
WRAPPERS: tuple[Callable[[nn.Module], nn.Module], ...] = (Skip, Dead, Halves, WritesView, NoGrad, Branch)


@st.composite
def module_trees(
    draw: st.DrawFn,
    leaves: Sequence[Callable[[], nn.Module]] = LEAVES,
    wrappers: Sequence[Callable[[nn.Module], nn.Module]] = WRAPPERS,
) -> nn.Module:
    """A module from `[3, WIDTH]` to the same; equal draws have equal weights, and modules may recur in it."""
    made: list[nn.Module] = []

    def tree(depth: int) -> nn.Module:
        kind = draw(st.sampled_from(("leaf", "leaf", "shared", "wrapped", "sequence", "list")))
        if kind == "shared" and made:
            return draw(st.sampled_from(made))
        if depth == 0 or kind in ("leaf", "shared"):
            module = draw(st.sampled_from(leaves))()
        elif kind == "wrapped":
            module = draw(st.sampled_from(wrappers))(tree(depth - 1))
        else:
            members = [tree(depth - 1) for _ in range(draw(st.integers(1, 3)))]
            module = nn.Sequential(*members) if kind == "sequence" else Listed(members)
        made.append(module)
        return module

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 3)))
        return Start(tree(3))


def block_limits() -> st.SearchStrategy[int | None]:
    """Values of `block_bytes`: the model's own modules, everything apart, and sizes between."""
    return st.none() | st.sampled_from((1, 40, 100, 400, 10**6))


def has_shared_modules(model: nn.Module) -> bool:
    """Tells whether a module with parameters is registered, or called, in two places."""
    owned = [
        m for _, m in model.named_modules(remove_duplicate=False) if any(True for _ in m.parameters(recurse=False))
    ]
    return len({id(m) for m in owned}) < len(owned)
