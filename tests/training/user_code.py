"""Parts of users' own code, drawn by name: layers, losses, optimizers, and edits of what is trained.

A part is plain PyTorch. It's applied to the eager side and the compiled one alike, and says in a log what it sees.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.strategies import WIDTH, Branch, Counter, Mapped, NoGrad, Odd, Skip, WritesInput

VARIABLE = "LAW_OF_USER_CODE"


class Log(list[Any]):
    """What user code saw, in order; copies of a model write into the same log."""

    def __deepcopy__(self, memo: object) -> Log:
        return self

    def say(self, name: str, *values: Any) -> None:
        self.append((name, *(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)))


@dataclass
class Shared:
    """Python state that the parts of one run read and write; `log` is what they saw."""

    log: Log = field(default_factory=Log)
    factor: float = 1.0
    table: list[float] = field(default_factory=lambda: [1.0])
    queue: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=1))
    entries: dict[str, float] = field(default_factory=lambda: {"factor": 1.0})
    numbers: Any = field(default_factory=itertools.count)
    held: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Shared:
        return self


@dataclass
class Side:
    """One of the two that are trained alike.

    Attributes:
        call: The model, or the compiled one.
        parameters: Those that the optimizer has, by the model's order.
        flush: Runs the updates that are due.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    shared: Shared
    call: Callable[..., Any]
    flush: Callable[[], object] = lambda: None

    def parameter(self, number: int) -> nn.Parameter:
        found = [p for p in self.model.parameters() if p.requires_grad and p.numel()]
        return found[number % len(found)]

    def buffer(self, number: int) -> torch.Tensor | None:
        found = [b for b in self.model.buffers() if b.is_floating_point()]
        return found[number % len(found)] if found else None

    def say(self, name: str, *values: Any) -> None:
        self.shared.log.say(name, *values)


@dataclass(frozen=True)
class Part:
    """How a part is made or done, and where.

    Args:
        do: Of layers `do(shared, number)`, of losses `do(side, number)`, of optimizers `do(parameters, number)`, and of
            edits `do(side, number)`.
        words: A refusal or a warning names the part if it has one of these words.
        one_batch: Several micro-batches differ, as documented: eager calls a hook once for each.
        narrow: Also in bf16 over fp32 masters, where the reference's optimizer has other parameters than the model.
        at: When an edit is possible: "start" is before `compile`, "steps" between steps, "forward" between a forward
            and its backward in a loop of one's own.
    """

    do: Callable[..., Any]
    words: tuple[str, ...] = ()
    one_batch: bool = False
    narrow: bool = False
    at: tuple[str, ...] = ("start", "steps")


