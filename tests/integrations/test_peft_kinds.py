"""The rarer kinds of peft's adapters under Trainer: the stock run's bits and files with each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from megatrain.errors import TraceError
from tests.integrations.runs import RAGGED, Scenario, assert_streams_as_stock, llama, run
from tests.integrations.test_peft import MATRICES, TWO, adapted, lora
from tests.integrations.test_trainer import REASSOCIATED

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


def of(kind: str, **options: Any) -> Callable[[], Any]:
    """A model with adapters of another class than LoRA's."""
    return adapted(lambda: getattr(peft, kind)(task_type="CAUSAL_LM", **options))


class Allocates(TrainerCallback):
    """What AdaLoRA wants of a loop: ranks follow the gradients."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.base_model.update_and_allocate(state.global_step)


class Switches(TrainerCallback):
    """Trains one adapter, then another."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.set_adapter("other" if state.global_step % 2 else "default")


class Looks(TrainerCallback):
    """Asks the base alone between the steps, and the adapters at another scale."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        ids = torch.arange(8)[None]
        model.eval()
        with torch.no_grad(), model.disable_adapter():
            self.found.append(float(model(input_ids=ids).logits.sum()))
        with torch.no_grad():
            self.found.append(float(model(input_ids=ids).logits.sum()))
        model.train()


def two(**more: Any) -> Callable[[], Any]:
    def model() -> Any:
        made = lora()()
        made.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["o_proj"], **more))
        return made

    return model


def both_active() -> Any:
    made = two()()
    made.base_model.set_adapter(["default", "other"])
    return made


def merged_then_again() -> Any:
    made = lora()()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return get_peft_model(made.merge_and_unload(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=MATRICES))


def weighted() -> Any:
    made = two()()
    made.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="cat")
    made.set_adapter("both")
    return made


def adapted_by_transformers() -> Any:
    model = llama()
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=MATRICES))
    return model


def switched(model: Any) -> Any:
    """The optimizer has both, as it must: the trainer's own has what is trained when it is made."""
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    return {"callbacks": [Switches()], "optimizers": (torch.optim.AdamW(adapters, lr=0.01), None)}


def callback(kind: Any) -> Any:
    return lambda model: {"callbacks": [kind()]}


SCENARIOS: dict[str, Scenario] = {
    "ranks by pattern": Scenario(TWO, lora(rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 3})),
    "pissa": Scenario(TWO, lora(init_lora_weights="pissa")),
    "olora": Scenario(TWO, lora(init_lora_weights="olora")),
    "orthogonal": Scenario(TWO, lora(init_lora_weights="orthogonal")),
    "some left out": Scenario(TWO, lora(target_modules="all-linear", exclude_modules=["o_proj"])),
    "layers repeated": Scenario(TWO, lora(layer_replication=[(0, 2), (1, 3)])),
    "biases": Scenario(TWO, lora(lora_bias=True, init_lora_weights=True)),
    "some tokens": Scenario(TWO, lora(trainable_token_indices=[3, 5, 7])),
    "embeddings trained whole": Scenario(TWO, lora(modules_to_save=["embed_tokens"])),
    "dora, dropout": Scenario(TWO, lora(use_dora=True, lora_dropout=0.2)),
    "both at once": Scenario(TWO, both_active),
    "one, then the other": Scenario({**TWO, "max_steps": 4}, two(), more=switched),
    "a sum of two": Scenario(TWO, weighted),
    "merged, and adapted again": Scenario(TWO, merged_then_again),
    "by transformers": Scenario(TWO, adapted_by_transformers),
    "asked without": Scenario(
        TWO, lora(), more=callback(Looks),
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, Looks)),
    ),
    "saved": Scenario({**TWO, "save_strategy": "steps", "save_steps": 2}, lora(), RAGGED),
    "lokr": Scenario(TWO, of("LoKrConfig", r=2, target_modules=MATRICES)),
    "boft": Scenario(TWO, of("BOFTConfig", boft_block_size=4, boft_n_butterfly_factor=1, target_modules=MATRICES)),
    "hra": Scenario(TWO, of("HRAConfig", r=2, target_modules=MATRICES)),
    "norms": Scenario(TWO, of("LNTuningConfig", target_modules=["input_layernorm"])),
    "p-tuning": Scenario(TWO, of("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8)),
    "adaption prompt": Scenario(TWO, of("AdaptionPromptConfig", adapter_len=3, adapter_layers=2)),
    "fourier": Scenario(TWO, of("FourierFTConfig", n_frequency=8, target_modules=MATRICES)),
    "vblora": Scenario(  # one bank for all layers
        {**TWO, "optim": "sgd"},
        of("VBLoRAConfig", r=2, num_vectors=8, vector_length=4, topk=2, target_modules=MATRICES),
        tolerance=REASSOCIATED,
    ),
    "randlora": Scenario(TWO, of("RandLoraConfig", r=2, target_modules=MATRICES)),
    "shira": Scenario(TWO, of("ShiraConfig", r=2, target_modules=MATRICES)),
    "c3a": Scenario(TWO, of("C3AConfig", block_size=8, target_modules=MATRICES)),
    "road": Scenario(TWO, of("RoadConfig", group_size=8, target_modules=MATRICES)),
    "miss": Scenario(TWO, of("MissConfig", r=2, target_modules=MATRICES)),
    "waves": Scenario(TWO, of("WaveFTConfig", n_frequency=8, target_modules=MATRICES)),
    "delora": Scenario(TWO, of("DeloraConfig", r=2, target_modules=MATRICES)),
    "gralora": Scenario(TWO, of("GraloraConfig", r=4, target_modules=MATRICES)),
    "tokens alone": Scenario(TWO, of("TrainableTokensConfig", token_indices=[3, 5], target_modules=["embed_tokens"])),
    "adalora, allocated": Scenario(
        {"max_steps": 4},
        adapted(lambda: peft.AdaLoraConfig(
            task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=4, tinit=1, tfinal=1, target_modules=MATRICES)),
        more=callback(Allocates), reason="the callback Allocates may read gradients behind",
    ),
}  # fmt: skip


def test_a_kind_whose_forward_replaces_its_parameter_is_refused(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}
    with pytest.raises(TraceError, match="the model gives a parameter other memory in the forward of `prompt_encoder"):
        run(Scenario({}, of("CPTConfig", **tokens)), tmp_path, streams=True)


# With the oldest peft: transformers refuses it for the first; the others aren't there, or copy state in the forward.
OF_NEWER = ("by transformers", "gralora", "shira")


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_adapter_of_another_kind_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    if name in OF_NEWER and Version(peft.__version__) < Version("0.19.1"):
        pytest.skip("needs peft 0.19.1")
    assert_streams_as_stock(SCENARIOS[name], tmp_path)
