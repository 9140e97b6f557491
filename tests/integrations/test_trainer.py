"""Scripts with transformers' Trainer: a trainer that streams leaves the stock run's bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
    get_cosine_schedule_with_warmup,
)

from tests.integrations.runs import RAGGED, Scenario, assert_streams_as_stock, llama
from tests.tiers import wide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]

EVAL = {"eval_strategy": "steps", "eval_steps": 1}


def bert(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 16, **config,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**sizes))


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))  # with dropout


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))  # pyright: ignore


def vit() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))  # pyright: ignore


LABELLED = [
    {"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(torch.arange(96).reshape(12, 8) % 64)
]
IMAGES = [
    {"pixel_values": torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i)), "labels": torch.tensor(i % 3)}
    for i in range(12)
]


class Plain(nn.Module):
    """No model of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Skipping(Plain):
    """Leaves a layer out for some batches."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        first, act, middle, _, last = self.layers
        x = act(first(x))
        x = x if x.sum() > 8 else act(middle(x))
        logits = last(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


FULL = [{**row, "attention_mask": torch.ones_like(row["input_ids"]), "labels": row["input_ids"]} for row in RAGGED]
POINTS = [{"x": torch.arange(4.0) + i, "labels": torch.tensor(i % 2)} for i in range(12)]


class TwoTerms(Trainer):
    """Computes its own loss from the logits."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1) / 2, labels.flatten())
        loss = loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class InPlace(Trainer):
    """Writes into the model's results."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        outputs.logits /= 2
        loss = outputs.logits.logsumexp(-1).mean()
        loss *= 3
        return (loss, outputs) if return_outputs else loss


class Counted(Trainer):
    """Keeps counts around its call of the model: this code runs once for each micro-batch."""

    calls = 0
    kept: tuple[float, ...] = ()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.calls += 1
        found = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.kept = (*self.kept, float(found[0].detach()) * self.calls)
        return found if return_outputs else found[0]


class Stacked(Trainer):
    """Puts something onto a stack ahead of the call, and takes it down behind it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stack: list[torch.Tensor] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.stack.append(inputs["labels"] % 3)
        outputs = model(**inputs)
        loss = outputs.loss + (outputs.logits.mean(-1) * self.stack.pop()).mean()
        return (loss, outputs) if return_outputs else loss


class Twice(Trainer):
    """Two views of a batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        first = model(**inputs)
        second = model(**{**inputs, "input_ids": inputs["input_ids"].flip(0)})
        loss = first.loss + (first.logits - second.logits).square().mean()
        return (loss, first) if return_outputs else loss


class Guided(Trainer):
    """Looks without gradients first."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with torch.no_grad():
            before = model(**inputs).logits
        outputs = model(**inputs)
        loss = outputs.loss + nn.functional.mse_loss(outputs.logits, before.softmax(-1))
        return (loss, outputs) if return_outputs else loss


class Noisy(Trainer):
    """Draws before it calls the model, and behind it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = inputs["input_ids"]
        ids = torch.where(torch.rand(ids.shape, device=ids.device) < 0.2, 1, ids)
        outputs = model(**{**inputs, "input_ids": ids})
        loss = outputs.loss * (1 + 0.1 * torch.rand(()))
        return (loss, outputs) if return_outputs else loss


class NoisyBehind(Trainer):
    """Draws behind its call of the model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss * (1 + 0.1 * torch.rand(()))
        return (loss, outputs) if return_outputs else loss


class UnderAutocast(Trainer):
    """Chooses a precision for its call."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnStep(Trainer):
    """Has a training step of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        found = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        return found


class Scaled(Trainer):
    """Has the scaler that accelerate makes for fp16 on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


class LooksAtGradients(TrainerCallback):
    """Notes the largest gradient."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(max(float(p.grad.abs().max()) for p in kwargs["model"].parameters()))


class Notes(TrainerCallback):
    """Notes the order of events, and a parameter behind each update."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name == "on_pre_optimizer_step":
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            norm = kwargs["model"].model.norm.weight if name == "on_step_end" else None
            self.found.append((name, state.global_step, None if norm is None else norm.detach().sum().item()))

        return note


class Stops(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == 1
        return control


class Samples(TrainerCallback):
    """Generates between the steps, greedily and at random."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for options in ({"do_sample": False}, {"do_sample": True, "top_k": 8}):
            ids = model.generate(FULL[state.global_step]["input_ids"][None, :4], max_new_tokens=4, **options)
            self.found.append(ids)


def chosen(found: Any) -> dict[str, float]:
    """Of the tokens that were generated, not of logits."""
    return {"rank": float(found.predictions.ndim), "sum": float(found.predictions.sum())}


def sgd(model: Any) -> Mapping[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return {"optimizers": (optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 3))}


