"""Scripts with other libraries' trainers, given a compiled model in place of the model: the stock run's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import megatrain
from tests.comparing import assert_same
from tests.tiers import wide
from tests.tools.models import IDS, llama, values

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]

ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8)]


@pytest.fixture(autouse=True)
def _fresh_state():
    """accelerate keeps the first precision that a process asks for."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def streamed(model: nn.Module, **options: Any) -> Any:
    return megatrain.compile(
        model, device="cpu", transfer="copy", recording=megatrain.Recording(), **options
    )  # fmt: skip


def runs(compiled: Any) -> int:
    """How many forwards and backwards of blocks were issued."""
    return sum(entry.stream == "compute" for entry in compiled.megatrain._recording.issued)


def train(model: nn.Module, folder: Path, **options: Any) -> list[dict[str, Any]]:
    given = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(str(folder), **{"save_strategy": "no", "disable_tqdm": True} | given | options)
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:2])  # pyright: ignore
    trainer.train()
    timings = ("runtime", "per_second", "flos")
    return [{k: v for k, v in row.items() if not any(t in k for t in timings)} for row in trainer.state.log_history]


@pytest.mark.parametrize(
    "options",
    [
        wide({}),
        wide({"label_smoothing_factor": 0.1}),
        wide(ACCUMULATED),
        wide({"eval_strategy": "steps", "eval_steps": 1}),
        {"bf16": True},
        wide({"neftune_noise_alpha": 5.0}),
        {**ACCUMULATED, "label_smoothing_factor": 0.1},
        {"eval_strategy": "steps", "eval_steps": 1, "neftune_noise_alpha": 5.0},
    ],
    ids=str,
)
def test_a_hugging_face_trainer_gets_the_stock_runs_bits(tmp_path: Path, options: dict[str, Any]):
    eager = llama()
    expected = train(eager, tmp_path, **options)
    compiled = streamed(llama())
    found = train(compiled, tmp_path, **options)
    assert found == expected
    assert_same(values(compiled), values(eager))
    assert runs(compiled) > 2 * 2 * len(compiled.program.blocks) - 1


def test_a_trainers_checkpoint_is_a_folder_that_from_pretrained_reads(tmp_path: Path):
    compiled = streamed(llama(is_tied=True))
    train(compiled, tmp_path, save_strategy="steps", save_steps=2)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert_same(values(again), values(compiled))


def test_a_tied_model_is_saved_by_a_trainer_and_resumed(tmp_path: Path):
    train(llama(), tmp_path / "stock", save_strategy="steps", save_steps=1)
    eager = LlamaForCausalLM.from_pretrained(tmp_path / "stock" / "checkpoint-2")
    compiled = streamed(llama())
    train(compiled, tmp_path / "own", save_strategy="steps", save_steps=1)
    assert_same(values(compiled), values(eager))


# -- adapters -------------------------------------------------------------------------------------------------------

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))  # pyright: ignore


def three_steps(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses: list[float] = []
    for number in range(3):
        loss = model(input_ids=(IDS + number) % 64, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_first", [True, False], ids=["adapted first", "compiled first"])
def test_adapters_around_or_inside_a_compiled_model_train_as_in_eager(tmp_path: Path, is_first: bool):
    eager = adapted(llama())
    expected = three_steps(eager)
    if is_first:
        model = compiled = streamed(adapted(llama()))
    else:
        compiled = streamed(llama())
        model = adapted(compiled)
    assert three_steps(model) == expected
    assert runs(compiled)
    assert_same(values(model), values(eager))
    with model.disable_adapter(), eager.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, eager(input_ids=IDS).logits)
    model.save_pretrained(tmp_path)
    found = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert_same(found, {k.replace(".default", ""): t for k, t in values(eager).items() if "lora_" in k})
    again = PeftModel.from_pretrained(llama(), str(tmp_path))
    assert torch.equal(again(input_ids=IDS).logits, eager(input_ids=IDS).logits)
    merged = model.merge_and_unload()
    assert torch.equal(merged(input_ids=IDS).logits, eager.merge_and_unload()(input_ids=IDS).logits)


# -- accelerate -----------------------------------------------------------------------------------------------------


# Without autocast, the trainers above prepare their models by accelerate too.
@pytest.mark.parametrize("precision", [wide("no"), "bf16"])
def test_a_loop_with_accelerate_gets_the_stock_runs_bits(precision: str):
    found: list[Any] = []
    for model in (llama(), streamed(llama())):
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(ROWS, batch_size=2)  # pyright: ignore
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses: list[torch.Tensor] = []
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        plain = accelerator.unwrap_model(prepared)
        assert isinstance(plain, LlamaForCausalLM)
        found.append((losses, values(plain), plain(input_ids=IDS).logits.detach()))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert_same(found[1][1], found[0][1])
    assert torch.equal(found[0][2], found[1][2])
    assert runs(model)
