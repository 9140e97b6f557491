"""Trainers in several processes to whose devices the blocks are dealt: functions that processes run."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer as StockTrainer
from transformers import default_data_collator

from tests.integrations import several
from tests.integrations.runs import RAGGED, Ran, Scenario, llama, run
from tests.integrations.several import SAVED, SCENARIOS, SEQUENTIAL, as_torchrun, of_one_process
from tests.integrations.several_refused import REFUSED, CallsTwice, Draws, Gathers, GathersAhead, refused_of
from tests.integrations.test_trainer import LABELLED, bert

ROUND = {"across_devices": "round"}


class Keeping(StockTrainer):
    """Looks at the model without gradients ahead of its call, and keeps numbers of each micro-batch behind it."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trains the model to be as sure as it is with the words in reverse."""
        with torch.no_grad():
            teacher = model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)}).logits
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = (outputs.logits - teacher / 2).square().mean() + labels.float().mean() / 100
        self.kept.append(float(loss))
        return loss


def state_after(trainer: Any) -> Any:
    """The optimizer's state, in the order of the parameters, and the settings of its groups."""
    optimizer = trainer.optimizer.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in parameters]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"states": states, "groups": groups, "epoch": trainer.lr_scheduler.last_epoch}


def cut(rows: Any) -> Any:
    """A collator whose batches are as long as their longest text."""
    found = default_data_collator(rows)
    longest = int(found["attention_mask"].sum(1).max())
    return {name: tensor[:, :longest] for name, tensor in found.items()}


OF_THREE = {**SEQUENTIAL, "gradient_accumulation_steps": 3}
OF_ROUND: dict[str, Scenario] = {
    **SCENARIOS,
    "keeping": Scenario({**SEQUENTIAL, "gradient_accumulation_steps": 2}, rows=RAGGED, kind=Keeping),
    "several shapes": Scenario(OF_THREE, rows=RAGGED, more=lambda model: {"data_collator": cut}),
    "three micro-batches": Scenario(OF_THREE, rows=RAGGED),
    "saved in bf16": Scenario(SAVED, rows=RAGGED, streaming={"precision": "bf16"}),
    # Its first forward sets `config.problem_type`, which the next ones read.
    "no llama": Scenario(SEQUENTIAL, model=bert, rows=LABELLED),
}

OF_FOUR = ("dropout", "keeping", "lora", "masters", "own function")
# Four processes take all rows in whole steps of one micro-batch each, if batches have one row.
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
DEALT = OF_ROUND | {
    f"{name} of four": replace(OF_ROUND[name], options={**OF_ROUND[name].options, **ONE_ROW}) for name in OF_FOUR
}


def train_dealt(rank: int, name: str, folder: str, training: dict[str, Any], streaming: dict[str, Any]) -> Any:
    """What a process runs: what it leaves, the optimizer's state, and whether it makes the losses."""
    as_torchrun(rank)
    scenario = _with_state(DEALT[name], streaming)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Ran = run(scenario, Path(folder), streams=True, **training)
    step = found.trainer.train_step
    assert step.progress.count == found.trainer.state.global_step
    table = str(step.schedule)
    assert ("dealt to: " in table) == (streaming == ROUND)
    return {**several.left(found), **_kept(found), "makes losses": "losses: elsewhere" not in table}


def train_alone(name: str, size: int, folder: Path, **training: Any) -> dict[str, Any]:
    """What one process leaves that takes the micro-batches of all."""
    found = run(_with_state(of_one_process(DEALT[name], size), {}), folder, streams=True, **training)
    return {**several.left(found), **_kept(found)}


def _kept(found: Ran) -> dict[str, Any]:
    return {"kept": getattr(found.trainer, "kept", [])}


def _with_state(scenario: Scenario, streaming: dict[str, Any]) -> Scenario:
    after = scenario.after
    return replace(
        scenario,
        streaming={**scenario.streaming, **streaming},
        after=lambda trainer: (state_after(trainer), after(trainer)),
    )


# -- what is refused, and what fails -----------------------------------------------------------------------------------


class Around(StockTrainer):
    """Does something around its call of the model."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Does it."""
        self.ahead(inputs)
        found: Any = super().compute_loss(model, inputs, *args, **kwargs)
        self.behind(inputs)
        return found

    def ahead(self, inputs: Any) -> None:
        """Ahead of the call."""

    def behind(self, inputs: Any) -> None:
        """Behind it."""


