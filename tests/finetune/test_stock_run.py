"""`megatrain train` has the numbers of transformers' own Trainer, which computes all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from megatrain.finetune.documents import read_documents
from megatrain.finetune.finished import said_by
from megatrain.finetune.sequences import tokenized
from tests.comparing import assert_same
from tests.finetune.commands import log_of, rows_of, train, weights_of
from tests.finetune.materials import ON_CPU, config, data, save_model
from tests.tiers import wide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]


def stock(folder: Path, model: Any, words: Any, training: Path, evaluation: Path | None) -> Trainer:
    """The same training by hand: micro-batches of 2 sequences, 2 of them in each of 5 steps."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        max_steps=5, learning_rate=1e-2, warmup_steps=2, seed=7, logging_steps=1, save_strategy="no", report_to=[],
        eval_strategy="no" if evaluation is None else "steps", eval_steps=3, use_cpu=True, disable_tqdm=True,
        prediction_loss_only=True, eval_on_start=evaluation is not None,
    )  # fmt: skip
    rows = [tokenized(read_documents(path), words, 16) for path in (training, evaluation) if path is not None]
    for each in rows:
        each.width = 16
    trainer = Trainer(
        model=model, args=arguments, data_collator=default_data_collator, train_dataset=rows[0], eval_dataset=rows[-1]
    )
    optimizer = trainer.create_optimizer()
    rates = [1 / 2, 1, 3 / 3, 2 / 3, 1 / 3, 0]  # the stock schedule's first rate is 0
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    trainer.train()
    return trainer


GIVEN = (*ON_CPU, "--batch=2", "--accumulate=2", "--steps=5", "--lr=1e-2", "--warmup=2", "--seed=7", "--save-every=3")


@pytest.mark.parametrize(("kind", "memory"), [("text", None), ("messages", "200KiB"), wide(("prompt", None))])
def test_the_weights_are_trained_as_by_the_stock_trainer(kind: str, memory: str | None, tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    training = data(tmp_path, kind)
    evaluation = data(tmp_path, "prompt" if kind == "text" else "text", 6)
    budget = [] if memory is None else [f"--memory={memory}"]
    assert train(folder, training, "--out", out, "--eval", evaluation, *GIVEN, *budget) == 0
    model = LlamaForCausalLM.from_pretrained(folder)
    expected = stock(tmp_path / "stock", model, AutoTokenizer.from_pretrained(folder), training, evaluation)
    assert log_of(out) == rows_of(expected.state.log_history)
    assert sum("eval_loss" in row for row in log_of(out)) == 3  # before, at step 3, and at the end
    assert_same(weights_of(out), {name: t.detach() for name, t in model.state_dict().items()})
    again = LlamaForCausalLM.from_pretrained(out)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert len(AutoTokenizer.from_pretrained(out)) == 64


def test_chunks_are_planned_and_trained_as_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, training = save_model(tmp_path / "model"), data(tmp_path, "text", 48)
    given = "--eval-fraction=0", "--batch=32", "--steps=3"
    losses: dict[str, list[float]] = {}
    for way in ("always", "never"):
        out = tmp_path / way
        assert train(folder, training, "--out", out, *GIVEN, *given, f"--chunking={way}") == 0
        assert ("chunked: logits of" in capsys.readouterr().out) == (way == "always")
        losses[way] = [row["loss"] for row in log_of(out) if "loss" in row]
    assert losses["always"] == pytest.approx(losses["never"], rel=1e-5)
    assert len(losses["always"]) == 3


def test_adapters_are_trained_as_by_the_stock_trainer(tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    training = data(tmp_path, "messages")
    assert (
        train(folder, training, "--out", out, *GIVEN, "--lora-rank=2", "--lora-dropout=0.1", "--eval-fraction=0") == 0
    )
    set_seed(7)
    adapters = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")  # pyright: ignore
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder), adapters)
    expected = stock(tmp_path / "stock", model, AutoTokenizer.from_pretrained(folder), training, None)
    assert log_of(out) == rows_of(expected.state.log_history)
    again = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), str(out))
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_random_weights_from_a_config_and_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = save_model(tmp_path / "model")
    (tmp_path / "made").mkdir()
    config().save_pretrained(tmp_path / "made")
    made = [tmp_path / "made" / "config.json", data(tmp_path, "txt"), "--from-config", "--tokenizer", words]
    for name, source in (("one", made), ("two", [made[0].parent, *made[1:]])):
        given = ["--device=cpu", "--length=16", "--steps=2", "--tokens-per-step=32", "--documents"]
        assert train(*source, "--out", tmp_path / name, *given) == 0
    assert_same(weights_of(tmp_path / "one"), weights_of(tmp_path / "two"))
    assert {str(t.dtype) for t in weights_of(tmp_path / "one").values()} == {"torch.bfloat16"}
    assert "plan: LlamaForCausalLM, 4 blocks, 21664 parameters; bf16, 2 micro-batches" in capsys.readouterr().out


def loss_on(model: Path, training: Path) -> float:
    rows = tokenized(read_documents(training), AutoTokenizer.from_pretrained(model), 16)
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [network(**{name: torch.tensor(ids)[None] for name, ids in row.items()}).loss for row in rows]
    return float(torch.stack(losses).mean())


def test_fifty_chats_and_no_option_train_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out, training = save_model(tmp_path / "model"), tmp_path / "out", data(tmp_path, "messages", 50)
    assert train(folder, training, "--out", out) == 0
    rates = [row["learning_rate"] for row in log_of(out) if "loss" in row]
    assert rates == pytest.approx([1e-5, *(1e-5 * (24 - step) / 23 for step in range(1, 24))])
    assert loss_on(out, training) < loss_on(folder, training) - 1e-3
    before, after = (row["eval_loss"] for row in log_of(out) if "eval_loss" in row and row["step"] in (0, 24))
    said = capsys.readouterr().out
    assert f"held-out loss {after:.4f}, perplexity" in said
    assert f"before the training {before:.4f}" in said
    assert "warning" not in said
    assert after < before


def test_a_training_that_changed_nothing_says_so() -> None:
    def said(*losses: float) -> str:
        return said_by({"global_step": 9, "log_history": [{"loss": 2.0}, *({"eval_loss": loss} for loss in losses)]})

    assert said(3.0, 2.5, 2.0).endswith("held-out loss 2.0000, perplexity 7.39; before the training 3.0000")
    assert "warning the held-out loss is what it was: the model has hardly changed.\n" in said(3.0, 2.5, 3.00001)
    assert "--lr" in said(3.0, 3.0)
