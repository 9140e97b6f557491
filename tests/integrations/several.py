"""Scripts with a trainer in several processes, as torchrun starts them: what each process runs and leaves behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import megatrain
from tests.integrations.runs import RAGGED, ROWS, Ran, Scenario, llama, run
from tests.integrations.test_resume import adapted
from tests.integrations.test_trainer import TwoTerms


def smooth(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of the user's, with the number of targets of all processes."""
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.2)
    return loss / num_items_in_batch


class Means(TwoTerms):
    """Its losses are means, which the trainer divides by the accumulation steps."""

    loss_is_scaled_for_ga = False


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows without a length, of which accelerate reads all on the first process."""

    def __iter__(self) -> Iterator[Any]:
        yield from RAGGED * 3


def predicted(trainer: Any) -> Any:
    """What all processes predict together."""
    found = trainer.predict(RAGGED[:7])
    return torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids), found.metrics["test_loss"]


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
        ONCE, rows=RAGGED, model=nn.Identity, more=lambda model: {"model": None, "model_init": lambda: llama()}
    ),
    "evaluated": Scenario(
        {**ONCE, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}, rows=RAGGED, after=predicted
    ),
    "without a length": Scenario(ONCE, rows=RAGGED, more=lambda model: {"train_dataset": Endless()}),
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