class OfAll(torch.optim.SGD):
    """Divides by the norm of all gradients, which no block knows alone."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(1 + norm)
        return super().step(closure)


def of_all(model: Any) -> Mapping[str, Any]:
    optimizer = OfAll(model.parameters(), lr=0.1)
    return {"optimizers": (optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 3))}


def of_model(model: Any) -> Mapping[str, Any]:
    """An optimizer that holds the model, whose hooks could train it."""
    optimizer: Any = type("OfModel", (OfAll,), {})(model.parameters(), lr=0.1)
    optimizer.held = model
    return {"optimizers": (optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 3))}


def frozen() -> Any:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "norm" in name)
    return model


def in_bf16() -> Any:
    return llama().to(torch.bfloat16)


def squared(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.square().sum() / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def mean_of(found: Any) -> dict[str, float]:
    return {"mean": float(found.predictions.mean())}


ACCUMULATED = {"gradient_accumulation_steps": 2}
DROPS = {"attention_dropout": 0.3}

REASSOCIATED = 3e-6
"""What is used twice in a model has its gradients added in another order: the uses first, then the micro-batches. Under
SGD, three steps leave a few units in the last place; AdamW divides a gradient by its size, were it rounding alone."""
SUMMED = {**ACCUMULATED, "optim": "sgd"}

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "accumulation": Scenario(ACCUMULATED),
    "accumulation, ragged": Scenario({**ACCUMULATED, "max_grad_norm": 0.5}, rows=RAGGED),
    "accumulation, last update shorter": Scenario({"gradient_accumulation_steps": 4, "max_steps": 4}),
    "logged every other step": Scenario({**ACCUMULATED, "logging_steps": 2, "max_steps": 4}),
    "cosine, warm up, clipped": Scenario({"lr_scheduler_type": "cosine", "warmup_steps": 1, "max_grad_norm": 0.1}),
    "not clipped": Scenario({"max_grad_norm": 0.0}),
    "plateau": Scenario({**EVAL, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}),
    "evaluated": Scenario(EVAL),
    "evaluated with metrics": Scenario(EVAL, more=lambda model: {"compute_metrics": mean_of}),
    "evaluated at the start": Scenario({**EVAL, "eval_on_start": True, "eval_accumulation_steps": 1}),
    "predicted": Scenario(after=lambda t: torch.tensor(t.predict(t.eval_dataset).predictions)),
    "evaluated alone": Scenario(after=lambda t: [t.evaluate()["eval_loss"]]),
    "bf16": Scenario({"bf16": True, **EVAL}),
    "bf16, accumulation": Scenario({"bf16": True, **ACCUMULATED, "label_smoothing_factor": 0.1}),
    "a model in bf16": Scenario(model=in_bf16),
    "gradient checkpointing": Scenario({"gradient_checkpointing": True}),
    "gradient checkpointing, reentrant": Scenario(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "label smoothing": Scenario({"label_smoothing_factor": 0.1, **ACCUMULATED}),
    "dropout": Scenario({**ACCUMULATED}, model=lambda: llama(**DROPS)),
    "dropout, gpt2": Scenario(model=gpt2),
    "dropout, gpt2, accumulation": Scenario(SUMMED, model=gpt2, tolerance=REASSOCIATED),
    "own optimizer": Scenario(more=sgd),
    "adafactor": Scenario({"optim": "adafactor"}),
    "sgd, decayed": Scenario({"optim": "sgd", "weight_decay": 0.1, **ACCUMULATED}),
    "fused adamw, decayed": Scenario({"optim": "adamw_torch_fused", "weight_decay": 0.1, "adam_beta2": 0.9}),
    "rmsprop": Scenario({"optim": "rmsprop"}),
    "adagrad": Scenario({"optim": "adagrad"}),
    "neftune": Scenario({"neftune_noise_alpha": 5.0}),
    "neftune, accumulation": Scenario({"neftune_noise_alpha": 5.0, **ACCUMULATED}),
    "two loader workers": Scenario({"dataloader_num_workers": 2, **ACCUMULATED}),
    "grouped by length": Scenario({"train_sampling_strategy": "group_by_length"}, rows=RAGGED),
    "epochs": Scenario({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4}),
    "tokens counted": Scenario({"include_num_input_tokens_seen": "all", **ACCUMULATED}),
    "loss function": Scenario(ACCUMULATED, more=lambda model: {"compute_loss_func": squared}),
    "own loss": Scenario(ACCUMULATED, kind=TwoTerms),
    "own loss, in place": Scenario(ACCUMULATED, kind=InPlace),
    "counts around the call": Scenario(ACCUMULATED, kind=Counted, after=lambda t: [t.calls, *t.kept],
        reason="the code ahead of the call of the model changes `calls`"),
    "a stack around the call": Scenario(
        ACCUMULATED, kind=Stacked, reason="the code ahead of the call of the model changes `stack`"
    ),
    "looks without gradients first": Scenario(ACCUMULATED, kind=Guided),
    "draws behind the call": Scenario(kind=NoisyBehind),
    "draws behind the calls": Scenario(ACCUMULATED, kind=NoisyBehind, reason="the loss draws random numbers behind"),
    "draws before the call": Scenario(kind=Noisy),
    "callbacks": Scenario(
        ACCUMULATED,
        more=lambda model: {"callbacks": [Notes()]},
        after=lambda t: [str(c.found) for c in t.callback_handler.callbacks if isinstance(c, Notes)],
    ),
    "stopped between micro-batches": Scenario(ACCUMULATED, more=lambda model: {"callbacks": [Stops()]}),
    "frozen": Scenario(ACCUMULATED, model=frozen),
    "tied": Scenario(model=lambda: llama(tie_word_embeddings=True)),
    "tied, accumulation": Scenario(
        SUMMED, model=lambda: llama(tie_word_embeddings=True), tolerance=REASSOCIATED
    ),
    "sequence classification": Scenario(
        model=lambda: llama(LlamaForSequenceClassification, num_labels=2), rows=LABELLED
    ),
    "bert": Scenario({**ACCUMULATED, **EVAL}, model=bert, rows=LABELLED),
    "t5": Scenario(
        SUMMED, model=t5, kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, tolerance=REASSOCIATED,
    ),
    "t5, generates": Scenario(
        {
            **SUMMED, **EVAL, "eval_steps": 2, "predict_with_generate": True, "generation_max_length": 6,
            "generation_num_beams": 2,
        },
        model=t5, kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, tolerance=REASSOCIATED,
        more=lambda model: {"compute_metrics": chosen}, streaming={"memory": "100KiB"},
        after=lambda t: torch.tensor(t.predict(t.eval_dataset, num_beams=1).predictions),
    ),
    "text between steps": Scenario(
        ACCUMULATED,
        more=lambda model: {"callbacks": [Samples()]},
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, Samples)),
        streaming={"memory": "300KiB"},
    ),
    "vit": Scenario({**EVAL, "remove_unused_columns": False}, model=vit, rows=IMAGES),
    "any module": Scenario(ACCUMULATED, model=Plain, rows=POINTS),
    "tensors on a budget": Scenario(ACCUMULATED, streaming={"memory": "300KiB"}),
    "model_init": Scenario(ACCUMULATED, more=lambda model: {"model": None, "model_init": lambda: llama()}),
    "padding in some": Scenario(
        {**ACCUMULATED, "max_steps": 6}, rows=[*FULL[:8], *RAGGED[:4]]
    ),
    "other layers in some": Scenario({**ACCUMULATED, "max_steps": 6}, model=Skipping, rows=POINTS, is_mixed=True),
    "an optimizer of all parameters": Scenario(ACCUMULATED, more=of_all),
    "an optimizer of the model": Scenario(
        ACCUMULATED, more=of_model, reason="the optimizer can't update in a training step"
    ),
    "a scaler of the loss": Scenario(ACCUMULATED, kind=Scaled, reason="fp16 scales the loss"),
    "fp16": Scenario({"fp16": True, **ACCUMULATED}),  # a CPU has no scaler
    "calls again": Scenario(
        SUMMED, kind=Twice, reason="the loss calls the model more than once", tolerance=REASSOCIATED
    ),
    "draws before the calls": Scenario(ACCUMULATED, kind=Noisy, reason="the loss draws random numbers"),
    "under autocast": Scenario(ACCUMULATED, kind=UnderAutocast, reason="the loss calls the model under autocast"),
    "own training step": Scenario(ACCUMULATED, kind=OwnStep, reason="OwnStep has a training_step of its own"),
    "reads gradients": Scenario(
        ACCUMULATED,
        more=lambda model: {"callbacks": [LooksAtGradients()]},
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, LooksAtGradients)),
        reason="the callback LooksAtGradients",
    ),
    "a collator": Scenario(ACCUMULATED, more=lambda model: {"data_collator": default_data_collator}),
}  # fmt: skip

FAST = ("accumulation, ragged", "bf16, accumulation", "own loss", "calls again", "reads gradients", "evaluated")
GENERATES = ("t5, generates", "text between steps")
OTHERS = [name for name in SCENARIOS if name not in (*FAST, *GENERATES, "t5")]


@pytest.mark.parametrize(
    "name", [*FAST, *GENERATES, wide("t5"), *(pytest.param(name, marks=pytest.mark.users) for name in OTHERS)]
)
def test_a_trainer_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    found = assert_streams_as_stock(SCENARIOS[name], tmp_path)
    walk = found.trainer.model.megatrain.walks.latest
    assert (walk is not None and walk.num_prefetches > 20) == (name in GENERATES)
