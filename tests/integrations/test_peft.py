"""Scripts with peft's adapters under Trainer: a trainer that streams leaves the stock run's bits, and files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model

from megatrain.errors import TraceError
from tests.integrations.runs import (
    RAGGED,
    REASSOCIATED,
    SUMMED,
    TWO,
    Scenario,
    assert_streams_as_stock,
    kept,
    llama,
    on,
    run,
)
from tests.integrations.test_trainer import tied

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),
]
MATRICES = ["q_proj", "v_proj"]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FOUR = {**TWO, "max_steps": 4}


def around(make: Callable[[], Any], kind: str, **options: Any) -> Callable[[], Any]:
    """A model with adapters."""

    def model() -> Any:
        base = make()
        torch.manual_seed(0)
        return get_peft_model(base, getattr(peft, kind)(**{"task_type": "CAUSAL_LM", **options}))

    return model


def of(kind: str, **options: Any) -> Callable[[], Any]:
    """Llama with adapters of a class."""
    return around(llama, kind, **options)


def lora(make: Callable[[], Any] = llama, **more: Any) -> Callable[[], Any]:
    return around(
        make, "LoraConfig", **{"r": 2, "target_modules": MATRICES, "init_lora_weights": "gaussian", **more}
    )  # fmt: skip


def other(**more: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["o_proj"], **more)


def two() -> Any:
    made = lora()()
    made.add_adapter("other", other())
    return made


def checkpointed() -> Any:
    model = lora()()
    model.enable_input_require_grads()
    return model


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "GptOss": {"num_local_experts": 4},
}


def experts(kind: str = "Qwen3Moe", **config: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**copy.deepcopy({**SIZES, **EXPERTS[kind], **config}))
    return getattr(transformers, f"{kind}ForCausalLM")(made)


def of_stacks(kind: str = "Qwen3Moe", config: Any = None, **more: Any) -> Callable[[], Any]:
    """peft's `target_parameters=`: adapters of stacked experts, which parametrize modules within each forward."""
    given = {"target_modules": [], "target_parameters": BOTH, "init_lora_weights": False, **more}
    return lora(lambda: experts(kind, **(config or {})), **given)


# -- callbacks and optimizers -----------------------------------------------------------------------------------------


def allocates(*, state: Any, model: Any, **_: Any) -> None:
    """What AdaLoRA wants of a loop: ranks follow the gradients."""
    model.base_model.update_and_allocate(state.global_step)


def switches(*, state: Any, model: Any, **_: Any) -> None:
    """Trains one adapter, then another; and scales what they add."""
    model.set_adapter("other" if state.global_step % 2 else "default")
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: value * 0.5 for name, value in module.scaling.items()}


def looks(*, model: Any, **_: Any) -> list[torch.Tensor]:
    """Asks the base alone between the steps, and what the adapters are merged into."""
    ids, found = torch.arange(8)[None], list[torch.Tensor]()
    model.eval()
    with torch.no_grad(), model.disable_adapter():
        found.append(model(input_ids=ids).logits)
    model.merge_adapter()
    with torch.no_grad():
        found.append(model(input_ids=ids).logits.clone())
    model.train()
    model.unmerge_adapter()
    return found


def adds(*, state: Any, model: Any, optimizer: Any, **_: Any) -> None:
    """A new adapter, when the first is trained a little."""
    if state.global_step == 2:
        torch.manual_seed(3)
        model.add_adapter("later", other())
        model.set_adapter("later")
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})


def with_adamw(act: Any) -> Any:
    """The optimizer has all adapters, as it must: the trainer's own has what is trained when it is made."""

    def more(model: Any) -> Mapping[str, Any]:
        adapters = [p for name, p in model.named_parameters() if "lora_" in name]
        optimizer = torch.optim.AdamW(adapters, lr=0.01)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {**on("step_end", act)(model), "optimizers": (optimizer, rates)}

    return more


