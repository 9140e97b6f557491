"""The same training in one process, in several, and in eager PyTorch: what each rank runs, and what is compared."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import megatrain
from megatrain.runtime.streams.stream_set import Chaos
from tests.comparing import snapshot
from tests.strategies import WIDTH
from tests.training.adapters import adapted_llama
from tests.training.parity import (
    MODES,
    TASKS,
    Task,
    adamw,
    generator_of,
    ids,
    labelled,
    listed,
    sgd,
    square,
    stack_batch,
)


class Tied(nn.Module):
    """Its first and its last block have one weight, whose gradient is a sum over both; a bias is used by some batches.

    Half of the parameters are frozen if `is_adapted`.
    """

    def __init__(self, *, is_adapted: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(not is_adapted)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + self.drop(block(x))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Branching(nn.Module):
    """Python code reads a value in the middle: a batch of the other sign runs another capture, found out in a step."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).abs() * x.mean(1, keepdim=True)
        x = x * 2 if x.mean() > 0 else x.cos()
        for layer in self.rest:
            x = layer(x).tanh()
        return x


class Deciding(nn.Module):
    """Python code reads a value in the last block, so micro-batches of one step may take either way there."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = x.mean(1, keepdim=True), self.first(x)
        for layer in self.rest:
            x = self.drop(layer(x).tanh())
        x = (self.head(x).abs() + 0.1) * given
        return x * 2 if x.mean() > 0 else x.cos()


def branching_batch(step: int, size: int) -> Any:
    return stack_batch(step, size).abs() * (1 if step % 3 else -1)


def wide_batch(step: int, size: int) -> Any:
    return torch.randn(2 + size, WIDTH, generator=generator_of(step))


def branching() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return Branching()


def deciding() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return Deciding()


def tied_batch(step: int, size: int) -> Any:
    return {"ids": ids(step, size, vocab=11), "targets": ids(step + 50, size, vocab=11)}


def seeded(**options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return Tied(**options)


def own(result: Any, batch: Any) -> torch.Tensor:
    return result["loss"]


OPTIMIZERS = {
    "adamw": adamw,
    "sgd": sgd,
    "8 bit": lambda model: megatrain.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2),
}
OURS: dict[str, Task] = {
    **TASKS,
    "branching": Task(branching, branching_batch, square),
    "deciding": Task(deciding, branching_batch, square),
    "tied": Task(seeded, tied_batch, own),
    "adapted": Task(lambda: seeded(is_adapted=True), tied_batch, own),
    "lora": Task(lambda: adapted_llama(("q_proj", "v_proj"), rank=4, scale=2.0, dropout=0.0), labelled),
}


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        task: Its model and batches.
        mode: When updates run.
        deal: How many micro-batches each rank has in each step.
        optimizer: Its name.
        compile: Options of `compile`.
        options: More options of the step.
        is_weighted: Micro-batches count as many rows as they have.
        draws: Whether the model's dropouts draw.
        chaos: Seed of delays of all streams, others on each rank; None for none.
        looks: Whether rank 1 looks at its parameters after each step, which completes its updates.
        edits: What the user's code does between steps, on each rank; see `edited`.
        order: The order in which the streams of a simulated device work, on which the ranks train; empty for the CPU.
        hooks: Whether hooks on parameters write into the gradients that they get, or return others.
    """

    task: str
    mode: str
    deal: Sequence[Sequence[int]]
    optimizer: str = "adamw"
    compile: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_weighted: bool = False
    draws: bool = False
    looks: bool = False
    chaos: int | None = None
    edits: str = ""
    order: str = ""
    hooks: bool = False

    def device(self, rank: int | None) -> str:
        """Where a rank computes; the simulated device of a process has two numbers."""
        return f"sim:{(rank or 0) % 2}" if self.order else "cpu"

    def batches(self, step: int) -> list[list[Any]]:
        """The micro-batches of a step, by rank; sizes differ."""
        task, number = OURS[self.task], 0
        found: list[list[Any]] = []
        for count in self.deal[step]:
            found.append([task.batch(100 * step + number + i, 1 + (number + i) % 2) for i in range(count)])
            number += count
        return found


