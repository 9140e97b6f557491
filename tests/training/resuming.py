"""Runs that stop at a checkpoint and go on: here, or by `python -m tests.training.resuming` in a fresh process."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

import megatrain
from megatrain.optim.masters.halves import read_
from tests.captures import lowered_once
from tests.models import Gpt

Options = Mapping[str, Any]
STEPS_BEFORE, STEPS_AFTER = 2, 2


# -- models --------------------------------------------------------------------------------------------------------


class Running(nn.Module):
    """A running mean that no state dict has; the output depends on it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("constant", torch.ones(4), persistent=False)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + torch.tanh(self.fc(x - self.mean) * self.constant)


class Noted(nn.Module):
    """Extra state: a plain value, or with `as_tensor` a tensor made for the occasion."""

    def __init__(self, *, as_tensor: bool):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.factor = 1.0
        self.as_tensor = as_tensor

    def get_extra_state(self):
        return torch.tensor([self.factor]) if self.as_tensor else {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = float(state.item() if self.as_tensor else state["factor"])

    def forward(self, x):
        return x + self.factor * torch.tanh(self.fc(x))


class Drawing(nn.Module):
    """Draws from Python's and NumPy's generators, so it runs as opaque code."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.fc(x) * random.random() * float(np.random.rand())


class Untied(Gpt):
    """Says nothing of its head in the state dict, as it is the embedding."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(_without_head)


def _without_head(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    del state[prefix + "head.weight"]


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *(make() for _ in range(3)), nn.Dropout(0.2), nn.Linear(4, 2))


def matrices() -> nn.Module:
    """A GPT of which only matrices are trained, one of them stored by columns."""
    model = Gpt()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    weight = model.blocks[0].mlp[0].weight
    weight.data = weight.data.t().contiguous().t()
    return model


# -- batches -------------------------------------------------------------------------------------------------------


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens(step: int, length: int = 8, vocab: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab, (2, length), generator=_generator(step))
    return {"ids": ids, "targets": ids.roll(-1, 1)}


def two_texts(step: int) -> list[Any]:
    return [tokens(2 * step), tokens(2 * step + 1)]


def points(step: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=_generator(step))


def scalar(result: Any, _: Any) -> torch.Tensor:
    if isinstance(result, tuple):
        return result[1]
    loss = getattr(result, "loss", None)
    return result.float().square().mean() if loss is None else loss


# -- optimizers and schedulers -------------------------------------------------------------------------------------


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def groups(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices = [p for p in trained(model) if p.ndim >= 2]
    vectors = [p for p in trained(model) if p.ndim < 2]
    first, second = {"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}
    return torch.optim.AdamW([first, second], lr=1e-2, weight_decay=0.0, **options)


class Counting(torch.optim.SGD):
    """State that belongs to no parameter."""

    def __init__(self, parameters: Any, **options: Any):
        super().__init__(parameters, **options)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})
        self.count = state_dict["count"]


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]


def muon_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    groups = [{"params": others[:3]}, {"params": others[3:], "lr": torch.tensor(2e-2)}]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(groups, lr=1e-2)]


