"""Scripts with a trainer in several processes, as torchrun starts them: what each process runs and leaves behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback, TrainingArguments, default_data_collator

import megatrain
from megatrain.errors import MegatrainError, OptionError
from tests.integrations.runs import GIVEN, RAGGED, ROWS, Ran, Scenario, llama, run, streamed_kind
from tests.integrations.test_resume import adapted
from tests.integrations.test_trainer import TwoTerms, of_all


def smooth(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of the user's, with the number of targets of all processes."""
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.2)
    return loss / num_items_in_batch


class Means(TwoTerms):
    """Its losses are means, which the trainer divides by the accumulation steps."""

    loss_is_scaled_for_ga = False


def plain_llama(**config: Any) -> Any:
    """Takes no number of targets, so its losses are means, and the trainer divides them by the accumulation steps."""
    model = llama(**config)
    model.accepts_loss_kwargs = False
    return model


ONCE = {"max_steps": 4, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
SEQUENTIAL = {**ONCE, "train_sampling_strategy": "sequential"}
SAVED = {**SEQUENTIAL, "max_steps": 5, "save_strategy": "steps", "save_steps": 2}
SCENARIOS: dict[str, Scenario] = {
    "ragged": Scenario(ONCE, rows=RAGGED),
    "accumulated": Scenario({**SEQUENTIAL, "gradient_accumulation_steps": 2}, rows=RAGGED),
    "dropout": Scenario(ONCE, model=lambda: llama(attention_dropout=0.2), rows=RAGGED),
    "label smoothing": Scenario({**ONCE, "label_smoothing_factor": 0.1}, rows=RAGGED),
    "own loss": Scenario({**SEQUENTIAL, "gradient_accumulation_steps": 2}, kind=Means),
    "own function": Scenario(ONCE, rows=RAGGED, more=lambda model: {"compute_loss_func": smooth}),
    "means": Scenario({**SEQUENTIAL, "gradient_accumulation_steps": 2}, model=plain_llama, rows=RAGGED),
    "unclipped": Scenario({**ONCE, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1, "logging_steps": 2}),
    "tied": Scenario(ONCE, model=lambda: llama(tie_word_embeddings=True), rows=RAGGED),
    "lora": Scenario(ONCE, model=adapted, rows=RAGGED),
    "masters": Scenario(ONCE, rows=RAGGED, streaming={"precision": "bf16"}),
    "autocast": Scenario({**ONCE, "bf16": True}, rows=RAGGED),
    "model_init": Scenario(
        ONCE, rows=RAGGED, model=lambda: None, more=lambda model: {"model": None, "model_init": lambda: llama()}
    ),
    "evaluated": Scenario({**ONCE, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}, rows=RAGGED),
    "saved": Scenario(SAVED, model=lambda: llama(attention_dropout=0.2), rows=RAGGED),
    "best": Scenario({**SAVED, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}, rows=RAGGED),
}


def in_order_of_ranks(rows: Sequence[Any], size: int, count: int, batch: int = 2) -> list[Any]:
    """Rows that lie, batch by batch, as ranks have them in each update: those of rank 0, then those of rank 1."""
    found: list[Any] = []
    for start in range(0, len(rows), size * count * batch):
        update = rows[start : start + size * count * batch]
        batches = [update[i : i + batch] for i in range(0, len(update), batch)]
        found += [row for rank in range(size) for own in batches[rank::size] for row in own]
    return found


def of_one_process(name: str, size: int) -> Scenario:
    """The scenario in which one process takes the micro-batches of all."""
    scenario = SCENARIOS[name]
    count = scenario.options.get("gradient_accumulation_steps", 1)
    options = {**scenario.options, "gradient_accumulation_steps": count * size}
    rows = in_order_of_ranks(scenario.rows, size, count) if "train_sampling_strategy" in options else scenario.rows
    return replace(scenario, options=options, rows=rows)


def as_torchrun(rank: int) -> None:
    """Says to accelerate what torchrun says."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def left(ran: Ran) -> dict[str, Any]:
    """What a run left that can be told to another process."""
    return {"log": ran.log, "values": ran.values, "generators": ran.generators, "after": ran.after}


def train_here(rank: int, name: str, folder: str, streams: bool, training: dict[str, Any]) -> dict[str, Any]:
    """What a process runs."""
    as_torchrun(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(SCENARIOS[name], Path(folder), streams=streams, **training)
    if streams:
        step = found.trainer.train_step
        assert step.progress.count == found.trainer.state.global_step
        assert "ranks: " in str(step.schedule)
    return left(found)


# -- what is refused, and what fails ---------------------------------------------------------------------------------


OF_TRAINER = "model", "callbacks", "train_dataset", "data_collator", "optimizers"


def _made(**given: Any) -> Any:
    """A trainer that streams, of training arguments and of keywords of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    kind, names = given.pop("kind", StockTrainer), OF_TRAINER
    keywords = {name: given.pop(name) for name in names if name in given}
    arguments = TrainingArguments("unused", **{**GIVEN, **given})
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
        loss = super().compute_loss(*args, **kwargs)
        self.accelerator.gather(loss.detach())
        return loss


class GathersAhead(StockTrainer):
    """Its loss tells how large the batch is, ahead of the model's call."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Tells."""
        size = torch.tensor(inputs["labels"].numel())
        scale = self.accelerator.gather(size).sum() / size
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


REFUSED: dict[str, Any] = {
    "auto_find_batch_size": lambda rank: {"auto_find_batch_size": True},
    "save_on_each_node": lambda rank: {"save_on_each_node": True},
    "compiled for one": lambda rank: {"model": apart()},
    "uneven": lambda rank: {"train_dataset": ROWS[:6], "accelerator_config": {"even_batches": False}},
    "other arguments": lambda rank: {"gradient_accumulation_steps": 1 + rank},
    "callback": lambda rank: {"callbacks": [Looks()]},
    "own step": lambda rank: {"kind": OwnStep},
    "optimizer": lambda rank: of_all(llama()),
    "draws": lambda rank: {"kind": Draws},
    "twice": lambda rank: {"kind": CallsTwice},
    "gathers": lambda rank: {"kind": Gathers},
    "stops one": lambda rank: {"callbacks": [StopsOne()]},
    "other weights": lambda rank: {"model": llama() if rank == 0 else llama(initializer_range=0.1)},
    "bad row": lambda rank: {"data_collator": failing_collator(rank)},
}


def refused_here(rank: int, name: str) -> str:
    """The error of a trainer, and how many updates it has made."""
    as_torchrun(rank)
    trainer: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = _made(**REFUSED[name](rank))
            trainer.train()
    except (MegatrainError, ValueError) as error:
        step = None if trainer is None else trainer.train_step
        return f"{type(error).__name__}, {0 if step is None else step.progress.count} updates: {error}"
    return "nothing was refused"


def without_cpu_here(rank: int) -> str:
    """What a script says that forgets `use_cpu=True` on a machine without an accelerator."""
    return refused_with(rank, use_cpu=False)


def refused_with(rank: int, **given: Any) -> str:
    as_torchrun(rank)
    try:
        _made(**given)
    except OptionError as error:
        return str(error)
    return "nothing was refused"


def searches_here(rank: int) -> list[str]:
    """What is refused of trainings that begin several times."""
    as_torchrun(rank)
    trainer = _made()
    said: list[str] = []
    for begin in (trainer.verify, lambda: trainer.train(trial={"learning_rate": 1.0})):
        try:
            begin()
        except OptionError as error:
            said.append(str(error))
    return said


def gathers_ahead_here(rank: int) -> list[float]:
    """The losses of a loss that exchanges values ahead of its call."""
    as_torchrun(rank)
    trainer = _made(kind=GathersAhead, seed=3)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


# -- loops of accelerate ---------------------------------------------------------------------------------------------


def loop_here(rank: int, compiles: bool) -> Any:
    """A loop of accelerate with autograd; accelerate wraps what it prepares in DistributedDataParallel."""
    as_torchrun(rank)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    plain = llama()
    recording = megatrain.Recording()
    used = megatrain.compile(plain, device="cpu", transfer="copy", recording=recording) if compiles else plain
    optimizer = torch.optim.AdamW(used.parameters(), lr=0.01)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=2)  # pyright: ignore
    model, optimizer, batches = accelerator.prepare(used, optimizer, loader)
    assert type(model) is torch.nn.parallel.DistributedDataParallel
    losses: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", megatrain.ApartWarning)
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()))
    assert bool(recording.issued) == compiles
    return losses, {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}


def step_here(rank: int) -> Any:
    """A loop of accelerate with training steps of all processes."""
    as_torchrun(rank)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model, step = stepping(dist.group.WORLD)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=2)  # pyright: ignore
    losses = [step(batch) for batch in accelerator.prepare(loader)]
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def stepping(group: Any) -> tuple[Any, megatrain.TrainStep]:
    model = llama()
    compiled = megatrain.compile(model, device="cpu", process_group=group)
    return model, megatrain.TrainStep(compiled, torch.optim.AdamW(model.parameters(), lr=0.01), max_grad_norm=0.5)