def rows(batch: Any) -> int:
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)


def begin(case: Case, group: Any = None, **options: Any) -> tuple[Any, Any, megatrain.TrainStep]:
    task = OURS[case.task]
    chaos = None
    if group is not None and case.chaos is not None:
        chaos = Chaos(seed=case.chaos + dist.get_rank(), max_delay_s=0.004)
    settings: dict[str, Any] = {"chaos": chaos, **case.compile}
    device = case.device(None if group is None else dist.get_rank())
    compiled = megatrain.compile(task.build(), device=device, process_group=group, **settings)
    for module in compiled.megatrain.model.modules():
        if isinstance(module, nn.Dropout) and not case.draws:
            module.p = 0.0
    optimizer = OPTIMIZERS[case.optimizer](compiled.megatrain.model)
    for number, parameter in enumerate(compiled.megatrain.model.parameters()):
        if case.hooks and parameter.requires_grad and number % 3 < 2:
            parameter.register_hook(_scales(1.5 + number, in_place=number % 3 == 0))
    weight = {"weight": rows} if case.is_weighted else {}
    settings = {**MODES[case.mode], **case.options, **weight, **options}
    return compiled, optimizer, megatrain.TrainStep(compiled, optimizer, loss=task.loss, **settings)


def _scales(factor: float, *, in_place: bool) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Done twice it isn't what it is once: so each rank's hook must get the total itself."""

    def scale(gradient: torch.Tensor) -> torch.Tensor | None:
        if not in_place:
            return gradient * factor
        gradient.mul_(factor)
        return None

    return scale


def state_of(compiled: Any, optimizer: Any, step: megatrain.TrainStep) -> dict[str, Any]:
    """Everything that training has changed, and the masters' lower halves."""
    step.flush()
    found = snapshot(compiled.megatrain.model, *listed(optimizer))
    pieces = {name: [p.flatten() for p in source.pieces()] for name, source in compiled.masters.sources().items()}
    return {**found, "masters": pieces, "progress": asdict(step.progress)}


def take(case: Case, rank: int | None, step: megatrain.TrainStep, numbers: Sequence[int]) -> dict[str, Any]:
    """Takes some steps of a case, of one rank or of all ranks' micro-batches together."""
    losses: list[torch.Tensor] = []
    norms: list[Any] = []
    for number in numbers:
        by_rank = [[moved(batch, case.device(rank)) for batch in each] for each in case.batches(number)]
        losses.append(step([b for each in by_rank for b in each] if rank is None else by_rank[rank]))
        norms.append(step.progress.grad_norm)
        if case.looks and rank == 1:
            step.flush()
        if case.edits:
            edited(case.edits, step)
    return {"losses": [loss.cpu() for loss in losses], "norms": norms}


def moved(batch: Any, device: str) -> Any:
    """A batch on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def edited(how: str, step: megatrain.TrainStep) -> None:
    """Writes parameters or moments as a user's code may; twice the same is not the same as once."""
    model, (optimizer,) = step._compiled.model, step._optimizers
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None or ("moments" in how and "exp_avg" not in optimizer.state.get(parameter, {})):
        return
    with torch.no_grad():
        if how == "in place":
            parameter.mul_(0.5)
        elif how == "unseen":
            parameter.data.mul_(0.5)
        elif how == "new memory":
            parameter.data = parameter.data * 0.5
        elif how == "state dict":
            model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
        elif how == "moments":
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
        elif how == "new moments":
            optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"] * 0.5
        elif how == "no moments":
            optimizer.state.pop(parameter)


EDITS = "in place", "unseen", "new memory", "state dict", "moments", "new moments", "no moments"


