"""Scripts with unusual habits around Trainer, TRL, peft and notebooks: the stock run's bits with each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils import prune
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)

from tests.integrations.runs import ROWS, Scenario, assert_streams_as_stock, llama
from tests.integrations.test_trainer import ACCUMULATED, EVAL, FULL, LABELLED, bert
from tests.integrations.test_trainer_options import SAVED, noted
from tests.integrations.test_trainer_scripts import Loss

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


# -- losses ---------------------------------------------------------------------------------------------------------


class CallsForward(Loss):
    """Calls `forward` by its name."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model.forward(**inputs)
        return outputs.loss, outputs


class Unwraps(Loss):
    """Calls what accelerate unwraps."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = self.accelerator.unwrap_model(model)(**inputs)
        return outputs.loss, outputs


class CallsItsOwn(Loss):
    """Calls `self.model` in place of what it is given."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs: Any = self.model(**inputs)  # pyright: ignore
        return outputs.loss, outputs


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -0.5 * gradients[0]


class Adversary(Loss):
    """A second network, with an optimizer of its own, learns against the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.critic = nn.Linear(32, 2)
        self.second = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs, output_hidden_states=True)
        found = self.critic(Reverse.apply(outputs.hidden_states[-1].mean(1)))
        loss = outputs.loss + nn.functional.cross_entropy(found, inputs["input_ids"][:, 0] % 2)
        return loss, outputs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Mixes(Loss):
    """Mixup of two orders of a batch, by the labels of both."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        labels = inputs["labels"]
        logits = model(input_ids=inputs["input_ids"]).logits
        first = nn.functional.cross_entropy(logits.mT, labels)
        second = nn.functional.cross_entropy(logits.mT, labels.flip(0))
        return 0.7 * first + 0.3 * second, {"logits": logits}


class Gathers(Loss):
    """Logs a mean that accelerate gathers."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs)
        with torch.no_grad():
            right = (outputs.logits.argmax(-1) == inputs["labels"]).float().mean()
            gathered: Any = self.accelerator.gather_for_metrics(right)
            self.log({"right": gathered.mean().item()})
        return outputs.loss, outputs


class InModule(nn.Module):
    """A model and its loss in one module, as people wrap them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = llama()
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 64), label_smoothing=0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        logits = self.backbone(input_ids=input_ids).logits
        loss = None if labels is None else self.criterion(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


# -- callbacks ------------------------------------------------------------------------------------------------------


class AlsoTraining(TrainerCallback):
    """Evaluates on the rows of training at the end of each epoch, as a well-known recipe does."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if control.should_evaluate:
            kept = copy.deepcopy(control)
            self.trainer.evaluate(eval_dataset=self.trainer.train_dataset, metric_key_prefix="train")
            return kept
        return None


class WithItself(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(AlsoTraining(self))


class Predicts(TrainerCallback):
    """Asks the model with inputs in all shapes, between the steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.eval()
        with torch.inference_mode():
            for length in (1, 3, 8):
                self.found.append(float(model(ROWS[0]["input_ids"][None, :length]).logits.double().sum()))
        model.train()


class WritesPieces(TrainerCallback):
    """Saves what it likes."""

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        folder = Path(args.output_dir)
        torch.save(model.state_dict(), folder / "state.pt")
        torch.save({k: v.half() for k, v in model.named_parameters()}, folder / "half.pt")
        torch.save([p.grad is None for p in model.parameters()], folder / "grads.pt")


class Restarts(TrainerCallback):
    """Gives the head new values, and the optimizer nothing."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 1:
            torch.manual_seed(5)
            nn.init.normal_(model.lm_head.weight, std=0.02)
            model.lm_head.reset_parameters()


class Shrinks(TrainerCallback):
    """Takes the last layer away, while it trains."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            del model.model.layers[-1]


def with_buffers() -> Any:
    """A running mean that a hook keeps on a module of the model."""
    model = llama()
    model.register_buffer("seen", torch.zeros(()))

    def count(module: Any, args: Any, result: Any) -> None:
        module.seen += 1

    model.register_forward_hook(count)
    return model


def pruned() -> Any:
    model = llama()
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.up_proj, "weight", amount=0.5)
    return model


