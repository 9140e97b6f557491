"""Scripts and files of other libraries, given a compiled model in place of the model: the stock run's bits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import megatrain
from tests.comparing import assert_same
from tests.tools.models import IDS, llama, values

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8)]


@pytest.fixture(autouse=True)
def _fresh_state():
    """accelerate keeps the first precision that a process asks for."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def streamed(model: nn.Module, **options: Any) -> Any:
    return megatrain.compile(
        model, device="cpu", **{"transfer": "copy", "recording": megatrain.Recording(), **options}
    )  # fmt: skip


def runs(compiled: Any) -> int:
    """How many forwards and backwards of blocks were issued."""
    return sum(entry.stream == "compute" for entry in compiled.megatrain._recording.issued)


def train(model: nn.Module, folder: Path) -> list[dict[str, Any]]:
    arguments = TrainingArguments(
        str(folder), max_steps=2, logging_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, gradient_accumulation_steps=2, max_grad_norm=0.5, lr_scheduler_type="cosine", bf16=True,
        eval_strategy="steps", eval_steps=1, label_smoothing_factor=0.1, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:2])  # pyright: ignore
    trainer.train()
    timings = ("runtime", "per_second", "flos")
    return [{k: v for k, v in row.items() if not any(t in k for t in timings)} for row in trainer.state.log_history]


def test_a_hugging_face_trainer_gets_the_stock_runs_bits_and_its_checkpoint_is_read(tmp_path: Path):
    eager, compiled = llama(is_tied=True), streamed(llama(is_tied=True))
    assert train(compiled, tmp_path / "own") == train(eager, tmp_path / "stock")
    assert_same(values(compiled), values(eager))
    assert runs(compiled) > 2 * 2 * len(compiled.program.blocks) - 1
    again = LlamaForCausalLM.from_pretrained(tmp_path / "own" / "checkpoint-2")
    assert_same(values(again), values(compiled))


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(1)
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))  # pyright: ignore


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


@pytest.mark.parametrize(
    "is_first",
    [pytest.param(True, marks=pytest.mark.nightly), False],
    ids=["adapted first", "compiled first"],
)
def test_adapters_around_or_inside_a_compiled_model_train_as_in_eager(tmp_path: Path, is_first: bool):
    eager = adapted(llama())
    expected = three_steps(eager)
    compiled = streamed(adapted(llama()) if is_first else llama())
    model = compiled if is_first else adapted(compiled)
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


# -- files: every tensor, and each tensor alone ----------------------------------------------------------------------


def trained(model: nn.Module, **options: Any) -> Any:
    """Compiles a model and takes one step, so that its state lies in the host store."""
    compiled = streamed(model, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    megatrain.TrainStep(compiled, optimizer)({"input_ids": IDS, "labels": IDS})
    return compiled


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize(
    "options", [{"transfer": "bind"}, pytest.param({"precision": "bf16"}, marks=pytest.mark.nightly)], ids=str
)
def test_each_tensor_of_state_has_a_storage_of_its_own_bytes(options: dict[str, Any]):
    model = llama()
    trained(model, **options)
    storages = [tensor.untyped_storage() for tensor in model.state_dict().values()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [t.nbytes for t in model.state_dict().values()]
    weight = model.model.norm.weight.detach()
    assert saved_bytes({"weight": weight}) == saved_bytes({"weight": weight.clone()})