class OtherWords(Around):
    """Each process masks another word."""

    def ahead(self, inputs: Any) -> None:
        """Masks it."""
        words = inputs["input_ids"].clone()
        words[:, self.args.process_index] = 0
        inputs["input_ids"] = words


class OtherArguments(Around):
    """One process calls the model with one argument more."""

    def ahead(self, inputs: Any) -> None:
        """Adds it."""
        if self.args.process_index == 1:
            inputs["use_cache"] = False


class Writes(Around):
    """Writes into the batch itself."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # the trainer's own copies them, if their device has another name

    def ahead(self, inputs: Any) -> None:
        """Writes."""
        inputs["labels"][:, 0] = -100


class Counts(Around):
    """Counts its calls ahead of them."""

    calls = 0

    def ahead(self, inputs: Any) -> None:
        """Counts."""
        self.calls += 1


class KnowsItsOwn(Around):
    """Knows only the batches that its own collator has made."""

    def ahead(self, inputs: Any) -> None:
        """Looks up."""
        if _words(inputs) not in _collated:
            raise ValueError("a batch of nobody")


class FailsBehind(Around):
    """Its loss fails in the second update, for a batch of the second process."""

    def behind(self, inputs: Any) -> None:
        """Fails."""
        if self.state.global_step == 1 and int(inputs["input_ids"][0, 0]) == SECOND:
            raise ValueError("a bad loss")


class FailsAhead(Around):
    """Its code fails in the second update, ahead of the call, in the second process."""

    def ahead(self, inputs: Any) -> None:
        """Fails."""
        if self.state.global_step == 1 and self.args.process_index == 1:
            raise ValueError("a bad batch")


class IsInterrupted(Around):
    """Ctrl-C comes in its loss."""

    def behind(self, inputs: Any) -> None:
        """Comes."""
        if self.state.global_step == 1 and int(inputs["input_ids"][0, 0]) == SECOND:
            raise KeyboardInterrupt


class HasLock(Around):
    """Its batches have something that can't be pickled, which the model doesn't get."""

    def ahead(self, inputs: Any) -> None:
        """Takes it out."""
        inputs.pop("lock")


SECOND = 48
"""The first word of the second process's batch in the second update: of rows 6 and 7, of eight words each."""
_collated: set[tuple[int, ...]] = set()


def _words(batch: Any) -> tuple[int, ...]:
    return tuple(batch["input_ids"].flatten().tolist())


def noting(rows: Any) -> Any:
    """A collator that remembers the batches of its process."""
    found = default_data_collator(rows)
    _collated.add(_words(found))
    return found


def with_lock(rows: Any) -> Any:
    """A collator that adds a lock."""
    return {**default_data_collator(rows), "lock": threading.Lock()}


REFUSED_DEALT: dict[str, Any] = {
    **{name: REFUSED[name] for name in ("callback", "own step", "optimizer", "other layers", "other weights")},
    "draws": lambda rank: {"kind": Draws},
    "twice": lambda rank: {"kind": CallsTwice},
    "gathers": lambda rank: {"kind": Gathers},
    "gathers ahead": lambda rank: {"kind": GathersAhead},
    "other words": lambda rank: {"kind": OtherWords},
    "other arguments": lambda rank: {"kind": OtherArguments},
    "writes": lambda rank: {"kind": Writes},
    "counts": lambda rank: {"kind": Counts},
    "own batches": lambda rank: {"kind": KnowsItsOwn, "data_collator": noting},
    "lock": lambda rank: {"kind": HasLock, "data_collator": with_lock, "remove_unused_columns": False},
    "few blocks": lambda rank: {"model": llama(num_hidden_layers=1), "megatrain_block_bytes": "1GB"},
    "fails ahead": lambda rank: {"kind": FailsAhead},
    "fails behind": lambda rank: {"kind": FailsBehind},
    "interrupted": lambda rank: {"kind": IsInterrupted},
}


def refused_dealt(rank: int, name: str) -> str:
    """See `refused_of`."""
    _collated.clear()
    return refused_of(rank, {**REFUSED_DEALT[name](rank), "megatrain_across_devices": "round"})