def noisy_inputs() -> Any:
    """A pre-hook that drops tokens."""
    model = llama()

    def drop(module: Any, args: Any, kwargs: Any) -> Any:
        if module.training:
            kwargs["input_ids"] = torch.where(torch.rand(kwargs["input_ids"].shape) < 0.1, 1, kwargs["input_ids"])
        return args, kwargs

    model.register_forward_pre_hook(drop, with_kwargs=True)
    return model


def placed() -> Any:
    """As `from_pretrained(device_map=...)` leaves a model."""
    import tempfile

    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype="auto")


def continued() -> Any:
    """An adapter that was saved, and is trained further."""
    import tempfile

    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    made: Any = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights="gaussian"))
    made.save_pretrained(folder)
    return PeftModel.from_pretrained(llama(), folder, is_trainable=True)


def input_gradients() -> Any:
    """LoRA under checkpoints, as recipes prepare it."""
    model = llama()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights="gaussian"))


def transformed() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"number": i} for i in range(12)])

    def make(batch: Any) -> Any:
        ids = [torch.arange(8) + number for number in batch["number"]]
        return {"input_ids": ids, "labels": ids}

    return rows.with_transform(make)


def streaming(model: Any) -> Mapping[str, Any]:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"input_ids": r["input_ids"].tolist(), "labels": r["labels"].tolist()} for r in ROWS]
    )
    return {"train_dataset": rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5)}


SCENARIOS: dict[str, Scenario] = {
    "calls forward": Scenario(ACCUMULATED, kind=CallsForward),
    "unwraps": Scenario(ACCUMULATED, kind=Unwraps),
    "calls its own": Scenario(ACCUMULATED, kind=CallsItsOwn),
    "an adversary": Scenario(ACCUMULATED, kind=Adversary, reason="Adversary has a training_step"),
    "mixes labels": Scenario(ACCUMULATED, kind=Mixes),
    "gathers": Scenario(ACCUMULATED, kind=Gathers),
    "a loss in the module": Scenario({**ACCUMULATED, **EVAL}, model=InModule),
    "also on the rows of training": Scenario(
        {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", **ACCUMULATED}, kind=WithItself
    ),
    "asked in all lengths": Scenario(
        ACCUMULATED, more=lambda model: {"callbacks": [Predicts()]}, after=noted(Predicts)
    ),
    "writes pieces": Scenario({**SAVED, "max_steps": 2}, more=lambda model: {"callbacks": [WritesPieces()]}),
    "a new head": Scenario(ACCUMULATED, more=lambda model: {"callbacks": [Restarts()]}),
    "a layer less": Scenario({**ACCUMULATED, "max_steps": 4}, more=lambda model: {"callbacks": [Shrinks()]}),
    "a hook that counts": Scenario({**ACCUMULATED, **EVAL}, model=with_buffers),
    "pruned": Scenario(ACCUMULATED, model=pruned),
    "a hook that drops tokens": Scenario(ACCUMULATED, model=noisy_inputs),
    "placed by device_map": Scenario(ACCUMULATED, model=placed),
    "an adapter goes on": Scenario({**ACCUMULATED, **SAVED}, model=continued),
    "inputs with gradients": Scenario({**ACCUMULATED, "gradient_checkpointing": True}, model=input_gradients),
    "rows by a transform": Scenario(
        {**ACCUMULATED, "remove_unused_columns": False}, more=lambda model: {"train_dataset": transformed()}
    ),
    "a stream of rows": Scenario({**ACCUMULATED, "max_steps": 5}, more=streaming),
    "a norm for each group": Scenario(
        {**ACCUMULATED, "max_grad_norm": 0.3, "weight_decay": 0.2, "adam_epsilon": 1e-4},
        model=lambda: bert(hidden_dropout_prob=0.2), rows=LABELLED,
    ),
    "full, a mask of ones, in bf16": Scenario({**ACCUMULATED, "bf16": True, **EVAL}, rows=FULL),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_further_script_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)
