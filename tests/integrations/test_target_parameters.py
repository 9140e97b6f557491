"""peft's `target_parameters=`: adapters of stacked experts, which parametrize modules within each forward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model

import megatrain
from megatrain.errors import TooSmallError
from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, Scenario, assert_streams_as_stock, run
from tests.integrations.test_peft_kinds import Looks, callback
from tests.integrations.test_resume import assert_same_run

pytest.importorskip("trl", reason="needs trl: pip install -e .[users]")
from tests.integrations.test_trl import AGAIN, preferences, scenario, texts

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]

TWO = {"gradient_accumulation_steps": 2}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "GptOss": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4},
}


def base(kind: str = "Qwen3Moe", **config: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**copy.deepcopy({**SIZES, **EXPERTS[kind], **config}))
    return getattr(transformers, f"{kind}ForCausalLM")(made)


def adapter(parameters: list[str] = BOTH, **more: Any) -> LoraConfig:
    given = {"r": 2, "target_modules": [], "init_lora_weights": False, **more}
    return LoraConfig(task_type="CAUSAL_LM", target_parameters=parameters, **given)


def adapted(kind: str = "Qwen3Moe", config: Any = None, **more: Any) -> Callable[[], Any]:
    return lambda: get_peft_model(base(kind, **(config or {})), adapter(**more))


def two_adapters() -> Any:
    model = adapted()()
    torch.manual_seed(1)
    try:
        model.add_adapter("other", adapter(r=3))
    except ValueError as error:  # of peft 0.18
        pytest.skip(str(error))
    model.base_model.set_adapter(["default", "other"])
    return model


def merged_then_again() -> Any:
    return get_peft_model(adapted()().merge_and_unload(), adapter())


EVALUATED = {**TWO, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
SCENARIOS: dict[str, Scenario] = {
    **{kind: Scenario(TWO, adapted(kind)) for kind in EXPERTS},
    "evaluated and saved": Scenario(EVALUATED, adapted(), RAGGED),
    "one of two": Scenario(TWO, adapted(parameters=BOTH[1:])),
    "with modules": Scenario(TWO, adapted(target_modules=["q_proj", "v_proj"])),
    "with modules and the head": Scenario(TWO, adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "of two dimensions": Scenario(TWO, adapted(parameters=["mlp.gate.weight", "q_proj.weight"])),
    "two adapters": Scenario(TWO, two_adapters),
    "merged, and adapted again": Scenario(TWO, merged_then_again),
    "checkpointing": Scenario({**TWO, "gradient_checkpointing": True}, adapted()),
    "router loss": Scenario(TWO, adapted(config={"output_router_logits": True})),
    "products of each token": Scenario(TWO, adapted(config={"experts_implementation": "batched_mm"})),
    "asked without": Scenario(
        TWO, adapted(), more=callback(Looks),
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, Looks)),
    ),
    "blocks of one layer": Scenario(TWO, adapted(), streaming={"block_bytes": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_adapters_of_parameters_have_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    found = assert_streams_as_stock(SCENARIOS[name], tmp_path)
    assert not found.trainer.model.program.opaque_calls


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_trainers_of_trl_have_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    rows, reason = (texts, None) if name == "SFT" else (preferences, AGAIN)  # the reference is the base alone
    peft: Any = lambda model: {"peft_config": adapter()}  # noqa: E731
    assert_streams_as_stock(scenario(name, rows, more=peft, model=base, reason=reason), tmp_path)


def test_experts_of_a_python_loop_run_their_own_code_with_the_stock_runs_bits(tmp_path: Path) -> None:
    model = adapted("Mixtral", {"experts_implementation": "eager", "num_hidden_layers": 1})
    found = assert_streams_as_stock(Scenario({"max_steps": 12}, model, RAGGED * 2), tmp_path)
    opaque = [call.name for call in found.trainer.model.program.opaque_calls]
    assert opaque == ["base_model.model.model.layers.0.mlp.experts"]  # and not the experts alone, without adapters


def test_a_budget_below_a_stack_names_only_blocks_that_help() -> None:
    """A stack that an adapter is added to stays whole, however small the blocks."""
    ids = (torch.arange(16).reshape(2, 8) * 3) % 63 + 1

    def refused(**options: Any) -> TooSmallError:
        compiled = megatrain.compile(adapted()(), device="cpu", memory="8KiB", **options)
        step = megatrain.TrainStep(compiled, torch.optim.SGD([p for p in compiled.parameters() if p.requires_grad]))
        with pytest.raises(TooSmallError) as error:
            step({"input_ids": ids, "labels": ids})
        return error.value

    usual, finest = refused(), refused(block_bytes=1)
    assert "a smaller block_bytes" not in usual.helps
    said = re.search(r"a smaller block_bytes \((\d+) B are needed then\)", str(usual))
    least = usual.least_bytes if said is None else int(said[1])
    assert finest.least_bytes >= least > 8 << 10
    assert "block_bytes" not in str(finest)


# peft 0.19's own loading of such adapters ends with a TypeError of transformers, in the stock run, too.
loads = pytest.mark.skipif(Version(peft.__version__) < Version("0.20"), reason="needs a newer peft")


@loads
def test_what_is_saved_loads_and_merges_as_the_stock_runs(tmp_path: Path) -> None:
    script = Scenario({"save_strategy": "steps", "save_steps": 3}, adapted(target_modules=["q_proj"]))
    found = assert_streams_as_stock(script, tmp_path).trainer.model
    files = [
        safetensors.torch.load_file(tmp_path / kind / "checkpoint-3" / "adapter_model.safetensors")
        for kind in ("stock", "streams")
    ]
    assert_same(files[1], files[0])
    assert all("lora_" in key and "parametrizations" not in key for key in files[0])
    ids = torch.arange(8).reshape(1, 8)
    found.eval()
    again: Any = PeftModel.from_pretrained(base(), str(tmp_path / "streams" / "checkpoint-3"))
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, found(input_ids=ids).logits)
        with found.disable_adapter():
            assert torch.equal(found(input_ids=ids).logits, base().eval()(input_ids=ids).logits)
        found.merge_adapter()
        again.merge_adapter()
        assert torch.equal(again(input_ids=ids).logits, found(input_ids=ids).logits)
        found.unmerge_adapter()
        again.unmerge_adapter()
        assert torch.equal(again(input_ids=ids).logits, found(input_ids=ids).logits)
        merged = again.merge_and_unload()
        assert torch.equal(merged(input_ids=ids).logits, found.merge_and_unload()(input_ids=ids).logits)


@loads
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    script = Scenario({**TWO, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}, adapted(), RAGGED)
    whole = run(script, tmp_path / "whole", streams=True)
    stock = run(script, tmp_path / "stock", streams=False)
    resumed = run(script, tmp_path / "again", streams=True, resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    assert_same_run(resumed, whole)
    assert_same_run(resumed, stock)


def test_generating_between_steps_has_the_stock_models_tokens_and_bits() -> None:
    """Generating runs the model's own code, after which torch registers the parameters in another order."""
    streamed, eager = adapted(parameters=BOTH[:1])(), adapted(parameters=BOTH[:1])()
    compiled = megatrain.compile(streamed, device="cpu", transfer="copy")
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (streamed, eager)]
    step = megatrain.TrainStep(compiled, optimizers[0], loss=lambda result, batch: result.loss)
    given: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "use_cache": True}
    for number in range(3):
        ids = (torch.arange(16).reshape(2, 8) * (3 + number)) % 63 + 1
        loss = eager(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step({"input_ids": ids, "labels": ids}), loss.detach())
        tokens = [model.generate(input_ids=ids[:, :3], **given) for model in (eager, compiled)]
        assert torch.equal(tokens[0], tokens[1])
        assert_same(dict(eager.state_dict()), dict(streamed.state_dict()), f"step {number}")


def test_adapters_that_a_compiled_model_is_given_train_as_in_eager() -> None:
    eager: Any = get_peft_model(base(), adapter())
    compiled: Any = megatrain.compile(base(), device="cpu", transfer="copy")
    streamed: Any = get_peft_model(compiled, adapter())
    ids = (torch.arange(16).reshape(2, 8) * 3) % 63 + 1
    for number in range(3):
        losses = [model(input_ids=ids + number, labels=ids + number).loss for model in (eager, streamed)]
        assert torch.equal(losses[0], losses[1])
        for model, loss in zip((eager, streamed), losses, strict=True):
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
        assert_same(dict(eager.state_dict()), dict(streamed.state_dict()), f"step {number}")
    assert len(compiled.program.blocks) == 4
