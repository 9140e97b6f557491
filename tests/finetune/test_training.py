"""`megatrain train` has the numbers of TRL's own `SFTTrainer`, and its commands in the docs train."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from megatrain import AdamW8bit, Hardware
from megatrain.tools.command_options import flag
from megatrain.tools.finetune import training_run
from megatrain.tools.finetune.pretrained import Adapters
from megatrain.tools.finetune.train_options import TrainOptions
from tests.comparing import assert_same
from tests.finetune.commands import (
    ROOT,
    data,
    log_of,
    losses_of,
    rows,
    rows_of,
    save_model,
    train,
    weights_of,
    write_lines,
)
from tests.nightly import nightly

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
PAGE = (ROOT / "docs" / "finetuning.md").read_text()
COMMAND = re.compile(r"^ *megatrain train (.*)$", re.MULTILINE)
GIVEN = (
    *("--device=cpu", "--precision=fp32", "--length=16", "--batch=2", "--accumulate=2", "--steps=5", "--lr=1e-2"),
    *("--warmup=2", "--seed=7", "--save-every=3"),
)


class OwnLoss(SFTTrainer):
    """TRL's trainer with the loss that the model computes itself, and all on the CPU at once."""

    compute_loss = transformers.Trainer.compute_loss


class Padded(DataCollatorForLanguageModeling):
    def torch_call(self, examples: Any) -> dict[str, Any]:
        return {name: value for name, value in super().torch_call(examples).items() if name != "attention_mask"}


def stock(kind: type[SFTTrainer], folder: Path, model: Any, name: str, **options: Any) -> Any:
    """The same training by hand: micro-batches of 2 sequences, 2 of them in each of 5 steps."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = SFTConfig(
        str(folder / "stock"), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=5, eval_steps=3,
        gradient_accumulation_steps=2, learning_rate=1e-2, warmup_steps=2, seed=7, logging_steps=1, save_strategy="no",
        eval_strategy="steps", eval_on_start=True, use_cpu=True, prediction_loss_only=True, bf16=False, report_to=[],
        gradient_checkpointing=False, max_length=16, packing=name == "text", packing_strategy="wrapped",
        assistant_only_loss=name == "messages",
    )  # fmt: skip
    trainer = kind(
        model=model, args=arguments, processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=datasets.Dataset.from_list(rows(name)), eval_dataset=datasets.Dataset.from_list(rows(name, 6)),
        **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def both(tmp_path: Path, name: str) -> tuple[Path, Path, list[Any]]:
    """The model's folder, where the trained one is to be, and the command."""
    # Without a padding token the end of a text pads, and is learnt all the same.
    padding = {"pad_token_id": None} if name == "text" else {}
    folder, out = save_model(tmp_path / "model", **padding), tmp_path / "out"
    other = data(tmp_path, name, 6).rename(tmp_path / "other.jsonl")
    return folder, out, [folder, data(tmp_path, name), "--out", out, "--eval", other, *GIVEN]


OFFLOADED = ("--offload", str(ROOT / "tests"), "--host-memory=530KiB")
"""A few KiB less than the training takes with all of its state in memory."""


@pytest.mark.parametrize(
    ("name", "memory", "optimizer", "more"),
    [
        nightly(("text", "1MiB", "adamw", ())),
        nightly(("messages", "200KiB", "adamw8bit", ())),
        nightly(("prompt", "1MiB", "adamw", ())),
        ("messages", "200KiB", "adamw", OFFLOADED),
    ],
)
def test_the_weights_are_trained_as_by_trls_trainer(
    name: str, memory: str, optimizer: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[int](), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: written.append(given[2]) or write(*given))
    folder, out, command = both(tmp_path, name)
    assert train(*command, "--memory", memory, "--optimizer", optimizer, *more) == 0
    assert bool(written) == bool(more)
    model = LlamaForCausalLM.from_pretrained(folder)
    own = {"optimizer_cls_and_kwargs": (AdamW8bit, {"lr": 1e-2})} if optimizer == "adamw8bit" else {}
    expected = stock(OwnLoss, tmp_path, model, name, data_collator=Padded(0, pad_to_multiple_of=16), **own)
    assert log_of(out) == rows_of(expected.state.log_history)
    assert sum("eval_loss" in row for row in log_of(out)) == 3  # before, at step 3, and at the end
    assert_same(weights_of(out), {key: t.detach() for key, t in model.state_dict().items()})
    again = LlamaForCausalLM.from_pretrained(out)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert len(AutoTokenizer.from_pretrained(out)) == 64


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), "--lengths=4"])
def test_the_losses_are_those_of_trls_own_head(more: Any, tmp_path: Path) -> None:
    """Also of micro-batches of a few widths."""
    save_model(tmp_path / "model", attention_dropout=0.0)  # masks draw otherwise
    (tmp_path / "command").mkdir()
    _, out, command = both(tmp_path / "command", "messages")
    assert train(tmp_path / "model", *command[1:], *([more] if more else [])) == 0
    expected = stock(SFTTrainer, tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "model"), "messages")
    for key in ("loss", "eval_loss", "grad_norm"):
        losses = [row[key] for row in log_of(out) if key in row]
        assert losses == pytest.approx([row[key] for row in expected.state.log_history if key in row], rel=1e-4)
        assert len(losses) >= 3


