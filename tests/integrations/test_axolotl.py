"""axolotl's own trainer, by the plugin: the stock run's bits. Needs axolotl, which has a Python and pins of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from megatrain.errors import OptionError
from megatrain.integrations import axolotl as plugin
from tests.integrations.runs import RAGGED, Scenario, assert_streams_as_stock, llama

NEEDS = "needs axolotl: pip install axolotl, in an environment of its own"
pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
NAME = f"{plugin.__name__}.MegatrainPlugin"


class Settings(dict[str, Any]):
    """As axolotl's configuration answers: None for what isn't there."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def manager() -> Any:
    """axolotl's own manager of plugins, with ours."""
    base = pytest.importorskip("axolotl.integrations.base", reason=NEEDS)
    found = base.PluginManager.get_instance()
    found.plugins.clear()
    found.register(NAME)
    assert list(found.plugins) == [NAME]
    return found


def adapted() -> Any:
    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}, llama),
        ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, adapted),
        ({"embedding_lr": 1e-3, "weight_decay": 0.1}, llama),
        ({"include_tkps": True}, llama),
        ({"save_strategy": "steps", "save_steps": 2, "bf16": True}, llama),
    ],
)
def test_axolotls_trainer_has_the_stock_runs_bits(
    options: dict[str, Any], make: Any, manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = pytest.importorskip("axolotl.core.trainers", reason=NEEDS)
    arguments = pytest.importorskip("axolotl.core.training_args", reason=NEEDS)
    datasets = pytest.importorskip("datasets", reason=NEEDS)
    kind = manager.get_trainer_cls(Settings())
    assert kind.__mro__[2] is trainers.AxolotlTrainer
    rows = datasets.Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in RAGGED])
    scenario = Scenario(
        {"model_type": "llama", **options}, make, rows.with_format("torch"), kind=trainers.AxolotlTrainer,
        arguments=arguments.AxolotlTrainingArguments,
    )  # fmt: skip
    # What the plugin returns, in place of what `assert_streams_as_stock` would make of the stock class.
    monkeypatch.setattr("tests.integrations.runs.streamed_kind", lambda stock: kind)
    assert_streams_as_stock(scenario, tmp_path)


def test_settings_reach_the_training_arguments(manager: Any) -> None:
    config = pytest.importorskip("axolotl.integrations.config", reason=NEEDS)
    given = Settings(megatrain_memory="3GiB", megatrain_precision="bf16", other=1)
    assert manager.get_training_args(given) == {"megatrain_memory": "3GiB", "megatrain_precision": "bf16"}
    assert manager.get_input_args() == [f"{plugin.__name__}.MegatrainArguments"]
    mixin = config.merge_training_args()
    assert issubclass(mixin, plugin.MegatrainTrainingArguments)
    assert plugin.MegatrainArguments(megatrain_memory="3GiB").megatrain_overlap is None


@pytest.mark.parametrize("name", ["rl", "reward_model", "trainer_cls", "layer_offloading", "deepspeed"])
def test_what_has_another_trainer_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"axolotl's `{name}` "):
        plugin.MegatrainPlugin().get_trainer_cls(Settings({name: "something"}))


def test_a_model_on_the_device_is_refused() -> None:
    made = plugin.MegatrainPlugin()
    made.post_model_load(Settings(), llama())
    made.post_model_load(Settings(), torch.nn.Linear(2, 2, device="meta"))


def test_both_classes_of_settings_have_the_same() -> None:
    one, other = plugin.MegatrainArguments, plugin.MegatrainTrainingArguments
    assert one.__annotations__ == other.__annotations__
