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
from peft import LoraConfig, get_peft_model
from transformers import HfArgumentParser, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, pipeline

import megatrain
from megatrain.integrations.hf import Streamed
from tests.comparing import assert_same
from tests.integrations.runs import GIVEN, RAGGED, ROWS, llama
from tests.integrations.test_trainer import ACCUMULATED
from tests.integrations.words import tokenizer

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
Make = Callable[..., Any]
"""Makes a trainer: `make(model, **training arguments, more={...})`."""


def both(cells: Callable[[Make, Path], Any], folder: Path, *, kind: Any = Trainer) -> None:
    """Runs the cells with the stock trainer and with one that streams; what they return has the same bits."""
    found: list[Any] = []
    recording = megatrain.Recording()
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        own = folder / ("streams" if streams else "stock")

        def make(model: Any, *, more: Any = None, streams: bool = streams, own: Path = own, **options: Any) -> Any:
            args = TrainingArguments(str(own), **{**GIVEN, **options})
            rows = {"train_dataset": RAGGED, "eval_dataset": ROWS[:4], **(more or {})}
            if not streams:
                return kind(model=model, args=args, **rows)
            used = type("Streaming", (Streamed, kind), {})
            return used(model=model, args=args, **rows, megatrain_transfer="copy", megatrain_recording=recording)

        found.append(cells(make, own))
        gc.collect()
    assert_same(found[1], found[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0


def left(trainer: Any) -> Any:
    """What a trainer holds: its losses, and copies of its tensors."""
    log = [row.get("loss", row.get("eval_loss", row.get("grad_norm"))) for row in trainer.state.log_history]
    return [str(log), {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}]


def test_a_cell_that_makes_a_trainer_is_run_again(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        model, found = llama(), []
        for rate in (1e-2, 1e-3, 1e-2):
            trainer = make(model, learning_rate=rate, **ACCUMULATED)
            trainer.train()
            found.append(left(trainer))
        return found

    both(cells, tmp_path)


def test_a_trainer_is_given_the_model_of_another(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        first = make(llama(), **ACCUMULATED)
        first.train()
        second = make(getattr(first.model, "megatrain", first).model, **ACCUMULATED)
        second.train()
        return [left(first), left(second)]

    both(cells, tmp_path)


class Stops(TrainerCallback):
    """Ctrl-C, in the middle."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            self.at = 0
            raise KeyboardInterrupt


def test_a_training_that_is_stopped_goes_on(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
        trainer = make(llama(attention_dropout=0.2), more={"callbacks": [Stops(2)]}, **saved, **ACCUMULATED)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        before = left(trainer)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        return [before, left(trainer), trainer.evaluate()["eval_loss"]]

    both(cells, tmp_path)


class Fails(Trainer):
    """Its loss has a fault at first, which the next cell mends."""

    fails = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        if self.fails:
            raise ValueError("a typing error")
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_loss_that_fails_is_mended(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        trainer = make(llama(), **ACCUMULATED)
        with pytest.raises(ValueError, match="a typing error"):
            trainer.train()
        trainer.fails = False
        trainer.train()
        return left(trainer)

    both(cells, tmp_path, kind=Fails)


def test_arguments_and_data_change_between_cells(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        trainer = make(llama(), **ACCUMULATED)
        found: list[Any] = [trainer.evaluate()["eval_loss"]]
        trainer.train()
        found.append(left(trainer))
        trainer.args.learning_rate = 1e-3
        trainer.args.max_steps = 2
        trainer.args.gradient_accumulation_steps = 1
        trainer.args.per_device_train_batch_size = 3
        trainer.train_dataset = ROWS
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        found += [left(trainer), torch.tensor(trainer.predict(ROWS[:3]).predictions)]
        trainer.remove_callback(TrainerCallback)
        trainer.add_callback(Stops(99))
        trainer.args.max_steps = 3
        trainer.train()
        return [*found, left(trainer)]

    both(cells, tmp_path)


def test_the_trained_model_is_used_in_every_way(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        trainer = make(llama(), **ACCUMULATED)
        trainer.train()
        model = trainer.model
        ids = torch.arange(6)[None] + 1
        model.eval()
        found: list[Any] = [model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)]
        told = pipeline("text-generation", model=model, tokenizer=tokenizer())
        found.append(told("w1 w2 w3", max_new_tokens=3, do_sample=False)[0]["generated_text"])
        model.save_pretrained(folder / "by hand")
        again = LlamaForCausalLM.from_pretrained(folder / "by hand")
        found.append(again(ids).logits.detach())
        torch.save(model, folder / "whole.pt")
        whole = torch.load(folder / "whole.pt", weights_only=False)
        found.append(whole.eval()(ids).logits.detach())
        with torch.no_grad():
            found.append(model(ids).logits)
        trainer.save_model(str(folder / "by the trainer"))
        trainer.create_model_card()
        found.append(sorted(path.name for path in (folder / "by the trainer").iterdir()))
        found.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
        found.append([model.num_parameters(), model.get_memory_footprint(), str(model.dtype), str(model.device)])
        return found

    both(cells, tmp_path)


def test_an_adapter_is_trained_merged_and_trained_again(tmp_path: Path) -> None:
    def cells(make: Make, folder: Path) -> Any:
        base: Any = llama()
        found: list[Any] = []
        for _ in range(2):
            torch.manual_seed(1)
            config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
            trainer = make(get_peft_model(base, config), **ACCUMULATED)
            trainer.train()
            found.append(left(trainer))
            base = trainer.model.merge_and_unload()
            found.append({k: v.detach().clone() for k, v in base.state_dict().items()})
        return found

    both(cells, tmp_path)


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
    trainer = type("Streaming", (Streamed, Trainer), {})(model=llama(), args=args, train_dataset=ROWS)
    trainer.train()
    assert trainer.train_step.progress.count == 2
    assert trainer.model.megatrain.peak_bytes <= 300 * 1024
    assert "memory 300.00 KiB" in str(trainer.model)