def test_adapters_are_trained_as_by_trls_trainer(tmp_path: Path) -> None:
    folder, out, command = both(tmp_path, "messages")
    assert train(*command, "--lora-rank=2", "--lora-dropout=0.1") == 0
    set_seed(7)
    model = Adapters(2, 4.0, 0.1).onto(LlamaForCausalLM.from_pretrained(folder))
    expected = stock(OwnLoss, tmp_path, model, "messages", data_collator=Padded(0, pad_to_multiple_of=16))
    assert log_of(out) == rows_of(expected.state.log_history)
    again = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), str(out))
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_the_plan_comes_first_and_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, planned, made = training_run._StreamedSFT, list[Any](), list[Any]()

    class Kept(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert "plan: LlamaForCausalLM, 4 blocks" in capsys.readouterr().out
            super().__init__(*args, **kwargs)
            made.append(self)

    plan = training_run.plan
    monkeypatch.setattr(training_run, "plan", lambda *a, **k: planned.append(plan(*a, **k)) or planned[-1])
    monkeypatch.setattr(training_run, "_StreamedSFT", Kept)
    _, _, command = both(tmp_path, "messages")
    assert train(*command, "--memory=200KiB") == 0
    ran, plan_of_it = made[0].train_step.schedule, planned[0].schedule
    assert ran.device_bytes == plan_of_it.device_bytes
    # The number of learnt tokens is one tensor for all micro-batches, and the plan counts one for each.
    assert 0 <= plan_of_it.peak_bytes - ran.peak_bytes <= 8
    assert ticks_of(ran) == ticks_of(plan_of_it) != []


def ticks_of(schedule: Any) -> list[str]:
    """What each tick runs, without its bytes."""
    return re.findall(r"^ +\d+  .*?(?= +\d+$)", str(schedule), re.MULTILINE)


def test_fifty_chats_and_no_option_train_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    assert train(folder, data(tmp_path, "messages", 50), "--out", out) == 0
    losses = [row["eval_loss"] for row in log_of(out) if "eval_loss" in row]
    said = capsys.readouterr().out
    assert "run     24 steps of 2 x 1 sequence; a checkpoint every 3" in said
    assert f"result  held-out loss {losses[-1]:.4f}; before the training {losses[0]:.4f}" in said
    assert losses[-1] < losses[0]


def sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in row["messages"]]
    return {"conversations": turns, "id": "w1"}


def alpaca(row: dict[str, Any]) -> dict[str, Any]:
    asked, answered = (turn["content"] for turn in row["messages"])
    return {"instruction": asked, "input": "", "output": answered}


@pytest.mark.parametrize("kind", [sharegpt, nightly(alpaca)])
def test_common_formats_train_as_chats_do(
    kind: Callable[[dict[str, Any]], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given = save_model(tmp_path / "model"), ("--device=cpu", "--length=16", "--steps=2", "--eval-fraction=0")
    other = write_lines(tmp_path / "other.jsonl", [kind(row) for row in rows("messages", 8)])
    assert train(folder, data(tmp_path, "messages", 8), "--out", tmp_path / "out", *given) == 0
    assert train(folder, other, "--out", tmp_path / "other", *given) == 0
    assert_same(weights_of(tmp_path / "other"), weights_of(tmp_path / "out"))
    assert losses_of(tmp_path / "other") == log_of(tmp_path / "out")
    said = capsys.readouterr().out
    assert "are read as chats" in said
    assert said.count("step    2 of 2 steps: loss ") == 2  # where no terminal shows a bar


@pytest.mark.nightly
def test_micro_batches_are_chosen_for_the_card_and_stay_where_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    command = folder, data(tmp_path, "messages", 90), "--out", out, "--device=cpu", "--epochs=0.2", "--eval-fraction=0"
    monkeypatch.setattr(training_run, "machine_of_card", lambda _: Hardware.preset("rtx-4090"))
    assert train(*command) == 0
    said = capsys.readouterr().out
    assert "run     5 steps of 1 x 4 sequences" in said  # launches bound so small a model
    monkeypatch.undo()  # on another machine
    assert train(*command) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages name."""
    save_model(tmp_path / "model")
    for kind, name in (("messages", "chats.jsonl"), ("prompt", "prompts.jsonl"), ("txt", "book.txt")):
        data(tmp_path, kind, 8).rename(tmp_path / name)
    data(tmp_path, "prompt", 4).rename(tmp_path / "held_out.jsonl")
    (tmp_path / "prompt_set").mkdir()
    data(tmp_path / "prompt_set", "prompt", 8).rename(tmp_path / "prompt_set" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_the_pages_commands_train_and_what_they_leave_is_read(here: Path) -> None:
    commands = COMMAND.findall(PAGE)
    assert len(commands) == 4
    for command in commands:
        assert train(*shlex.split(command), "--device=cpu") == 0
    found: dict[str, Any] = {}
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(snippet, "finetuning.md", "exec"), found)
    ids = torch.arange(8).reshape(1, 8)
    adapted = found["adapted"](ids).logits
    with found["adapted"].disable_adapter():
        assert not torch.equal(adapted, found["adapted"](ids).logits)
    assert len(found["tokenizer"]) == 64
    (command,) = COMMAND.findall((ROOT / "README.md").read_text())
    assert command.partition("#")[0].strip() in commands


def test_the_page_has_each_option() -> None:
    places = {"model", "data", "out"}
    assert [
        flag(each.name) for each in fields(TrainOptions) if each.name not in places and flag(each.name) not in PAGE
    ] == []
