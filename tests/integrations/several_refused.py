"""Trainers in several processes that are refused, or whose processes fail or differ."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback, TrainingArguments, default_data_collator

import megatrain
from megatrain.errors import MegatrainError, OptionError
from tests.integrations.runs import GIVEN, ROWS, llama, streamed_kind
from tests.integrations.several import as_torchrun
from tests.integrations.test_trainer import Plain, of_model

OF_TRAINER = "model", "callbacks", "train_dataset", "data_collator", "optimizers", "megatrain_block_bytes"


def made(**given: Any) -> Any:
    """A trainer that streams, of training arguments and of keywords of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    kind, names = given.pop("kind", StockTrainer), OF_TRAINER
    keywords = {name: given.pop(name) for name in names if name in given}
    arguments = TrainingArguments("unused", **{**GIVEN, "train_sampling_strategy": "sequential", **given})
    return streamed_kind(kind)(**{"model": llama(), "args": arguments, "train_dataset": ROWS, **keywords})


class Looks(TrainerCallback):
    """Reads gradients, as far as anyone knows."""

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Looks."""


class StopsOne(TrainerCallback):
    """Ends the training on one process alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends it."""
        if args.process_index == 1:
            control.should_training_stop = True


class Gathers(StockTrainer):
    """Its loss tells what it was to other processes, at once."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Tells."""
        loss: Any = super().compute_loss(*args, **kwargs)
        self.accelerator.gather(loss.detach())
        return loss


class GathersAhead(StockTrainer):
    """Its loss tells how large the batch is, ahead of the model's call."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Tells."""
        size = torch.tensor(inputs["labels"].numel())
        sizes: Any = self.accelerator.gather(size)
        scale = sizes.sum() / size
        found: Any = super().compute_loss(model, inputs, *args, **kwargs)
        return found * scale


class CallsTwice(StockTrainer):
    """Its loss calls the model twice."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        first: Any = super().compute_loss(model, dict(inputs), *args, **kwargs)
        return first + model(**inputs).loss


class OwnStep(StockTrainer):
    """Has a training step of its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes it."""
        return super().training_step(*args, **kwargs)


class OtherLayers(Plain):
    """A batch leaves a layer out."""

    def forward(self, x: Any, labels: Any) -> Any:
        """Looks at a value."""
        first, act, middle, _, last = self.layers
        x = act(first(x))
        x = x if labels.sum() > 0 else act(middle(x))
        logits = last(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Draws(StockTrainer):
    """Its loss draws ahead of the model's call."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Draws."""
        torch.rand(1)
        return super().compute_loss(*args, **kwargs)


def apart() -> Any:
    """A model that was compiled for one process."""
    return megatrain.compile(llama(), device="cpu")


def failing_collator(rank: int) -> Any:
    """Fails on one process, in the second update: accelerate reads a batch ahead."""
    count = 0

    def collate(rows: Any) -> Any:
        nonlocal count
        count += 1
        if rank == 1 and count == 3:
            raise ValueError("a bad row")
        return default_data_collator(rows)

    return collate


POINTS_IN_PAIRS = [{"x": torch.arange(4.0), "labels": torch.tensor(i // 4 % 2)} for i in range(16)]
REFUSED: dict[str, Any] = {
    "auto_find_batch_size": lambda rank: {"auto_find_batch_size": True},
    "save_on_each_node": lambda rank: {"save_on_each_node": True},
    "compiled for one": lambda rank: {"model": apart()},
    "uneven": lambda rank: {"train_dataset": ROWS[:6], "accelerator_config": {"even_batches": False}},
    "other arguments": lambda rank: {"gradient_accumulation_steps": 1 + rank},
    "callback": lambda rank: {"callbacks": [Looks()]},
    "own step": lambda rank: {"kind": OwnStep},
    "optimizer": lambda rank: of_model(llama()),
    "other layers": lambda rank: {
        "model": OtherLayers(),
        "train_dataset": POINTS_IN_PAIRS,
        "gradient_accumulation_steps": 2,
    },
    "draws": lambda rank: {"kind": Draws},
    "twice": lambda rank: {"kind": CallsTwice},
    "gathers": lambda rank: {"kind": Gathers},
    "stops one": lambda rank: {"callbacks": [StopsOne()]},
    "other weights": lambda rank: {"model": llama() if rank == 0 else llama(initializer_range=0.1)},
    "bad row": lambda rank: {"data_collator": failing_collator(rank)},
}


def refused_here(rank: int, name: str) -> str:
    """See `refused_of`."""
    return refused_of(rank, REFUSED[name](rank))


def refused_of(rank: int, given: dict[str, Any]) -> str:
    """The error of a trainer, and how many updates it has made."""
    as_torchrun(rank)
    trainer: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = made(**given)
            trainer.train()
    except (MegatrainError, ValueError, KeyboardInterrupt) as error:
        step = None if trainer is None else trainer.train_step
        return f"{type(error).__name__}, {0 if step is None else step.progress.count} updates: {error}"
    return "nothing was refused"


def without_cpu_here(rank: int) -> tuple[int, str]:
    """Of a script that forgets `use_cpu=True` without an accelerator: how many accelerate counts, and what is said."""
    as_torchrun(rank)
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator().num_processes, refused_with(rank, use_cpu=False)


def refused_with(rank: int, **given: Any) -> str:
    as_torchrun(rank)
    try:
        made(**given)
    except OptionError as error:
        return str(error)
    return "nothing was refused"


def searches_here(rank: int) -> str:
    """What is refused of trainings that begin several times."""
    as_torchrun(rank)
    trainer = made()
    try:
        trainer.train(trial={"learning_rate": 1.0})
    except OptionError as error:
        return str(error)
    return "nothing was refused"


def gathers_ahead_here(rank: int) -> list[float]:
    """The losses of a loss that exchanges values ahead of its call."""
    as_torchrun(rank)
    trainer = made(kind=GathersAhead, seed=3)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
