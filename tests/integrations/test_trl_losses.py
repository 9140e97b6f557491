"""Losses and options of TRL's trainers: a trainer that streams leaves the stock run's bits with each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.integrations.runs import Scenario, assert_streams_as_stock, llama
from tests.integrations.test_trl import (
    ADAPTED,
    AGAIN,
    FOUR,
    REFERENCE,
    SAMPLED,
    TWO,
    answers,
    assert_generated,
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
from tests.integrations.words import text, tokenizer

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]

TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w1 {% generation %}{{ m['content'] }} </s> "
    "{% endgeneration %}{% else %}w2 {{ m['content'] }} {% endif %}{% endfor %}"
)


def chats() -> Any:
    def row(index: int) -> Mapping[str, Any]:
        turns = [("user", text(index, 3)), ("assistant", text(index + 1, 2 + index % 4))]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    return table(row)


def margins() -> Any:
    rows = preferences()
    return rows.add_column("margin", [0.1 * i for i in range(len(rows))])


def talks(model: Any) -> Mapping[str, Any]:
    words = tokenizer()
    words.chat_template = TURNS
    return {"processing_class": words}


def dpo(loss: Any, **options: Any) -> Callable[[], Scenario]:
    return lambda: scenario("DPO", preferences, more=REFERENCE, options={**TWO, "loss_type": loss, **options})


def experimental(
    kind: str, rows: Callable[[], Any], *, more: Any = None, options: Any = None, folder: str = "", **fields: Any
) -> Any:
    """A script of a trainer that TRL calls experimental."""

    def made() -> Scenario:
        module: Any = importlib.import_module(f"trl.experimental.{folder or kind.lower()}")
        return Scenario(
            {"bf16": False, **(options or {})}, rows=rows(), kind=getattr(module, f"{kind}Trainer"),
            arguments=getattr(module, f"{kind}Config"),
            more=lambda model: {"processing_class": tokenizer(), **({} if more is None else more(model))}, **fields,
        )  # fmt: skip

    return made


def grpo(**options: Any) -> Callable[[], Scenario]:
    return lambda: scenario("GRPO", prompts, more=rewarded(), options={**SAMPLED, **options})


LOSSES = (
    "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "sft", "sigmoid_norm",
)  # fmt: skip

SCENARIOS: dict[str, Callable[[], Scenario]] = {
    **{
        f"dpo, {loss}": dpo(loss, **({"label_smoothing": 0.1} if loss in ("exo_pair", "robust") else {}))
        for loss in LOSSES
    },
    "dpo, of several": dpo(["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "dpo, of another divergence": dpo("sigmoid", f_divergence_type="js_divergence"),
    "dpo, verbose tokens weigh less": dpo("sigmoid", ld_alpha=0.5),
    "dpo, weighted": dpo("sigmoid", use_weighting=True),
    "dpo, a reference that follows": lambda: scenario(
        "DPO", preferences, more=REFERENCE,
        options={"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    ),
    "dpo, evaluated": lambda: scenario(
        "DPO", preferences, more=REFERENCE, options={**TWO, "eval_strategy": "steps", "eval_steps": 2}
    ),
    "dpo, padding-free": lambda: scenario("DPO", preferences, more=REFERENCE, options={"padding_free": True}),
    "dpo, lora, reference ahead": lambda: scenario(
        "DPO", preferences, more=ADAPTED, options={"precompute_ref_log_probs": True, **TWO}
    ),
    "kto, apo": lambda: scenario(
        "KTO", judged, more=REFERENCE, options={**FOUR, "loss_type": "apo_zero_unpaired", "desirable_weight": 1.5}
    ),
    "kto, reference ahead": lambda: scenario(
        "KTO", judged, more=REFERENCE, options={**FOUR, "precompute_ref_log_probs": True}
    ),
    "reward, margins": lambda: scenario("Reward", margins, model=reward, options=TWO),
    "reward, centred": lambda: scenario(
        "Reward", preferences, model=reward, options={"center_rewards_coefficient": 0.1, **TWO}
    ),
    "sft, assistant only": lambda: scenario(
        "SFT", chats, more=talks, options={"assistant_only_loss": True, **TWO}
    ),
    "sft, chats": lambda: scenario("SFT", chats, more=talks, options={"eval_strategy": "steps", "eval_steps": 2}),
    "sft, chats packed": lambda: scenario(
        "SFT", chats, more=talks, options={"packing": True, "packing_strategy": "wrapped", "max_length": 12}
    ),
    "sft, completions alone": lambda: scenario("SFT", answers, options={"completion_only_loss": True, **TWO}),
    "sft, padded to a multiple": lambda: scenario("SFT", texts, options={"pad_to_multiple_of": 8, **TWO}),
    "sft, its own loss": lambda: scenario(
        "SFT", texts, options=TWO, reason=AGAIN,
        more=lambda model: {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None:
                            outputs.logits.float().logsumexp(-1).mean()},
    ),
    "sft, balanced experts": lambda: scenario("SFT", texts, model=experts),
    "sft, lora, a head trained whole": lambda: scenario(
        "SFT", texts, more=lambda model: {"peft_config": lora_of_head()}, options=TWO
    ),
    "sft, evaluated with metrics": lambda: scenario(
        "SFT", texts, options={"eval_strategy": "steps", "eval_steps": 1, **TWO},
        more=lambda model: {"compute_metrics": lambda found: {"mean": float(found.predictions.mean())}},
    ),
    "grpo, bnpo": grpo(loss_type="bnpo"),
    "grpo, dr": grpo(loss_type="dr_grpo", scale_rewards="none"),
    "grpo, two iterations": grpo(num_iterations=2, max_steps=4),
    "grpo, of sequences": grpo(importance_sampling_level="sequence", mask_truncated_completions=True),
    "grpo, of uncertain tokens": grpo(top_entropy_quantile=0.5),
    "grpo, two rewards": lambda: scenario(
        "GRPO", prompts, options={**SAMPLED, "reward_weights": [1.0, 0.5]},
        more=lambda model: {"reward_funcs": [lambda completions, **_: [-float(len(c)) for c in completions],
                                             lambda completions, **_: [float(c.count("w1")) for c in completions]]},
    ),
    "rloo": lambda: scenario("RLOO", prompts, more=rewarded(), options=SAMPLED),
    "cpo": experimental("CPO", preferences, options=TWO),
    "cpo, simpo": experimental("CPO", preferences, options={"loss_type": "simpo", "cpo_alpha": 0.0}),
    "orpo": experimental("ORPO", preferences, options=TWO),
    "gkd": experimental(
        "GKD", chats, more=lambda model: {**talks(model), "teacher_model": llama(num_hidden_layers=1)},
        options={"lmbda": 0.0, **TWO}, reason="the loss draws random numbers before it calls the model",
    ),
}  # fmt: skip


def lora_of_head() -> Any:
    config = lora()
    config.modules_to_save = ["lm_head"]
    return config


def experts() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
        "output_router_logits": True, "use_cache": False,
    }  # fmt: skip
    import torch

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes))  # pyright: ignore


# TRL 1.10's own runs end with an AttributeError, or give metrics another shape.
OF_NEWER = ("sft, its own loss", "sft, evaluated with metrics")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_loss_of_trl_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    if name in OF_NEWER and Version(trl.__version__) < Version("1.16"):
        pytest.skip("needs trl 1.16")
    found = assert_streams_as_stock(SCENARIOS[name](), tmp_path)
    if name.startswith(("grpo", "rloo")):
        assert_generated(found)