def two_counts(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [Counting(matrices, lr=0.1, momentum=0.9), Counting(others, lr=1e-2)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon and adamw": muon_adamw,
    "two counts": two_counts,
    "adamw": groups,
    "fused": lambda model: groups(model, fused=True, amsgrad=False),
    "amsgrad": lambda model: torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(1e-2), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(trained(model), lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda model: torch.optim.Adafactor(trained(model), lr=1e-2),
    "muon": lambda model: torch.optim.Muon(trained(model), lr=1e-2),
}


def one_each(optimizers: Any) -> Any:
    return [warm_up(optimizers[0]), lr_scheduler.CosineAnnealingLR(optimizers[1], 5)]


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


# -- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run: what it is, and how the parts before and after the checkpoint are compiled and stepped.

    Args:
        build: The model, after the seed.
        batch: The batch of a step.
        optimizer: A key of `OPTIMIZERS`.
        scheduler: Makes an LR scheduler.
        compile: Options of `compile` before and after.
        step: Options of `TrainStep` before and after.
        between: Changes the model by hand, just before it is saved.
        on_meta: Whether the second part builds its model without values.
        example: Whether the second part is compiled before the checkpoint is read.
    """

    build: Callable[[], Any]
    batch: Callable[[int], Any]
    optimizer: str = "adamw"
    scheduler: Callable[[Any], Any] | None = None
    compile: tuple[Options, Options] = ({}, {})
    step: tuple[Options, Options] = ({}, {})
    between: Callable[[nn.Module], object] | None = None
    on_meta: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)


CLIP: Options = {"max_grad_norm": 0.1}
SERIAL: Options = {"overlap": False}
SMALL: Options = {"memory": "64KiB", "activations": "recompute"}
PARKED: Options = {"transfer": "copy", "activations": "offload", "block_bytes": 1}
BF16: Options = {"precision": "bf16"}
ROUNDED: Options = {**BF16, "masters": "rounded"}


def mark(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Noted):
            module.factor = 0.25


CASES: dict[str, Case] = {
    "matrices-muon": Case(matrices, two_texts, "muon", warm_up, ({}, PARKED), (CLIP, CLIP)),
    "running": Case(lambda: stack(Running), points, compile=({}, PARKED)),
    "noted": Case(lambda: stack(lambda: Noted(as_tensor=False)), points, between=mark),
    "noted-tensor": Case(lambda: stack(lambda: Noted(as_tensor=True)), points, between=mark),
    "drawing": Case(lambda: stack(Drawing), points, compile=({}, {"transfer": "copy"})),
    "hidden-tie": Case(Untied, tokens, step=(CLIP, {**CLIP, **SERIAL})),
    "meta": Case(Gpt, tokens, step=(CLIP, CLIP), on_meta=True, example=tokens(0)),
    # bf16 with exact masters, rounded ones, and some that are whole.
    "several": Case(Gpt, tokens, "muon and adamw", one_each, (BF16, BF16), (CLIP, CLIP)),
    "several-rounded": Case(Gpt, tokens, "two counts", None, (ROUNDED, ROUNDED), (CLIP, CLIP)),
    "bf16-meta": Case(
        Gpt, tokens, "fused", None, (BF16, {**BF16, **PARKED}), (CLIP, CLIP), on_meta=True, example=tokens(0)
    ),
    "rounded-gpt-adamw": Case(Gpt, two_texts, "adamw", warm_up, (ROUNDED, {**ROUNDED, **SMALL}), (CLIP, CLIP)),
}


class Run:
    """A case in progress: model, optimizer, scheduler, and the step that trains them.

    Args:
        case: What to run.
        folder: Where a checkpoint of it lies; None begins anew.
        part: Which of the options: 0 before the checkpoint, 1 after it. None: 0 without a folder, else 1.
    """

    def __init__(self, case: Case, folder: Path | None = None, part: int | None = None):
        part = (0 if folder is None else 1) if part is None else part
        seed(0 if folder is None else 99)  # a resumed run must not depend on how it began
        self.case = case
        options = dict(case.compile[part])
        if folder is not None and case.on_meta:
            with torch.device("meta"):
                self.model: Any = built(case)
            options["weights"] = folder
        else:
            self.model = built(case)
        if folder is not None and case.example:
            options["example_kwargs"] = case.example
        self.compiled = megatrain.compile(self.model, device="cpu", **options)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model)
        self.optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        self.scheduler = None if case.scheduler is None else case.scheduler(self.optimizer)
        settings = {"loss": scalar, **case.step[part]}
        if folder is None:
            self.step = megatrain.TrainStep(self.compiled, self.optimizer, **settings)
        else:
            self.step = megatrain.TrainStep.load(
                folder, self.compiled, self.optimizer, scheduler=self.scheduler, **settings
            )

    def train(self, count: int) -> list[str]:
        """Takes steps, at the numbers where the run is; returns losses and learning rates."""
        found: list[str] = []
        for _ in range(count):
            loss = float(self.step(self.case.batch(self.step.progress.count)))
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss)
            elif self.scheduler is not None:
                for scheduler in self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]:
                    scheduler.step()
            found.append(f"{loss.hex()} at {self.optimizers[0].param_groups[0]['lr']!r}")
        return found

    def save(self, folder: Path, **options: Any) -> None:
        self.step.save(folder, scheduler=self.scheduler, **options)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, as texts: tensors by their bits."""
        names = {id(p): name for name, p in self.compiled.named_parameters()}
        found: dict[str, Any] = {f"buffer {name}": text_of(b) for name, b in self.model.named_buffers()}
        found |= {f"weight {name}": text_of(p) for name, p in self.model.named_parameters()}
        for parameter, master in self.compiled.masters.items():
            found[f"master {names[id(parameter)]}"] = text_of(read_(torch.empty(master.shape), master))
        for place, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                found |= {f"{key} of {names[id(parameter)]}": text_of(value) for key, value in state.items()}
            for i, group in enumerate(optimizer.param_groups):
                found |= {f"{key} of group {place}.{i}": text_of(v) for key, v in group.items() if key != "params"}
            found[f"count {place}"] = getattr(optimizer, "count", None)
        schedulers = self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]
        found["scheduler"] = [each and text_of(each.state_dict()) for each in schedulers]
        found["generators"] = text_of([torch.get_rng_state(), random.getstate(), np.random.get_state()])
        found["progress"] = text_of([self.step.progress.count, self.step.progress.skipped])
        for name, module in self.model.named_modules():
            found |= {f"factor of {name}": module.factor for _ in [0] if isinstance(module, Noted)}
        return found


def built(case: Case) -> nn.Module:
    made = case.build()
    return made[0] if isinstance(made, tuple) else made


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def text_of(value: Any) -> str:
    """A text that is equal for equal values: tensors by dtype, shape and bits."""
    if isinstance(value, torch.Tensor):
        content = bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {text_of(item)}" for key, item in value.items() if not callable(item)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, np.ndarray):
        return text_of(torch.from_numpy(value.astype(np.int64)))
    return repr(value)


def after(run: Run) -> dict[str, Any]:
    """What a run that goes on leaves."""
    return {"losses": run.train(STEPS_AFTER), **run.state()}


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Lists what isn't equal."""
    keys = sorted(expected.keys() | found.keys())
    return [f"{k}: {expected.get(k)} / {found.get(k)}" for k in keys if expected.get(k) != found.get(k)]


def main(folder: Path, names: list[str]) -> None:
    """Goes on with each case from its checkpoint, and writes what it left to `<name>.json`."""
    torch.set_num_threads(int(names.pop(0)))
    with lowered_once():
        for name in names:
            (folder / f"{name}.json").write_text(json.dumps(after(Run(CASES[name], folder / name))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