# -- layers ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A linear layer whose result user code goes on with."""

    def __init__(self, then: Callable[[Any, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.then, self.calls, self.factor, self.last = then, 0, 1.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, self.linear(x))


class Scaled(torch.autograd.Function):
    """Multiplies by what a function returns, in the forward and by another number in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, read: Callable[[], float]) -> torch.Tensor:
        ctx.read = read
        return x * read()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * (ctx.read() + 0.5), None


TABLE = [1.0]
"""What a custom operator reads; each run begins with 1."""


class Tabled(torch.autograd.Function):
    """Reads a global list itself, so that all layers of it are of one template, which may be recorded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * TABLE[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * (TABLE[-1] + 0.5)


@torch.library.custom_op("user_code::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * TABLE[-1]


@scaled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, gradient: gradient * TABLE[-1])


def layer(then: Callable[..., torch.Tensor], *words: str, **flags: Any) -> Part:
    """A `Layer` that goes on with `then(shared, layer, x)`."""
    return Part(lambda shared, number: Layer(partial(then, shared)), (*words, "opaque", "draw"), **flags)


def function(read: Callable[[Shared], float]) -> Part:
    words = ("Function", "opaque", "iterator", "watch")
    return Part(
        lambda shared, number: Layer(lambda self, x: Scaled.apply(x, partial(read, shared))), words, narrow=True
    )


def _counts(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return x * (1 + 0.1 * self.count)


def _running_mean(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
    return x - self.mean


def _calls(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * (1 + 0.1 * self.calls)


def _lazy(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.last is None:
        self.last = x.detach().mean(0)
    return x - self.last


def _remembers(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    before, self.last = self.last, x.detach().mean(0)
    return x if before is None else x + 0.1 * before


def _restarts(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    dead, x = x[:, 0] < 0, x.clone()
    if dead.any():
        x[dead] = torch.randn(int(dead.sum()), WIDTH, device=x.device, dtype=x.dtype)
    return x


def _logs(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    shared.log.say("forward", float(x.detach().sum()))
    return x


def _hooks(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: shared.log.say("activation", gradient) or gradient * 0.5)
    return x.tanh()


def _checkpointed(shared: Shared, self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: torch.dropout(self.second(y).tanh(), 0.2, self.training), x, use_reentrant=False)


def _module_hook(shared: Shared, number: int) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_full_backward_hook(lambda module, grads, outer: shared.log.say("module", outer[0]))
    return module


def _partly_frozen(shared: Shared, number: int) -> nn.Module:
    """Two such layers have one template where one of them trains what the other doesn't."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    (first if number % 2 else second).requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), second)


def _counted(shared: Shared) -> float:
    shared.entries["calls"] = shared.entries.get("calls", 0) + 1
    return 1 + 0.1 * shared.entries["calls"]


def _plain(make: Callable[[], nn.Module], **flags: Any) -> Part:
    return Part(lambda shared, number: make(), **flags)


LAYERS: dict[str, Part] = {
    "linear": _plain(lambda: nn.Linear(WIDTH, WIDTH), narrow=True),
    "tanh": _plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), narrow=True),
    "dropout": _plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.2)), narrow=True),
    "layer norm": _plain(lambda: nn.LayerNorm(WIDTH), narrow=True),
    "batch norm": _plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
    "cumulative norm": _plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))),
    "frozen": _plain(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), narrow=True),
    "partly frozen": Part(_partly_frozen, narrow=True),
    "skip": _plain(lambda: Skip(nn.Linear(WIDTH, WIDTH)), narrow=True),
    "odd": _plain(Odd),
    "counter": _plain(Counter),
    "branch": _plain(lambda: Branch(nn.Linear(WIDTH, WIDTH))),
    "no grad": _plain(lambda: NoGrad(nn.Linear(WIDTH, WIDTH))),
    "writes input": _plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesInput())),
    "transform": _plain(Mapped),
    "weight norm": _plain(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral norm": _plain(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "module hook": Part(_module_hook, ("hook", "opaque")),
    "counts": layer(_counts),
    "running mean": layer(_running_mean),
    "attribute": layer(lambda shared, self, x: x * self.factor, narrow=True),
    "calls": layer(_calls, narrow=True),
    "lazy": layer(_lazy),
    "remembers": layer(_remembers),
    "object": layer(lambda shared, self, x: x * shared.factor, narrow=True),
    "draws": layer(lambda shared, self, x: x + 0.1 * torch.randn_like(x), narrow=True),
    "python draws": layer(lambda shared, self, x: x * random.random(), narrow=True),
    "restarts": layer(_restarts),
    "logs": layer(_logs, narrow=True),
    "activation hook": layer(_hooks, "hook"),
    "checkpoint": layer(_checkpointed, "backward that the model defines"),
    "operator": layer(lambda shared, self, x: scaled(x), "operator"),
    "of list": function(lambda shared: shared.table[-1]),
    "of queue": function(lambda shared: shared.queue[0]),
    "of dict": function(lambda shared: shared.entries["factor"]),
    "of object": function(lambda shared: shared.factor),
    "of table": layer(lambda shared, self, x: Tabled.apply(x), "Function"),
    "of counter": function(_counted),
    "of iterator": function(lambda shared: 1 + 0.1 * next(shared.numbers)),
    "of environment": function(lambda shared: float(os.environ.get(VARIABLE, "1"))),
}


# -- losses ----------------------------------------------------------------------------------------------------------


class Centre(nn.Module):
    """A loss with a counter, a buffer that is bound anew, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, result: torch.Tensor, batch: Any = None) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.centre = self.centre.to(result.device) * 0.9 + result.detach().float().mean(0) * 0.1
        return (result.float() - self.centre).square().mean() * self.calls


def square(result: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return result.float().square().mean()


def _buffers(side: Side) -> torch.Tensor:
    return sum((b.detach().float().sum().cpu() for b in side.model.buffers()), torch.zeros(()))


def _kept(side: Side) -> Centre:
    return side.shared.held.setdefault("loss", Centre())


def _behind_closure(side: Side, number: int) -> Any:
    criterion = _kept(side)
    return lambda result, batch: criterion(result)


def _behind_object(side: Side, number: int) -> Any:
    class Holder:
        def __init__(self) -> None:
            self.inner, self.calls = {"loss": _kept(side)}, 0

        def loss(self, result: torch.Tensor, batch: Any) -> torch.Tensor:
            self.calls += 1
            return self.inner["loss"](result) * self.calls

    return Holder().loss


def _counting(side: Side, number: int) -> Any:
    counts = [0]

    def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
        counts[0] += 1
        return square(result) * counts[0]

    return loss


def _last_result(side: Side, number: int) -> Any:
    state: dict[str, torch.Tensor] = {}

    def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
        before, state["last"] = state.get("last"), result.detach().float().mean(0)
        return square(result) if before is None else square(result.float() - before)

    return loss


def _logging(side: Side, number: int) -> Any:
    def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
        if type(result) is torch.Tensor:
            side.say("result", result)
            if result.requires_grad:
                result.register_hook(lambda gradient: side.say("gradient of the result", gradient))
        return square(result)

    return loss


def _of_buffers(side: Side, number: int) -> Any:
    return lambda result, batch: square(result) * (1 + _buffers(side).to(result.device))


def _writing(side: Side, number: int) -> Any:
    def loss(result: torch.Tensor, batch: Any) -> torch.Tensor:
        if type(result) is torch.Tensor:
            side.say("buffers", _buffers(side))
            for buffer in side.model.buffers():
                buffer.mul_(0.5) if buffer.is_floating_point() else buffer.add_(1)
        return square(result)

    return loss


def _of_weights(side: Side, number: int) -> Any:
    return lambda result, batch: square(result) + 0.1 * side.parameter(number).float().norm().to(result.device)


def _of_detached(side: Side, number: int) -> Any:
    return lambda result, batch: square(result) * side.parameter(number).detach().float().norm().to(result.device)


LOSSES: dict[str, Part] = {
    "square": Part(lambda side, number: square, narrow=True),
    "module": Part(lambda side, number: _kept(side), ("loss",), narrow=True),
    "behind closure": Part(_behind_closure, ("loss",), narrow=True),
    "behind partial": Part(lambda side, number: partial(_behind_closure(side, 0)), ("loss",), narrow=True),
    "behind object": Part(_behind_object, ("loss",), narrow=True),
    "counting": Part(_counting, ("loss",), narrow=True),
    "last result": Part(_last_result, ("loss",), narrow=True),
    "logging": Part(_logging, ("loss",)),
    "of buffers": Part(_of_buffers, ("loss", "buffer")),
    "writing": Part(_writing, ("loss", "buffer")),
    "of weights": Part(_of_weights, ("loss", "parameter")),
    "of detached": Part(_of_detached, ("loss", "parameter")),
    "annealed": Part(
        lambda side, number: lambda result, batch: square(result) * side.shared.factor, ("loss",), narrow=True
    ),
    "drawing": Part(
        lambda side, number: lambda r, batch: (r.float() * torch.rand_like(r)).square().mean(), ("loss", "draw")
    ),
}
