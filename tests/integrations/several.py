"""Scripts in several processes, as torchrun starts them: what each process runs, is refused and leaves behind.

As a script, for torchrun: `several.py FOLDER HOW` is a trainer, of which one process may die in the middle.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import TrainerCallback, default_data_collator

from megatrain.errors import MegatrainError, OptionError
from tests.integrations.runs import (
    GIVEN,
    RAGGED,
    ROWS,
    Ran,
    Scenario,
    llama,
    on,
    run,
    streamed_kind,
    with_loss,
)


def predicted(trainer: Any) -> Any:
    """What all processes predict together."""
    found = trainer.predict(RAGGED[:7])
    return torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids), found.metrics["test_loss"]


def plain_llama() -> Any:
    """Takes no number of targets, so its losses are means, and the trainer divides them by the accumulation steps."""
    model = llama()
    model.accepts_loss_kwargs = False
    return model


def dropping() -> Any:
    return llama(attention_dropout=0.2)


ONCE = {"max_steps": 4, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
IN_ORDER = {**ONCE, "train_sampling_strategy": "sequential"}
ACCUMULATED = {**IN_ORDER, "gradient_accumulation_steps": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {**IN_ORDER, "max_steps": 5, "save_strategy": "steps", "save_steps": 2}
SCENARIOS: dict[str, Scenario] = {
    "ragged": Scenario(ONCE, rows=RAGGED),
    "means": Scenario(ACCUMULATED, model=plain_llama, rows=RAGGED),
    "masters": Scenario(ONCE, rows=RAGGED, streaming={"precision": "bf16"}),
    "evaluated": Scenario({**ONCE, **EVALUATED, "eval_on_start": True}, model=dropping, rows=RAGGED, after=predicted),
    "saved": Scenario(SAVED, rows=RAGGED),
    "saved, dropout": Scenario(SAVED, model=dropping, rows=RAGGED),
}


def in_order_of_ranks(rows: Sequence[Any], size: int, count: int, batch: int = 2) -> list[Any]:
    """Rows that lie, batch by batch, as ranks have them in each update: those of rank 0, then those of rank 1."""
    found: list[Any] = []
    for start in range(0, len(rows), size * count * batch):
        update = rows[start : start + size * count * batch]
        batches = [update[i : i + batch] for i in range(0, len(update), batch)]
        found += [row for rank in range(size) for own in batches[rank::size] for row in own]
    return found


def of_one_process(scenario: Scenario, size: int) -> Scenario:
    """The scenario in which one process takes the micro-batches of all."""
    count = scenario.options.get("gradient_accumulation_steps", 1)
    options = {**scenario.options, "gradient_accumulation_steps": count * size}
    rows = in_order_of_ranks(scenario.rows, size, count) if "train_sampling_strategy" in options else scenario.rows
    return replace(scenario, options=options, rows=rows)


def as_torchrun(rank: int) -> None:
    """Says to accelerate what torchrun says."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    AcceleratorState._reset_state(reset_partial_state=True)


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
        assert " sums " in str(step.schedule)
    return left(found)


# -- what is refused -------------------------------------------------------------------------------------------------


def gathers(self: Any, model: Any, inputs: Any) -> Any:
    """Its loss tells what it was to other processes, at once."""
    outputs = model(**inputs)
    self.accelerator.gather(outputs.loss.detach())
    return outputs.loss, outputs


class Looks(TrainerCallback):
    """Reads gradients, as far as anyone knows."""

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Looks."""


def stops_one(*, args: Any, control: Any, **_: Any) -> None:
    """Ends the training on one process alone."""
    control.should_training_stop = args.process_index == 1


def failing_collator(rank: int) -> Any:
    """Fails on one process, in the second update: accelerate reads a batch ahead."""
    seen: list[int] = []

    def collate(rows: Any) -> Any:
        seen.append(1)
        if rank == 1 and len(seen) == 3:
            raise ValueError("a bad row")
        return default_data_collator(rows)

    return collate


REFUSED: dict[str, Any] = {
    "auto_find_batch_size": lambda rank: {"auto_find_batch_size": True},
    "uneven": lambda rank: {"train_dataset": ROWS[:6], "accelerator_config": {"even_batches": False}},
    "callback": lambda rank: {"callbacks": [Looks()]},
    "gathers": lambda rank: {"kind": with_loss(gathers)},
    "other weights": lambda rank: {"model": llama() if rank == 0 else llama(initializer_range=0.1)},
    "stops one": lambda rank: on("step_end", stops_one)(None),
    "bad row": lambda rank: {"data_collator": failing_collator(rank)},
    "a search": lambda rank: {"trial": {"learning_rate": 1.0}},
}  # fmt: skip


def made(given: dict[str, Any]) -> Any:
    """A trainer that streams, of training arguments and of keywords of its own."""
    names = "model", "callbacks", "train_dataset", "data_collator"
    keywords = {name: given.pop(name) for name in names if name in given}
    scenario = Scenario(kind=given.pop("kind", Scenario.kind))
    arguments = scenario.arguments("unused", **{**GIVEN, "train_sampling_strategy": "sequential", **given})
    return streamed_kind(scenario.kind)(**{"model": llama(), "args": arguments, "train_dataset": ROWS, **keywords})


def refused_here(rank: int, name: str) -> str:
    """The error of a trainer, and how many updates it has made; or the losses of one that trains."""
    as_torchrun(rank)
    trainer: Any = None
    given = REFUSED[name](rank)
    trial = given.pop("trial", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = made(given)
            trainer.train(trial=trial)
    except (MegatrainError, ValueError, KeyboardInterrupt) as error:
        step = None if trainer is None else trainer.train_step
        return f"{type(error).__name__}, {0 if step is None else step.progress.count} updates: {error}"
    return str([row["loss"] for row in trainer.state.log_history if "loss" in row])


def without_cpu_here(rank: int) -> tuple[int, str]:
    """Of a script that forgets `use_cpu=True` without an accelerator: how many accelerate counts, and what is said."""
    as_torchrun(rank)
    count = Accelerator().num_processes
    try:
        made({"use_cpu": False})
    except OptionError as error:
        return count, str(error)
    return count, "nothing was refused"


# -- under torchrun ---------------------------------------------------------------------------------------------------


def dies(*, args: Any, state: Any, **_: Any) -> None:
    """Ends the process of the last rank behind an update, without a word."""
    if state.global_step == 4 and args.process_index == args.world_size - 1:
        os._exit(7)


def main(folder: Path, how: str) -> None:
    """Trains; the first process leaves what it has."""
    scenario = SCENARIOS["saved"]
    if how == "dies":
        scenario = replace(scenario, more=on("step_end", dies))
    found = run(scenario, folder, streams=True, resume_from_checkpoint=how == "resumed")
    if found.trainer.args.process_index == 0:
        torch.save((found.values, found.log), folder / "end.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
