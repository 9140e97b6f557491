"""More of TRL: trainers that are rarely used, callbacks, reward models, adapters; the stock run's bits with each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.runs import Scenario, assert_streams_as_stock, llama
from tests.integrations.test_trl import (
    ADAPTED,
    FOUR,
    REFERENCE,
    SAMPLED,
    TWO,
    answers,
    judged,
    lora,
    preferences,
    prompts,
    reward,
    rewarded,
    scenario,
    table,
    texts,
    trl,
)
from tests.integrations.test_trl_losses import TURNS, chats, experimental, talks
from tests.integrations.words import of_bytes, text, tokenizer

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
TEACHER: Any = lambda model: {**talks(model), "teacher_model": llama(num_hidden_layers=1)}  # noqa: E731
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SHORT = {"max_completion_length": 4, "max_length": 64}


def triples() -> Any:
    return table(
        lambda i: {
            "prompt": text(i, 4), "chosen": " " + text(i + 1, 3), "rejected": " " + text(i + 5, 4),
            "reference": " " + text(i + 2, 3),
        }
    )  # fmt: skip


def asked() -> Any:
    return table(lambda i: {"prompt": [{"role": "user", "content": text(i, 4)}]})


def shown() -> Any:
    return table(
        lambda i: {
            "prompt": [{"role": "user", "content": text(i, 4)}], "privileged_context": text(i + 2, 3),
        }
    )  # fmt: skip


def judges(model: Any) -> Mapping[str, Any]:
    """A reward model of the user's."""
    words = tokenizer()
    return {"reward_funcs": reward(), "reward_processing_classes": words}


def grpo(more: Any = None, **options: Any) -> Callable[[], Scenario]:
    return lambda: scenario("GRPO", prompts, more=more or rewarded(), options={**SAMPLED, **options})


def talks_and_rewards(model: Any) -> Mapping[str, Any]:
    return {**talks(model), **rewarded()(model)}


def dora() -> Any:
    config = lora()
    config.use_dora = True
    return config


def wordy() -> Any:
    return llama(vocab_size=300)


TAUGHT: Any = lambda model: {  # noqa: E731
    "processing_class": of_bytes(TURNS), "teacher_model": llama(vocab_size=300, num_hidden_layers=1)
}  # fmt: skip


