"""Training steps and the plain eager loop side by side: tasks to train, and comparisons to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import assert_same, snapshot
from tests.models import MODELS, Stack
from tests.training.adapters import adapted_llama
from tests.training.hazards import TRAP, bridged, hazardous

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
LossOf = Callable[[Any, Any], torch.Tensor] | None


@dataclass(frozen=True)
class Task:
    """Something to train.

    Args:
        build: Makes the model; equal ones each time.
        batch: Makes the batch of a step; the second number is its size.
        loss: As in `TrainStep`.
    """

    build: Callable[[], Any]
    batch: Callable[[int, int], Any]
    loss: LossOf = None


def generator_of(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def ids(step: int, size: int, length: int = 7, vocab: int = 32) -> torch.Tensor:
    return torch.randint(3, vocab, (size, length), generator=generator_of(step))


def gpt_batch(step: int, size: int) -> Any:
    return {"ids": ids(step, size), "targets": ids(step + 50, size)}


def labelled(step: int, size: int) -> Any:
    return {"input_ids": ids(step, size), "labels": ids(step, size)}


def padded_in_some(step: int) -> list[Any]:
    """A mask where there is padding makes other values, and other templates, than none."""
    batches = [labelled(step + i, 2) for i in range(3)]
    for number, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if (number + step) % 2:
            batch["attention_mask"][0, -2:] = 0
    return batches


def image_batch(step: int, size: int) -> Any:
    return (torch.randn(size, 3, 8, 8, generator=generator_of(step)),)


def image_loss(result: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(result, torch.arange(result.shape[0], device=result.device) % 5)


def stack_batch(step: int, size: int) -> Any:
    return torch.randn(size, 3, generator=generator_of(step))


def square(result: Any, batch: Any) -> torch.Tensor:
    return result.square().mean()


def trapped(result: Any, batch: Any) -> torch.Tensor:
    TRAP.at("loss")
    return result.square().mean()


def second(result: Any, batch: Any) -> torch.Tensor:
    return result[1]


def lora() -> nn.Module:
    return adapted_llama(("q_proj", "v_proj", "down_proj"), rank=4, scale=2.0, dropout=0.1)


class Emptied(nn.Module):
    """Weights without an element: alone in the first block, in several blocks, and a buffer that is written."""

    def __init__(self, *, has_some: bool) -> None:
        super().__init__()
        if has_some:
            self.rows, self.shift = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(0))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.seen: Any
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        has_some = hasattr(self, "rows")
        x = torch.cat([x, self.rows.tanh()]) + self.shift.sum() if has_some else x
        for layer in self.layers:
            x = layer(torch.cat([x, self.rows]) if has_some else x).tanh()
        return x


def emptied(*, has_some: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Emptied(has_some=has_some)


TASKS: dict[str, Task] = {
    "emptied": Task(emptied, stack_batch, square),
    "gpt": Task(lambda: MODELS["gpt_loss"]()[0], gpt_batch, second),
    "llama": Task(lambda: MODELS["llama_labels"]()[0], labelled),
    "t5": Task(lambda: MODELS["t5_labels"]()[0], labelled),
    "cnn": Task(lambda: MODELS["cnn"]()[0], image_batch, image_loss),
    "lora": Task(lora, labelled),
    "stack": Task(lambda: seeded_stack(4), stack_batch, square),
    "hazardous": Task(hazardous, stack_batch, trapped),
    "bridged": Task(bridged, stack_batch, trapped),
}


def seeded_stack(depth: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return Stack(depth)


@functools.cache
def _compiled(name: str, options: tuple[tuple[str, Any], ...]) -> megatrain.CompiledModule:
    return megatrain.compile(TASKS[name].build(), device="cpu", **dict(options))


def fresh(name: str, chaos: Chaos | None = None, **options: Any) -> megatrain.CompiledModule:
    """A task's model, compiled. Its captures, which take most of the time, are shared by all who ask for these options.

    Parameters, buffers and `requires_grad` are those of a new model; `chaos` is its own.
    """
    compiled = _compiled(name, tuple(sorted(({"transfer": "copy"} | options).items())))
    begun = TASKS[name].build()
    with torch.no_grad():
        for own, first in zip(compiled.state_dict().values(), begun.state_dict().values(), strict=True):
            own.copy_(first)
    for own, first in zip(compiled.megatrain.model.parameters(), begun.parameters(), strict=True):
        own.requires_grad_(first.requires_grad)
    compiled.zero_grad()
    compiled.train()
    compiled.megatrain.engine.set_chaos(chaos)
    compiled.megatrain.engine.meter.reset_peak()
    return compiled


# -- the plain loop ------------------------------------------------------------------------------------------


def listed(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers


def call(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def own_loss(result: Any, loss: LossOf, batch: Any) -> torch.Tensor:
    return result.loss if loss is None else loss(result, batch)


def loop_gradients(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: LossOf = None,
    counts: Sequence[float] | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    """Fills `.grad` by a loop over micro-batches and returns the loss."""
    counts = [1.0] * len(batches) if counts is None else counts
    losses = []
    for number, batch in enumerate(batches):
        share = counts[number] / sum(counts)
        found = own_loss(call(model, batch), loss, batch)
        found = found if share == 1.0 else found * share
        found.backward()
        losses.append(found.detach().reshape(()))
    return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])


def loop_step(
    model: nn.Module,
    optimizers: Optimizers,
    batches: Any,
    *,
    loss: LossOf = None,
    counts: Sequence[float] | None = None,
    max_norm: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One step of the loop that a `TrainStep` stands for; returns the loss and the norm."""
    several = listed(optimizers)
    model.zero_grad()
    for optimizer in several:
        optimizer.zero_grad()
    batches = batches if isinstance(batches, list) else [batches]
    found = loop_gradients(model, batches, loss=loss, counts=counts)
    norm = None if max_norm is None else nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for optimizer in several:
        optimizer.step()
    model.zero_grad()
    return found, norm


