"""Scripts with peft's adapters under Trainer: a trainer that streams leaves the stock run's bits, and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)

from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, ROWS, Scenario, assert_streams_as_stock, llama

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]

MATRICES = ["q_proj", "v_proj"]
TWO = {"gradient_accumulation_steps": 2}


def adapted(make: Callable[[], Any]) -> Callable[[], Any]:
    def model() -> Any:
        torch.manual_seed(0)
        return get_peft_model(llama(), make())

    return model


def lora(**more: Any) -> Callable[[], Any]:
    given = {"r": 2, "target_modules": MATRICES, "init_lora_weights": "gaussian", **more}
    return adapted(lambda: LoraConfig(task_type="CAUSAL_LM", **given))


def two_adapters() -> Any:
    model = lora()()
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["o_proj"]))
    model.set_adapter("default")
    return model


SCENARIOS: dict[str, Scenario] = {
    "lora": Scenario(TWO, model=lora(), rows=ROWS),
    "lora, dropout": Scenario(TWO, model=lora(lora_dropout=0.1), rows=RAGGED[:4] * 3),
    "rslora, all matrices": Scenario(model=lora(use_rslora=True, target_modules="all-linear")),
    "dora": Scenario(TWO, model=lora(use_dora=True)),
    "lora, a head trained whole": Scenario(TWO, model=lora(modules_to_save=["lm_head"])),
    "lora, bias": Scenario(model=lora(bias="lora_only")),
    "lora, some layers": Scenario(model=lora(layers_to_transform=[1])),
    "lora, embeddings": Scenario(model=lora(target_modules=["embed_tokens", "q_proj"])),
    "two adapters": Scenario(TWO, model=two_adapters),
    "ia3": Scenario(
        TWO, model=adapted(lambda: IA3Config(task_type="CAUSAL_LM", target_modules=MATRICES, feedforward_modules=[]))
    ),
    "loha": Scenario(model=adapted(lambda: LoHaConfig(r=2, target_modules=MATRICES))),
    "vera": Scenario(model=adapted(lambda: VeraConfig(r=2, target_modules=["q_proj"]))),
    "adalora": Scenario(
        model=adapted(lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=MATRICES))
    ),
    "oft": Scenario(model=adapted(lambda: OFTConfig(oft_block_size=8, target_modules=MATRICES))),
    "prompt tuning": Scenario(model=adapted(lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))),
    "prefix tuning": Scenario(model=adapted(lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_adapters_in_a_trainer_that_streams_have_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)


@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "lora, a head trained whole"])
def test_what_is_saved_loads_and_merges_as_the_stock_runs(name: str, tmp_path: Path) -> None:
    saved = Scenario(
        {**SCENARIOS[name].options, "save_strategy": "steps", "save_steps": 3}, model=SCENARIOS[name].model
    )
    found = assert_streams_as_stock(saved, tmp_path).trainer.model
    files = [
        safetensors.torch.load_file(tmp_path / kind / "checkpoint-3" / "adapter_model.safetensors")
        for kind in ("stock", "streams")
    ]
    assert_same(files[1], files[0])
    ids = torch.arange(8).reshape(1, 8)
    found.eval()
    again = PeftModel.from_pretrained(llama(), str(tmp_path / "streams" / "checkpoint-3"))
    assert torch.equal(again(input_ids=ids).logits, found(input_ids=ids).logits)
    with found.disable_adapter():
        assert torch.equal(found(input_ids=ids).logits, llama().eval()(input_ids=ids).logits)
    merged = again.merge_and_unload()  # pyright: ignore
    assert torch.equal(merged(input_ids=ids).logits, found.merge_and_unload()(input_ids=ids).logits)
