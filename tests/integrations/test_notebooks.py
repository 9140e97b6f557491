"""Cells that are run again, stopped and changed, as in a notebook: what streams does as the stock trainer."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import HfArgumentParser, Trainer, TrainingArguments

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import GIVEN, RAGGED, ROWS, TWO, llama, on, streamed_kind, with_loss

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
Make = Callable[..., Any]
"""Makes a trainer: `make(model, kind, more={...}, **training arguments)`."""


def left(trainer: Any) -> Any:
    """What a trainer holds: its losses, and copies of its tensors."""
    log = [row.get("loss", row.get("eval_loss", row.get("grad_norm"))) for row in trainer.state.log_history]
    return [str(log), {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}]


def stops(*, args: Any, state: Any, **_: Any) -> None:
    """Ctrl-C, in the middle, once."""
    if state.global_step == 2 and not (mark := Path(args.output_dir) / "stopped").exists():
        mark.touch()
        raise KeyboardInterrupt


def fails(self: Any, model: Any, inputs: Any) -> Any:
    """A loss that has a fault at first, which the next cell mends."""
    outputs = model(**inputs)
    if not getattr(self, "is_mended", False):
        raise ValueError("a typing error")
    return outputs.loss, outputs


def made_again(make: Make, folder: Path) -> Any:
    """The cell that makes a trainer is run again, and another trainer gets its model."""
    model, found = llama(), list[Any]()
    for rate in (1e-2, 1e-3):
        trainer = make(model, learning_rate=rate)
        trainer.train()
        found.append(left(trainer))
    last = make(getattr(trainer.model, "megatrain", trainer).model)
    last.train()
    return [*found, left(last)]


def stopped(make: Make, folder: Path) -> Any:
    """A training is stopped, trained from where it is, and from a checkpoint."""
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer = make(llama(attention_dropout=0.2), more=on("step_end", stops)(None), **saved)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    found = [left(trainer)]
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    found.append(left(trainer))
    trainer.args.max_steps = 3
    trainer.train()
    return [*found, left(trainer), trainer.evaluate()["eval_loss"]]


def mended(make: Make, folder: Path) -> Any:
    trainer = make(llama(), with_loss(fails))
    with pytest.raises(ValueError, match="a typing error"):
        trainer.train()
    trainer.is_mended = True
    trainer.train()
    return left(trainer)


@pytest.mark.parametrize("cells", [made_again, stopped, mended])
def test_cells_leave_what_the_stock_trainer_leaves(cells: Callable[[Make, Path], Any], tmp_path: Path) -> None:
    found: list[Any] = []
    recording = megatrain.Recording()
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        own = tmp_path / ("streams" if streams else "stock")
        more: dict[str, Any] = (
            {"megatrain_transfer": "copy", "megatrain_recording": recording} if streams else {}
        )  # fmt: skip

        def make(
            model: Any,
            kind: Any = Trainer,
            *,
            more: Any = None,
            own: Path = own,
            given: Any = more,
            streams: bool = streams,
            **options: Any,
        ) -> Any:
            args = TrainingArguments(str(own), **{**GIVEN, **TWO, **options})
            rows = {"train_dataset": RAGGED, "eval_dataset": ROWS[:4], **(more or {})}
            return (streamed_kind(kind) if streams else kind)(model=model, args=args, **rows, **given)

        found.append(cells(make, own))
        gc.collect()
    assert_same(found[1], found[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0


@dataclasses.dataclass
class OwnArguments(TrainingArguments):
    """A script's own arguments, with those of megatrain among them."""

    megatrain_memory: str | None = None
    megatrain_transfer: str | None = None
    share: float = 0.5


def test_options_come_from_a_parser_of_arguments(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--megatrain_memory", "300KiB", "--megatrain_transfer", "copy"]
    words += ["--max_steps", "2", "--use_cpu", "true", "--report_to", "none", "--save_strategy", "no"]
    [args] = HfArgumentParser(OwnArguments).parse_args_into_dataclasses(words)  # pyright: ignore
    trainer = streamed_kind(Trainer)(model=llama(), args=args, train_dataset=ROWS)
    trainer.train()
    assert trainer.train_step.progress.count == 2
    assert trainer.model.megatrain.peak_bytes <= 300 * 1024
    assert "memory 300.00 KiB" in str(trainer.model)
