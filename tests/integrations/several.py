"""Scripts in several processes, as torchrun starts them: what each process runs, is refused and leaves behind.

As a script, for torchrun: `several.py FOLDER HOW` is a trainer, of which one process may die in the middle.
"""

from __future__ import annotations

import os
import sys
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
from transformers import TrainerCallback, default_data_collator

import megatrain
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
from tests.integrations.test_resume import adapted
from tests.integrations.test_trainer import Plain, noisy, twice


def smooth(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of the user's, with the number of targets of all processes."""
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.2)
    return loss / num_items_in_batch


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows without a length, of which accelerate reads all on the first process."""

    def __iter__(self) -> Iterator[Any]:
        yield from RAGGED * 3


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
    "own function": Scenario(ACCUMULATED, rows=RAGGED, more=lambda model: {"compute_loss_func": smooth}),
    "means": Scenario(ACCUMULATED, model=plain_llama, rows=RAGGED),
    "tied": Scenario({**ONCE, "max_grad_norm": 0.0}, model=lambda: llama(tie_word_embeddings=True), rows=RAGGED),
    "lora": Scenario(ONCE, model=lambda: adapted(0.0), rows=RAGGED),
    "masters": Scenario(ONCE, rows=RAGGED, streaming={"precision": "bf16"}),
    "without a length": Scenario(ONCE, rows=RAGGED, more=lambda model: {"train_dataset": Endless()}),
    "evaluated": Scenario({**ONCE, **EVALUATED, "eval_on_start": True}, model=dropping, rows=RAGGED, after=predicted),
    "saved": Scenario(SAVED, rows=RAGGED),
    "saved, dropout": Scenario(SAVED, model=dropping, rows=RAGGED),
    "best": Scenario({**SAVED, **EVALUATED, "load_best_model_at_end": True}, rows=RAGGED),
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


# -- loops of accelerate ---------------------------------------------------------------------------------------------


def loop_here(rank: int, compiles: bool) -> Any:
    """A loop of accelerate with autograd; accelerate wraps what it prepares in DistributedDataParallel."""
    as_torchrun(rank)
    accelerator, plain, recording = Accelerator(cpu=True), llama(), megatrain.Recording()
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


# -- what is refused -------------------------------------------------------------------------------------------------


def gathers(self: Any, model: Any, inputs: Any) -> Any:
    """Its loss tells what it was to other processes, at once."""
    outputs = model(**inputs)
    self.accelerator.gather(outputs.loss.detach())
    return outputs.loss, outputs


def gathers_ahead(self: Any, model: Any, inputs: Any) -> Any:
    """Its loss tells how large the batch is, ahead of the model's call."""
    size = torch.tensor(inputs["labels"].numel())
    scale = self.accelerator.gather(size).sum() / size
    outputs = model(**inputs)
    return outputs.loss * scale, outputs


class OtherLayers(Plain):
    """A batch leaves a layer out."""

    def forward(self, x: Any, labels: Any) -> Any:
        """Looks at a value."""
        first, act, middle, _, last = self.layers
        x = act(first(x))
        x = x if labels.sum() > 0 else act(middle(x))
        logits = last(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


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


IN_PAIRS = [{"x": torch.arange(4.0), "labels": torch.tensor(i // 4 % 2)} for i in range(16)]
REFUSED: dict[str, Any] = {
    "auto_find_batch_size": lambda rank: {"auto_find_batch_size": True},
    "compiled for one": lambda rank: {"model": megatrain.compile(llama(), device="cpu")},
    "uneven": lambda rank: {"train_dataset": ROWS[:6], "accelerator_config": {"even_batches": False}},
    "other arguments": lambda rank: {"gradient_accumulation_steps": 1 + rank},
    "callback": lambda rank: {"callbacks": [Looks()]},
    "other layers": lambda rank: {
        "model": OtherLayers(), "train_dataset": IN_PAIRS, "gradient_accumulation_steps": 2
    },
    "draws": lambda rank: {"kind": with_loss(noisy)},
    "twice": lambda rank: {"kind": with_loss(twice)},
    "gathers": lambda rank: {"kind": with_loss(gathers)},
    "other weights": lambda rank: {"model": llama() if rank == 0 else llama(initializer_range=0.1)},
    "stops one": lambda rank: on("step_end", stops_one)(None),
    "bad row": lambda rank: {"data_collator": failing_collator(rank)},
    "a search": lambda rank: {"trial": {"learning_rate": 1.0}},
    "nothing": lambda rank: {"kind": with_loss(gathers_ahead)},
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