def train(case: Case, group: Any, rank: int | None) -> dict[str, Any]:
    """Takes the steps of a case. Each rank draws from its own generators."""
    torch.manual_seed(5)
    compiled, optimizer, step = begin(case, group)
    torch.manual_seed(6 + (rank or 0))
    taken = take(case, rank, step, range(len(case.deal)))
    found = {**taken, **state_of(compiled, optimizer, step)}
    if rank and not case.draws:
        assert torch.equal(found.pop("generator"), torch.Generator().manual_seed(6 + rank).get_state())
    return found


def eager(case: Case) -> dict[str, Any]:
    """What ranks compute, in eager PyTorch: each adds up its own micro-batches, then all are added in their order."""
    torch.manual_seed(5)
    task, options = OURS[case.task], {**MODES[case.mode], **case.options}
    model = task.build()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not case.draws:
            module.p = 0.0
    optimizer = OPTIMIZERS[case.optimizer](model)
    generators = [torch.Generator().manual_seed(6 + rank).get_state() for rank in range(len(case.deal[0]))]
    losses, norms = list[torch.Tensor](), list[Any]()
    for number in range(len(case.deal)):
        batches = case.batches(number)
        counts = [[float(rows(b)) if case.is_weighted else 1.0 for b in each] for each in batches]
        total = sum(map(sum, counts)) if options.get("reduce") != "sum" else 1.0
        sums: dict[Any, torch.Tensor] = {}
        terms: list[torch.Tensor] = []
        for rank, (each, their) in enumerate(zip(batches, counts, strict=True)):
            model.zero_grad()
            torch.set_rng_state(generators[rank])
            made = list[torch.Tensor]()
            for batch, count in zip(each, their, strict=True):
                result = model(**batch) if isinstance(batch, dict) else model(batch)
                made.append((task.loss or own)(result, batch) * (count / total))
            generators[rank] = torch.get_rng_state()
            for loss in made:
                loss.backward()
                terms.append(loss.detach())
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = p.grad.clone() if p not in sums else sums[p] + p.grad
        for p in model.parameters():
            p.grad = sums.get(p)
        clip = options.get("max_grad_norm")
        norms.append(None if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        losses.append(functools.reduce(torch.add, terms))
    model.zero_grad()
    found = snapshot(model, *listed(optimizer))
    del found["generator"]
    return {**found, "losses": losses, "norms": norms}


def train_drawn(rank: int | None, case: Case, model: nn.Module) -> Any:
    """What a rank runs, or one process, of a case whose task is a model of its own."""
    OURS[case.task] = Task(lambda: copy.deepcopy(model), wide_batch, square)
    return train(case, None, None) if rank is None else train_here(rank, case)


def eager_drawn(case: Case, model: nn.Module) -> dict[str, Any]:
    """The same in eager PyTorch."""
    OURS[case.task] = Task(lambda: copy.deepcopy(model), wide_batch, square)
    return eager(case)


def train_here(rank: int, case: Case) -> Any:
    """What a rank runs; ranks beyond the deal have nothing to do."""
    size = len(case.deal[0])
    group: Any = dist.new_group(list(range(size)))
    return train(case, group, rank) if rank < size else None


def resume_here(rank: int, case: Case, folder: str, start: int, saves: bool) -> Any:
    """Begins at a step, from a checkpoint unless it is the first; saves after the steps, or returns everything."""
    size = len(case.deal[0])
    group: Any = dist.new_group(list(range(size)))
    return resume(case, group, rank, folder, start, saves=saves) if rank < size else None


def resume(case: Case, group: Any, rank: int | None, folder: str, start: int, *, saves: bool) -> Any:
    compiled, optimizer, step = begin(case, group)
    torch.manual_seed(6 + (rank or 0))
    if start:
        task = OURS[case.task]
        options = {**MODES[case.mode], **case.options}
        del step
        step = megatrain.TrainStep.load(folder, compiled, optimizer, loss=task.loss, **options)
    taken = take(case, rank, step, range(start, len(case.deal)))
    if saves:
        step.save(folder)
        return os.path.exists(folder)
    return {**taken, **state_of(compiled, optimizer, step)}
