"""More of peft: adapters of other models and tasks, optimizers made for adapters, adapters that change in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForSequenceClassification, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from tests.integrations.runs import RAGGED, Scenario, assert_streams_as_stock, llama
from tests.integrations.test_peft import MATRICES, TWO, lora
from tests.integrations.test_peft_kinds import of
from tests.integrations.test_trainer import EVAL, LABELLED, REASSOCIATED, SUMMED, bert, t5

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def around(make: Callable[[], Any], config: Callable[[], Any]) -> Callable[[], Any]:
    def model() -> Any:
        base = make()
        torch.manual_seed(0)
        return get_peft_model(base, config())

    return model


def classifier() -> Any:
    return llama(LlamaForSequenceClassification, num_labels=2)


def by_loraplus(model: Any) -> Mapping[str, Any]:
    from peft.optimizers import create_loraplus_optimizer

    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))}


def by_lorafa(model: Any) -> Mapping[str, Any]:
    from peft.optimizers import create_lorafa_optimizer

    optimizer = create_lorafa_optimizer(model, r=2, lora_alpha=4, lr=0.01)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))}


class Merges(TrainerCallback):
    """Merges the adapters to ask the model, and takes them out again."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.merge_adapter()
        model.eval()
        with torch.no_grad():
            self.found.append(model(input_ids=torch.arange(8)[None]).logits.clone())
        model.train()
        model.unmerge_adapter()


class Adds(TrainerCallback):
    """A new adapter, when the first is trained a little."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step == 2:
            torch.manual_seed(3)
            model.add_adapter("later", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["o_proj"]))
            model.set_adapter("later")
            fresh = [p for p in model.parameters() if p.requires_grad]
            optimizer.add_param_group({"params": fresh})


class Scales(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for module in model.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling = {name: value * 0.5 for name, value in module.scaling.items()}


def callback(kind: Any) -> Any:
    return lambda model: {"callbacks": [kind()]}


def added(model: Any) -> Mapping[str, Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return {"callbacks": [Adds()], "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))}


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def lora_of(task: str, targets: Any = None, **more: Any) -> Callable[[], Any]:
    return lambda: LoraConfig(task_type=task, r=2, target_modules=targets, init_lora_weights="gaussian", **more)


def in_bf16() -> Any:
    return around(lambda: llama().to(torch.bfloat16), lora_of("CAUSAL_LM", MATRICES))()


def checkpointed() -> Any:
    model = lora()()
    model.enable_input_require_grads()
    return model


SCENARIOS: dict[str, Scenario] = {
    "a classifier": Scenario({**TWO, **EVAL, **SAVED}, around(classifier, lora_of("SEQ_CLS", MATRICES)), LABELLED),
    "bert": Scenario({**TWO, **EVAL}, around(bert, lora_of("SEQ_CLS", ["query", "value"])), LABELLED),
    "t5": Scenario(
        {**EVAL, **SAVED}, around(t5, lora_of("SEQ_2_SEQ_LM", ["q", "v"])), kind=Seq2SeqTrainer,
        arguments=Seq2SeqTrainingArguments,
    ),
    "t5, prompts": Scenario(
        {}, around(t5, lambda: peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)),
        kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments,
    ),
    "a classifier, prefix": Scenario(
        {}, around(classifier, lambda: peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)), LABELLED
    ),
    "embeddings and head, tied": Scenario(
        SUMMED, around(tied, lora_of("CAUSAL_LM", ["embed_tokens", "q_proj"])), tolerance=REASSOCIATED
    ),
    "a base in bf16": Scenario(TWO, in_bf16),
    "a base in bf16, autocast": Scenario({**TWO, "bf16": True}, in_bf16),
    "checkpointed": Scenario({**TWO, "gradient_checkpointing": True}, checkpointed),
    "checkpointed, reentrant": Scenario(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, checkpointed
    ),
    "lora+": Scenario(TWO, lora(), more=by_loraplus),
    "lora-fa": Scenario(TWO, lora(), more=by_lorafa),
    "merged to be asked": Scenario(
        TWO, lora(), more=callback(Merges),
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, Merges)),
    ),
    "another adapter, later": Scenario({**TWO, "max_steps": 4}, lora(), more=added),
    "scales changed": Scenario({**TWO, "max_steps": 4}, lora(), more=callback(Scales)),
    "saved in the middle, best at the end": Scenario(
        {**TWO, **SAVED, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}, lora(), RAGGED
    ),
    "smoothed": Scenario({**TWO, "label_smoothing_factor": 0.1}, lora(), RAGGED),
    "neftune": Scenario({**TWO, "neftune_noise_alpha": 5.0}, lora()),
    "eva": Scenario(TWO, lora(init_lora_weights="eva", eva_config=peft.EvaConfig())),
    "multitask prompts": Scenario(
        {"remove_unused_columns": False},
        around(llama, lambda: peft.MultitaskPromptTuningConfig(
            task_type="CAUSAL_LM", num_tasks=2, num_virtual_tokens=2, num_ranks=1)),
        [{**row, "task_ids": torch.tensor(i % 2)} for i, row in enumerate(RAGGED)],
    ),
    "osf": Scenario(TWO, of("OSFConfig", target_modules=MATRICES), reason="`base_model.model.model.layers.0.self_attn"),
    "psoft": Scenario(TWO, of("PsoftConfig", r=2, target_modules=MATRICES)),
    "lily": Scenario(SUMMED, of("LilyConfig", r=2, target_modules=MATRICES), tolerance=REASSOCIATED),  # shared
    "pvera": Scenario(TWO, of("PveraConfig", r=2, target_modules=["q_proj"])),
    "hira": Scenario(TWO, of("HiraConfig", r=2, target_modules=MATRICES)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_adapters_in_a_script_have_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    if name == "hira" and not hasattr(peft, "HiraConfig"):
        pytest.skip("needs a newer peft")
    assert_streams_as_stock(SCENARIOS[name], tmp_path)
