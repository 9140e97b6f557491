"""Scripts with TRL's trainers: a trainer that streams leaves the stock run's bits. Needs `pip install -e .[users]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import megatrain
from tests.integrations.runs import Ran, Scenario, assert_streams_as_stock, llama
from tests.integrations.words import text, tokenizer

trl = pytest.importorskip("trl", reason="needs trl: pip install -e .[users]")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


def table(row: Callable[[int], Mapping[str, Any]]) -> Any:
    return datasets.Dataset.from_list([dict(row(number)) for number in range(16)])


def texts() -> Any:
    return table(lambda i: {"text": text(i, 5 + i % 7)})


def answers() -> Any:
    return table(lambda i: {"prompt": text(i, 4), "completion": " " + text(i + 1, 3 + i % 4)})


def preferences() -> Any:
    return table(
        lambda i: {"prompt": text(i, 4), "chosen": " " + text(i + 1, 3 + i % 4), "rejected": " " + text(i + 5, 4)}
    )


def judged() -> Any:
    return table(lambda i: {"prompt": text(i, 4), "completion": " " + text(i + 1, 3 + i % 4), "label": bool(i % 2)})


def reward(**config: Any) -> Any:
    return llama(LlamaForSequenceClassification, num_labels=1, **config)


def lora(task: str = "CAUSAL_LM") -> Any:
    return LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def scenario(name: str, rows: Callable[[], Any], *, more: Any = None, options: Any = None, **fields: Any) -> Scenario:
    """A script of `trl.<name>Trainer`."""
    return Scenario(
        {"bf16": False, **(options or {})},
        rows=rows(),
        kind=getattr(trl, f"{name}Trainer"),
        arguments=getattr(trl, f"{name}Config"),
        more=lambda model: {"processing_class": tokenizer(), **({} if more is None else more(model))},
        **fields,
    )


def named(folder: Path) -> Any:
    """A model that was read from a folder, from where TRL reads its reference."""
    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


TWO = {"gradient_accumulation_steps": 2}
FOUR = {"per_device_train_batch_size": 4}
ADAPTED: Any = lambda model: {"peft_config": lora()}  # noqa: E731
REFERENCE: Any = lambda model: {"ref_model": llama()}  # noqa: E731
STREAMED_REFERENCE: Any = lambda model: {"ref_model": megatrain.compile(llama(), device="cpu", transfer="copy")}  # noqa: E731
AGAIN = "the loss calls the model more than once"

SAMPLED = {
    "num_generations": 2, "max_completion_length": 4, "temperature": 1.0, "generation_batch_size": 4, "beta": 0.0,
    "per_device_train_batch_size": 4,
}  # fmt: skip


def rewarded(**more: Any) -> Callable[[Any], Mapping[str, Any]]:
    """Short answers are good ones."""
    return lambda model: {"reward_funcs": lambda completions, **_: [-float(len(c)) for c in completions], **more}


def prompts() -> Any:
    return table(lambda i: {"prompt": text(i, 4)})


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "grpo": lambda: scenario("GRPO", prompts, more=rewarded(), options=SAMPLED),
    "grpo, lora": lambda: scenario("GRPO", prompts, more=rewarded(peft_config=lora()), options=SAMPLED),
    "grpo, accumulation": lambda: scenario(
        "GRPO",
        prompts,
        more=rewarded(),
        options={**SAMPLED, **TWO, "per_device_train_batch_size": 2},
        reason="the code ahead of the call of the model changes",
    ),
    "sft": lambda: scenario("SFT", texts),
    "sft, accumulation": lambda: scenario("SFT", texts, options=TWO),
    "sft, packing": lambda: scenario("SFT", texts, options={"packing": True, "max_length": 16}),
    "sft, padding-free": lambda: scenario("SFT", texts, options={"padding_free": True, "max_length": None, **TWO}),
    "sft, completions": lambda: scenario("SFT", answers, options={"eval_strategy": "steps", "eval_steps": 2}),
    "sft, all tokens of answers": lambda: scenario("SFT", answers, options={"completion_only_loss": False, **TWO}),
    "sft, bf16": lambda: scenario("SFT", texts, options={"bf16": True}),
    "sft, dft": lambda: scenario("SFT", texts, options={"loss_type": "dft", **TWO}),
    "sft, its defaults": lambda: scenario("SFT", texts, options={"bf16": True, "gradient_checkpointing": True}),
    "sft, lora": lambda: scenario("SFT", texts, more=ADAPTED, options=TWO),
    "sft, neftune": lambda: scenario("SFT", texts, options={"neftune_noise_alpha": 5.0, **TWO}),
    "dpo, reference": lambda: scenario("DPO", preferences, more=REFERENCE, options=TWO),
    "dpo, reference ahead": lambda: scenario(
        "DPO", preferences, more=REFERENCE, options={"precompute_ref_log_probs": True, **TWO}
    ),
    "dpo, a reference that streams": lambda: scenario("DPO", preferences, more=STREAMED_REFERENCE, options=TWO),
    "dpo, ipo": lambda: scenario("DPO", preferences, more=REFERENCE, options={"loss_type": "ipo"}),
    "dpo, lora": lambda: scenario("DPO", preferences, more=ADAPTED, reason=AGAIN),
    "kto, reference": lambda: scenario("KTO", judged, more=REFERENCE, options=FOUR),
    "kto, lora": lambda: scenario("KTO", judged, more=ADAPTED, options=FOUR, reason=AGAIN),
    "reward": lambda: scenario("Reward", preferences, model=reward, options=TWO),
    "reward, lora": lambda: scenario(
        "Reward", preferences, model=reward, more=lambda model: {"peft_config": lora("SEQ_CLS")}
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trainer_of_trl_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    found = assert_streams_as_stock(SCENARIOS[name](), tmp_path)
    if name.startswith("grpo"):
        assert_generated(found)


def assert_generated(found: Ran) -> None:
    walk = found.trainer.model.megatrain.walks.latest
    assert walk.what == "generate()"
    assert walk.num_prefetches > 20


def test_grpo_with_a_reference_that_it_reads_again(tmp_path: Path) -> None:
    options = {**SAMPLED, "beta": 0.1}
    model = lambda: named(tmp_path / "model")  # noqa: E731
    assert_generated(
        assert_streams_as_stock(scenario("GRPO", prompts, more=rewarded(), options=options, model=model), tmp_path)
    )


def test_a_trainer_of_trl_loads_a_model_by_its_name(tmp_path: Path) -> None:
    named(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    found = scenario("SFT", texts, more=lambda model: {"model": str(tmp_path / "model")}, options=TWO)
    assert_streams_as_stock(found, tmp_path)


def test_dpo_reads_its_reference_from_where_the_model_came(tmp_path: Path) -> None:
    found = scenario("DPO", preferences, model=lambda: named(tmp_path / "model"))
    assert_streams_as_stock(found, tmp_path)