ADALORA: dict[str, Any] = {"init_r": 4, "target_r": 2, "total_step": 4, "tinit": 1, "tfinal": 1}
SCENARIOS: dict[str, Scenario] = {
    "lora, dropout": Scenario(TWO, lora(lora_dropout=0.1), RAGGED[:4] * 3),
    "dora": Scenario(TWO, lora(use_dora=True, lora_dropout=0.2)),
    "a head trained whole, biases": Scenario(TWO, lora(modules_to_save=["lm_head"], bias="lora_only")),
    "embeddings, tied": Scenario(
        SUMMED, lora(tied, target_modules=["embed_tokens", "q_proj"]), tolerance=REASSOCIATED
    ),
    "one, then the other": Scenario(FOUR, two, more=with_adamw(switches)),
    "another adapter, later": Scenario(FOUR, lora(), more=with_adamw(adds)),
    "asked without, and merged": Scenario(TWO, lora(), more=on("step_end", looks), after=kept),
    "checkpointed, reentrant": Scenario(
        {**TWO, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, checkpointed
    ),
    "adalora, allocated": Scenario(
        {"max_steps": 4}, of("AdaLoraConfig", target_modules=MATRICES, **ADALORA),
        more=on("optimizer_step", allocates), reason="the callback allocates may read gradients after",
    ),
    **{f"stacks of {kind}": Scenario(TWO, of_stacks(kind)) for kind in EXPERTS},
    "stacks, checkpoints, blocks of one layer": Scenario(
        {**TWO, "gradient_checkpointing": True}, of_stacks(config={"output_router_logits": True}),
        streaming={"block_bytes": 1},
    ),
}  # fmt: skip
# transformers refuses an older peft.
OF_NEWER = ("by transformers",)


@pytest.mark.parametrize("name", SCENARIOS)
def test_adapters_in_a_trainer_that_streams_have_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    if name in OF_NEWER and Version(peft.__version__) < Version("0.19.1"):
        pytest.skip("needs peft 0.19.1")
    found = assert_streams_as_stock(SCENARIOS[name], tmp_path)
    assert "stacks" not in name or not found.trainer.model.program.opaque_calls


def test_a_kind_whose_forward_replaces_its_parameter_is_refused(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}
    with pytest.raises(TraceError, match="the model gives a parameter other memory in the forward of `prompt_encoder"):
        run(Scenario({}, of("CPTConfig", **tokens)), tmp_path, streams=True)


# peft 0.19's own loading of adapters of parameters ends with a TypeError of transformers, in the stock run, too.
@pytest.mark.parametrize(
    ("make", "base"),
    [(lora(use_dora=True, modules_to_save=["lm_head"]), llama), (of_stacks(target_modules=["q_proj"]), experts)],
    ids=["dora and a head", "stacks"],
)
def test_what_is_saved_loads_and_merges_as_the_stock_runs(make: Any, base: Any, tmp_path: Path) -> None:
    if base is experts and Version(peft.__version__) < Version("0.20"):
        pytest.skip("needs a newer peft")
    script = Scenario({"save_strategy": "steps", "save_steps": 3}, make)
    found = assert_streams_as_stock(script, tmp_path).trainer.model
    ids = torch.arange(8).reshape(1, 8)
    found.eval()
    again: Any = PeftModel.from_pretrained(base(), str(tmp_path / "streams" / "checkpoint-3"))
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, found(input_ids=ids).logits)
        with found.disable_adapter():
            assert torch.equal(found(input_ids=ids).logits, base().eval()(input_ids=ids).logits)
        for model in (found, again):
            model.merge_adapter()
        assert torch.equal(again(input_ids=ids).logits, found(input_ids=ids).logits)
        for model in (found, again):
            model.unmerge_adapter()
        merged = again.merge_and_unload()
        assert torch.equal(merged(input_ids=ids).logits, found.merge_and_unload()(input_ids=ids).logits)


def test_experts_of_a_python_loop_run_their_own_code_with_the_stock_runs_bits(tmp_path: Path) -> None:
    model = of_stacks("Mixtral", {"experts_implementation": "eager", "num_hidden_layers": 1})
    found = assert_streams_as_stock(Scenario({"max_steps": 12}, model, RAGGED * 2), tmp_path)
    opaque = [call.name for call in found.trainer.model.program.opaque_calls]
    assert opaque == ["base_model.model.model.layers.0.mlp.experts"]  # and not the experts alone, without adapters