def named_copy() -> Any:
    """A model that knows where it was read."""
    import tempfile

    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "sft, formatted": lambda: scenario(
        "SFT", answers, more=lambda model: {"formatting_func": lambda row: row["prompt"] + row["completion"]},
        options={"completion_only_loss": False, **TWO},
    ),
    "sft, the loss of all": lambda: scenario("SFT", texts, options={"loss_type": "nll", **TWO, **EVALUATED}),
    "sft, saved and evaluated": lambda: scenario(
        "SFT", texts, options={"save_strategy": "steps", "save_steps": 2, **EVALUATED, **TWO, "max_steps": 4}
    ),
    "sft, packed for evaluation too": lambda: scenario(
        "SFT", texts, options={"packing": True, "eval_packing": True, "max_length": 16, **EVALUATED, **TWO}
    ),
    "sft, shuffled, cut": lambda: scenario("SFT", texts, options={"shuffle_dataset": True, "max_length": 6, **TWO}),
    "sft, dora": lambda: scenario("SFT", texts, more=lambda model: {"peft_config": dora()}, options=TWO),
    "sft, chats, lora, assistant only": lambda: scenario(
        "SFT", chats, more=lambda model: {**talks(model), "peft_config": lora()},
        options={"assistant_only_loss": True, "packing": True, "max_length": 16, **TWO},
    ),
    "dpo, in bf16 with checkpoints": lambda: scenario(
        "DPO", preferences, more=REFERENCE, options={"bf16": True, "gradient_checkpointing": True, **TWO}
    ),
    "dpo, alpha divergence": lambda: scenario(
        "DPO", preferences, more=REFERENCE, options={"f_divergence_type": "alpha_divergence", **TWO}
    ),
    "dpo, smoothed": lambda: scenario("DPO", preferences, more=REFERENCE, options={"label_smoothing": 0.2, **TWO}),
    "dpo, cut": lambda: scenario("DPO", preferences, more=REFERENCE, options={"max_length": 6, **TWO}),
    "dpo, its own copy": lambda: scenario("DPO", preferences, options=TWO, model=named_copy),
    "dpo, saved": lambda: scenario(
        "DPO", preferences, more=REFERENCE, options={"save_strategy": "steps", "save_steps": 2, **TWO, "max_steps": 4}
    ),
    "kto, evaluated": lambda: scenario("KTO", judged, more=REFERENCE, options={**FOUR, **EVALUATED}),
    "kto, accumulation": lambda: scenario("KTO", judged, more=REFERENCE, options={**FOUR, **TWO}),
    "reward, evaluated, dropout off": lambda: scenario(
        "Reward", preferences, model=reward, options={**TWO, **EVALUATED, "disable_dropout": True}
    ),
    "grpo, a model as reward": grpo(judges),
    "grpo, cispo": grpo(loss_type="cispo", epsilon_high=5.0),
    "grpo, sapo": grpo(loss_type="sapo"),
    "grpo, luspo": grpo(loss_type="luspo", importance_sampling_level="sequence"),
    "grpo, two-sided": grpo(delta=1.5, epsilon_high=0.3),
    "grpo, entropy": grpo(entropy_coef=0.01),
    "grpo, evaluated": grpo(**EVALUATED),
    "grpo, head in fp32": grpo(cast_lm_head_to_fp32=True),
    "grpo, sampling": grpo(top_k=5, top_p=0.9, repetition_penalty=1.1, min_p=0.01),
    "grpo, several generations of steps": grpo(steps_per_generation=2, generation_batch_size=None, max_steps=4),
    "grpo, chats": lambda: scenario("GRPO", asked, more=talks_and_rewards, options=SAMPLED),
    "grpo, a reference that follows": lambda: scenario(
        "GRPO", prompts, more=rewarded(), model=named_copy,
        options={**SAMPLED, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
    "grpo, lora with a penalty": lambda: scenario(
        "GRPO", prompts, more=rewarded(peft_config=lora()), options={**SAMPLED, "beta": 0.1}
    ),
    "rloo, lora": lambda: scenario("RLOO", prompts, more=rewarded(peft_config=lora()), options=SAMPLED),
    "rloo, accumulation": lambda: scenario(
        "RLOO", prompts, more=rewarded(), options={**SAMPLED, **TWO, "per_device_train_batch_size": 2},
        reason="the code ahead of the call of the model changes",
    ),
    "gmpo": experimental("GMPO", prompts, more=rewarded(), options=SAMPLED),
    "tpo": experimental("TPO", triples, options=TWO),
    "orpo, lora": experimental("ORPO", preferences, more=ADAPTED, options=TWO),
    "gkd, on its own texts": experimental("GKD", chats, more=TEACHER, options={"lmbda": 1.0, "max_new_tokens": 4}),
    "gold": experimental(
        "GOLD", chats, more=TAUGHT, model=wordy, options={**SHORT, "use_uld_loss": False, "lmbda": 0.0}
    ),
    "gold, on its own texts": experimental(
        "GOLD", chats, more=TAUGHT, model=wordy, options={**SHORT, "use_uld_loss": False, "lmbda": 1.0}
    ),
    "gold, accumulation": experimental(
        "GOLD", chats, more=TAUGHT, model=wordy, options={**SHORT, **TWO, "use_uld_loss": False, "lmbda": 0.5},
        reason="the code ahead of the call of the model changes",
    ),
    "a2po": experimental("A2PO", prompts, more=rewarded(), options={**FOUR, "max_completion_length": 4}),
    "online dpo": experimental(
        "OnlineDPO", prompts, options={"max_new_tokens": 4}, folder="online_dpo",
        more=lambda model: {**rewarded()(model), "ref_model": llama()},
    ),
    "sdft": experimental(
        "SDFT", shown, more=talks, model=named_copy, reason=None,
        options={"max_completion_length": 4, "num_generations": 1, "distillation_topk": 8},
    ),
    "callbacks of trl": lambda: scenario(
        "SFT", texts, options={**TWO, "max_steps": 4},
        more=lambda model: {"callbacks": [trl.BEMACallback(update_freq=1)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_of_trl_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name](), tmp_path)
