"""What a trainer that streams refuses, and what it says when an update is no training step."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import megatrain
from megatrain.errors import ExecuteError, OptionError, ScheduleError, StreamedCallsWarning, TorchError
from megatrain.integrations.hf import Trainer
from megatrain.integrations.hf.requirements import refuse_trainer
from megatrain.integrations.hf.streamed import StreamOptions
from tests.comparing import assert_same
from tests.integrations.runs import GIVEN, ROWS, llama, streamed_kind, with_loss
from tests.integrations.test_trainer import of_model


def trainer(folder: Path, kind: Any = Trainer, arguments: Any = None, **keywords: Any) -> Any:
    made = TrainingArguments(str(folder), **{**GIVEN, **(arguments or {})})
    return kind(**{"model": llama(), "args": made, "train_dataset": ROWS, **keywords})


@pytest.mark.parametrize(
    ("arguments", "keywords", "says"),
    [
        ({"torch_compile": True}, {}, "can't use torch_compile"),
        ({"bf16_full_eval": True}, {}, "can't use bf16_full_eval"),
        ({"debug": "underflow_overflow"}, {}, "can't use debug='underflow_overflow'"),
        ({}, {"megatrain_memroy": "1GiB"}, "megatrain_memroy= isn't an option"),
        ({}, {"megatrain_memory": "10 quux"}, "quux"),
    ],
)
def test_what_cant_be_right_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], keywords: dict[str, Any], says: str
):
    with pytest.raises(OptionError, match=says):
        trainer(tmp_path, arguments=arguments, **keywords)


def test_options_for_a_compiled_model_are_refused_and_without_them_it_is_used(tmp_path: Path):
    compiled = megatrain.compile(llama(), device="cpu")
    with pytest.raises(OptionError, match="compiled once"):
        trainer(tmp_path, model=compiled, megatrain_memory="1GiB")
    made = trainer(tmp_path, model=compiled)
    assert made.model is compiled


def test_a_trainer_takes_all_options_of_compile_and_of_a_step_but_its_own():
    parameters = [set(inspect.signature(each).parameters) for each in (megatrain.compile, megatrain.TrainStep)]
    own = {"model", "example_args", "example_kwargs", "weights", "compiled", "optimizer", "loss", "reads", "weight"}
    own |= {"reduce", "max_grad_norm", "report_norm"}  # the trainer has these, or makes them
    own |= {"process_group"}  # of accelerate's processes
    with pytest.raises(OptionError, match="isn't an option") as refused:
        StreamOptions.taken_from({"megatrain_quux": 1}, None)
    said = set(re.findall(r"megatrain_(\w+)", str(refused.value).splitlines()[-1]))
    assert said == set.union(*parameters) - own


def test_options_may_be_training_arguments(tmp_path: Path):
    arguments = TrainingArguments(str(tmp_path), **GIVEN)
    arguments.megatrain_memory = "123MiB"  # pyright: ignore
    made = Trainer(model=llama(), args=arguments, train_dataset=ROWS)  # pyright: ignore
    assert made.model.megatrain.budget.nbytes == 123 << 20


def test_another_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(StockTrainer, "_clip_grad_norm")
    with pytest.raises(TorchError, match=r"has no Trainer\._clip_grad_norm"):
        trainer(tmp_path)


def test_a_model_that_takes_the_place_of_the_streaming_one_is_refused(tmp_path: Path):
    """It would train without megatrain."""
    made = trainer(tmp_path)
    made.model = made.model_wrapped = llama()
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    with pytest.raises(ExecuteError, match="the trainer's model isn't the one that streams"):
        made.train()
    assert_same({name: p.detach() for name, p in made.model.named_parameters()}, before)


def parts(self: Any, model: Any, inputs: Any) -> Any:
    """Calls the body and the head by themselves."""
    hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
    return model.lm_head(hidden).square().mean(), None


Parts: Any = with_loss(parts)


class PartsInItsOwnStep(Parts):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("kind", [Parts, PartsInItsOwnStep])
@pytest.mark.filterwarnings("ignore::megatrain.errors.StreamedCallsWarning")
def test_parts_of_the_model_that_are_called_by_themselves_are_refused(kind: Any, tmp_path: Path):
    made = trainer(tmp_path, streamed_kind(kind), {"gradient_accumulation_steps": 2})
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    with pytest.raises(ExecuteError, match=r"gives `.*` a gradient, and doesn't call the model"):
        made.train()
    assert_same({name: p.detach() for name, p in made.model.named_parameters()}, before)


def test_a_trainer_that_redirects_the_forward_is_refused():
    kind = type("DistillationTrainer", (), {"__module__": "trl.trainer", "_forward_redirection": None})
    with pytest.raises(OptionError, match="DistillationTrainer can't train a model that streams"):
        refuse_trainer(kind())


def test_what_isnt_one_training_step_is_said_once_and_saves_the_optimizer(tmp_path: Path):
    model = llama()
    made = trainer(tmp_path, arguments={"save_strategy": "steps", "save_steps": 2, "max_steps": 2}, model=model,
                   **of_model(model))  # fmt: skip
    with pytest.warns(StreamedCallsWarning, match="the optimizer can't update in a training step") as said:
        made.train()
    assert len([one for one in said if one.category is StreamedCallsWarning]) == 1
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists()


@pytest.mark.nightly
def test_a_lack_of_memory_finds_a_smaller_batch_where_that_was_asked_for(tmp_path: Path):
    wide = {"per_device_train_batch_size": 4, "max_steps": 1}
    small: dict[str, Any] = {"megatrain_memory": "110KiB", "megatrain_chunking": "never"}
    with pytest.raises(ScheduleError):
        trainer(tmp_path, arguments=wide, **small).train()
    found = trainer(tmp_path, arguments={**wide, "auto_find_batch_size": True}, **small)
    found.train()
    assert found._train_batch_size < 4
    assert torch.isfinite(torch.tensor(found.state.log_history[-1]["train_loss"]))


def test_another_optimizer_or_clipping_gets_another_training_step(tmp_path: Path):
    runs: list[Any] = []
    for kind in (StockTrainer, Trainer):
        torch.manual_seed(0)
        made = trainer(tmp_path, kind, {"max_steps": 1})
        made.train()
        made.args.max_grad_norm = 0.05
        made.train()
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        made.lr_scheduler = None
        made.train()
        norms = [row["grad_norm"] for row in made.state.log_history if "grad_norm" in row]
        made.optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in made.model.parameters()]).sum().backward()
        made.optimizer.step()  # by hand, after the training
        runs.append((norms, {key: tensor.detach().clone() for key, tensor in made.model.state_dict().items()}))
    assert_same(runs[1], runs[0])
