"""QLoRA as scripts do it: a quantized base under the trainers of transformers and TRL, with the stock run's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig, Trainer, TrainingArguments

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import GIVEN, RAGGED, llama, streamed_kind
from tests.integrations.words import tokenizer

trl: Any = pytest.importorskip("trl", reason="needs trl: pip install -e .[users]")
ao: Any = pytest.importorskip("torchao.quantization")
pytest.importorskip("bitsandbytes")

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
TWO = {"gradient_accumulation_steps": 2}


def base(folder: Path, kind: str) -> Any:
    llama(hidden_size=64, intermediate_size=64).save_pretrained(folder)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantization: Any = TorchAoConfig(ao.Int8WeightOnlyConfig()) if kind == "torchao" else nf4
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


def lora() -> Any:
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian")


def with_trainer(folder: Path, kind: str, checkpointed: bool) -> Any:
    """What the guides for QLoRA say."""
    model = prepare_model_for_kbit_training(base(folder, kind), use_gradient_checkpointing=checkpointed)
    torch.manual_seed(1)
    options = {**GIVEN, **TWO, "gradient_checkpointing": checkpointed, "save_strategy": "steps", "save_steps": 2}
    arguments = TrainingArguments(str(folder / "run"), **options)
    return Trainer, {"model": get_peft_model(model, lora()), "args": arguments, "train_dataset": RAGGED}


def with_trl(name: str, folder: Path, kind: str, **options: Any) -> Any:
    """TRL makes the adapters."""
    from tests.integrations import test_trl

    rows = {"SFT": test_trl.texts, "DPO": test_trl.preferences}[name]()
    arguments = getattr(trl, f"{name}Config")(str(folder / "run"), **{**GIVEN, **TWO, "bf16": False, **options})
    torch.manual_seed(1)
    given = {"model": base(folder, kind), "args": arguments, "train_dataset": rows, "peft_config": lora()}
    return getattr(trl, f"{name}Trainer"), {**given, "processing_class": tokenizer()}


CASES: dict[str, Callable[[Path], Any]] = {
    "nf4, trainer": lambda folder: with_trainer(folder, "bitsandbytes", False),
    "nf4, trainer, checkpoints": lambda folder: with_trainer(folder, "bitsandbytes", True),
    "int8, trainer": lambda folder: with_trainer(folder, "torchao", False),
    "nf4, sft": lambda folder: with_trl("SFT", folder, "bitsandbytes"),
    "nf4, sft, packed": lambda folder: with_trl("SFT", folder, "bitsandbytes", packing=True, max_length=16),
    "int8, sft": lambda folder: with_trl("SFT", folder, "torchao"),
    "nf4, dpo": lambda folder: with_trl("DPO", folder, "bitsandbytes"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_script_of_qlora_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    found: list[Any] = []
    recording = megatrain.Recording()
    for streams in (False, True):
        torch.manual_seed(0)
        kind, given = CASES[name](tmp_path / str(streams))
        options: dict[str, Any] = {"megatrain_memory": "4MiB", "megatrain_recording": recording} if streams else {}
        trainer = (streamed_kind(kind) if streams else kind)(**given, **options)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        log = [(row.get("loss"), row.get("grad_norm"), row.get("learning_rate")) for row in trainer.state.log_history]
        adapters = {k: p.detach().clone() for k, p in trainer.model.named_parameters() if p.requires_grad}
        files = sorted(path.name for path in (tmp_path / "saved").iterdir())
        found.append((log, adapters, files))
        if streams:
            assert (trainer._one_step.reason is None) == (name != "nf4, dpo"), trainer._one_step.reason
            assert trainer.model.megatrain.peak_bytes <= 4 << 20
    assert_same(found[1], found[0])
    assert sum(entry.stream == "compute" for entry in recording.issued) > 0