# -- both sides ----------------------------------------------------------------------------------------------


@dataclass
class SideBySide:
    """A model trained eagerly, and a copy of it trained by a `TrainStep`; `streamed` is the copy itself."""

    eager: Any
    streamed: Any
    compiled: megatrain.CompiledModule
    eager_optimizers: Sequence[torch.optim.Optimizer]
    optimizers: Sequence[torch.optim.Optimizer]
    step: megatrain.TrainStep
    loss: LossOf
    max_norm: float | None

    @staticmethod
    def of(
        name: str,
        optimizer: Callable[[nn.Module], Optimizers],
        *,
        compile_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SideBySide:
        """Compiles with `compile_options`, all else is for the TrainStep."""
        task = TASKS[name]
        compiled = fresh(name, **dict(compile_options or {}))
        eager, streamed = task.build(), compiled.megatrain.model
        own = optimizer(streamed)
        step = megatrain.TrainStep(compiled, own, loss=task.loss, **options)
        clip = options.get("max_grad_norm")
        return SideBySide(eager, streamed, compiled, listed(optimizer(eager)), listed(own), step, task.loss, clip)

    @property
    def eager_optimizer(self) -> torch.optim.Optimizer:
        """The first of the optimizers, as a rule the only one."""
        return self.eager_optimizers[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Likewise of the copy."""
        return self.optimizers[0]

    def expect(self, batches: Any, counts: Sequence[float] | None = None) -> torch.Tensor:
        """Takes a step of the eager copy."""
        return loop_step(
            self.eager, self.eager_optimizers, batches, loss=self.loss, counts=counts, max_norm=self.max_norm
        )[0]

    def take(self, batches: Any, *, seed: int, counts: Sequence[float] | None = None) -> None:
        """Takes the same step on both sides and compares losses and generators; updates may stay due."""
        torch.manual_seed(seed)
        expected, drawn = self.expect(batches, counts), torch.get_rng_state()
        torch.manual_seed(seed)
        assert_same(expected, self.step(batches), f"loss of step {seed}")
        assert_same(drawn, torch.get_rng_state(), f"generator after step {seed}")

    def assert_same(self, what: object = "") -> None:
        """Compares everything after the latest step."""
        self.step.flush()
        expected, found = snapshot(self.eager, *self.eager_optimizers), snapshot(self.streamed, *self.optimizers)
        assert_same(expected, found, what)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, the rest doesn't."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-2},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2)


MODES: dict[str, dict[str, Any]] = {
    "overlap": {"spread": False},
    "spread": {"spread": True},
    "deferred": {"max_grad_norm": 0.5},
    "serial": {"overlap": False},
    "serial_clipped": {"overlap": False, "max_grad_norm": 0.5},
}
TELLING_MODES = ("spread", "deferred")
"""Updates while others compute, and updates that wait for the next step: what serial steps break, these break too."""
