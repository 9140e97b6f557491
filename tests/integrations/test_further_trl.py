"""More scripts with TRL: heads of the rows with labels alone, streams of rows, budgets; the stock run's bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import TrainerCallback

from tests.integrations.runs import Scenario, assert_streams_as_stock, llama
from tests.integrations.test_trl import (
    AGAIN,
    REFERENCE,
    SAMPLED,
    TWO,
    answers,
    lora,
    preferences,
    prompts,
    reward,
    rewarded,
    scenario,
    texts,
    trl,
)
from tests.integrations.test_trl_losses import chats, talks
from tests.integrations.words import text

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
IS_NEW = Version(trl.__version__) >= Version("1.16")
# Older ones can't smooth labels with the loss that they take by default: the stock run fails.
SMOOTHED = {"label_smoothing_factor": 0.1} | ({} if IS_NEW else {"loss_type": "nll"})


def streamed_rows(model: Any) -> Mapping[str, Any]:
    return {"train_dataset": texts().to_iterable_dataset(num_shards=2), "eval_dataset": None}


class Samples(TrainerCallback):
    """Looks at texts between the steps, as TRL's own callbacks do."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, processing_class: Any, **_: Any) -> None:
        ids = processing_class(text(state.global_step, 4), return_tensors="pt")["input_ids"]
        self.found.append(model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist())


def prompted() -> Any:
    torch.manual_seed(0)
    return get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def with_adapter() -> Any:
    torch.manual_seed(0)
    return get_peft_model(llama(), lora())


def shared_head() -> Any:
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules="all-linear", use_rslora=True, init_lora_weights="gaussian"
    )
    torch.manual_seed(0)
    return get_peft_model(llama(), config)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "sft, a stream of rows": lambda: scenario("SFT", texts, more=streamed_rows, options={**TWO, "max_steps": 3}),
    "sft, smoothed": lambda: scenario(
        "SFT", texts, options={**SMOOTHED, **TWO}, reason=AGAIN if IS_NEW else None
    ),
    "sft, texts between the steps": lambda: scenario(
        "SFT", texts, options=TWO, more=lambda model: {"callbacks": [Samples()]},
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, Samples)),
    ),
    "sft, prompts trained": lambda: scenario("SFT", texts, model=prompted, options=TWO),
    "sft, adapted before": lambda: scenario("SFT", answers, model=with_adapter, options={**TWO, **EVALUATED}),
    "sft, all linear": lambda: scenario("SFT", answers, model=shared_head, options={**TWO, "max_grad_norm": 0.1}),
    "sft, by epochs, best at the end": lambda: scenario(
        "SFT", texts,
        options={
            "max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch",
            "load_best_model_at_end": True, "per_device_train_batch_size": 4,
        },
    ),
    "sft, tied": lambda: scenario(
        "SFT", texts, model=lambda: llama(tie_word_embeddings=True),
        options={"optim": "sgd", "lr_scheduler_type": "cosine"},
    ),
    "sft, softcapped and scaled": lambda: scenario("SFT", texts, model=gemma, options=TWO),
    "sft, conversations, tokens of answers": lambda: scenario(
        "SFT", chats, more=lambda model: {**talks(model), "peft_config": lora()},
        options={"max_length": 12, "packing": True, "packing_strategy": "bfd", **TWO, **EVALUATED},
    ),
    "dpo, adapted before": lambda: scenario("DPO", preferences, model=with_adapter, options=TWO, reason=AGAIN),
    "dpo, by epochs": lambda: scenario(
        "DPO", preferences, more=REFERENCE,
        options={"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 5, **TWO, "warmup_steps": 1},
    ),
    "reward, by epochs, saved": lambda: scenario(
        "Reward", preferences, model=reward,
        options={"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch", **TWO},
    ),
    "grpo, adapted before": lambda: scenario("GRPO", prompts, model=with_adapter, more=rewarded(), options=SAMPLED),
}  # fmt: skip


def gemma() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "final_logit_softcapping": 5.0, "use_cache": False,
        "tie_word_embeddings": False, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**sizes))  # pyright: ignore


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_further_script_of_trl_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name](), tmp_path)


@pytest.mark.skipif(not IS_NEW, reason="the fused head came with trl 1.16")
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_head_of_the_rows_with_labels_alone_has_the_stock_runs_bits(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the number of these rows is another for each batch."""
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    found = assert_streams_as_stock(scenario("SFT", answers, options=options), tmp_path)
    print(found.trainer.model)


@pytest.mark.skipif(not IS_NEW, reason="the fused head came with trl 1.16")
def test_the_fused_head_holds_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that the logits of a batch don't fit into, with smaller tiles than TRL's, which are for large cards."""
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 16)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 512)
    words, budget = 8192, 2 << 20
    found = assert_streams_as_stock(
        scenario(
            "SFT", texts, model=lambda: llama(vocab_size=words, hidden_size=8, intermediate_size=16),
            options={"per_device_train_batch_size": 8, "max_length": 16, "packing": True, "max_steps": 2},
            streaming={"memory": budget},
        ),
        tmp_path,
    )  # fmt: skip
    schedule = found.trainer.train_step.schedule
    rows = found.trainer.model.traced.inputs
    print(schedule, rows)
    assert found.trainer.model.megatrain.peak_bytes <= budget < 8 * 15 * words * 4
