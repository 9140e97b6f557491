"""Scripts with transformers' Trainer: a trainer that streams leaves the stock run's bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    get_cosine_schedule_with_warmup,
)

from tests.comparing import assert_same
from tests.integrations.runs import (
    EVAL,
    FULL,
    POINTS,
    RAGGED,
    REASSOCIATED,
    ROWS,
    SAVED,
    SUMMED,
    TWO,
    Scenario,
    assert_streams_as_stock,
    fast_or_nightly,
    kept,
    llama,
    on,
    run,
    with_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
FOUR = {**TWO, "max_steps": 4}
BEST = {**EVAL, **SAVED, "load_best_model_at_end": True, "metric_for_best_model": "loss", "max_steps": 4}


# -- models and data ------------------------------------------------------------------------------------------------


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))  # pyright: ignore


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


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def hooked_parameters() -> Any:
    """Hooks on parameters clamp gradients."""
    model = llama()
    for parameter in model.model.layers[0].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


# -- losses ---------------------------------------------------------------------------------------------------------


def twice(self: Any, model: Any, inputs: Any) -> Any:
    """Two views of a batch."""
    first = model(**inputs)
    second = model(**{**inputs, "input_ids": inputs["input_ids"].flip(0)})
    return first.loss + (first.logits - second.logits).square().mean(), first


def noisy(self: Any, model: Any, inputs: Any) -> Any:
    """Draws before it calls the model, and after it."""
    ids = inputs["input_ids"]
    ids = torch.where(torch.rand(ids.shape, device=ids.device) < 0.2, 1, ids)
    outputs = model(**{**inputs, "input_ids": ids})
    return outputs.loss * (1 + 0.1 * torch.rand(())), outputs


def divides_by_norm(self: Any, model: Any, inputs: Any) -> Any:
    """The loss has a weight by the norm of its own gradient."""
    outputs = model(**inputs)
    found: Any = torch.autograd.grad(outputs.loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    return outputs.loss * (1 + sum(g.detach().square().sum() for g in found if g is not None)), outputs


def counted(self: Any, model: Any, inputs: Any) -> Any:
    """Keeps counts around its call of the model: this code runs once for each micro-batch."""
    self.calls = getattr(self, "calls", 0) + 1
    outputs = model(**inputs)
    self.seen = (*getattr(self, "seen", ()), float(outputs.loss.detach()) * self.calls)
    return outputs.loss, outputs


class OwnStep(Trainer):
    """Has a training step of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        found = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        return found


class OwnClipping(Trainer):
    """Clips values in place of the norm."""

    def _clip_grad_norm(self, model: Any) -> Any:
        return torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


class Scaled(Trainer):
    """Has the scaler that accelerate makes for fp16 on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def mean_of(found: Any) -> dict[str, float]:
    return {"mean": float(found.predictions.mean())}


# -- callbacks ------------------------------------------------------------------------------------------------------


class LooksAtGradients(TrainerCallback):
    """Notes the largest gradient."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept.append(max(float(p.grad.abs().max()) for p in kwargs["model"].parameters()))


class Notes(TrainerCallback):
    """Notes the order of events, and a parameter after each update."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name == "on_pre_optimizer_step":
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            norm = kwargs["model"].model.norm.weight if name == "on_step_end" else None
            self.kept.append((name, state.global_step, None if norm is None else norm.detach().sum().item()))

        return note


def samples(*, state: Any, model: Any, **_: Any) -> Any:
    """Generates between the steps, greedily and at random."""
    ids = FULL[state.global_step]["input_ids"][None, :4]
    ways: Any = {"do_sample": False}, {"do_sample": True, "top_k": 8}
    return [model.generate(ids, max_new_tokens=4, **options) for options in ways]


def unfreezes(*, state: Any, model: Any, **_: Any) -> None:
    """Trains the head alone in the second step, and everything later."""
    model.requires_grad_(state.global_step >= 2)
    model.lm_head.weight.requires_grad_(True)


def chosen(found: Any) -> dict[str, float]:
    """Of the tokens that were generated, not of logits."""
    return {"rank": float(found.predictions.ndim), "sum": float(found.predictions.sum())}


# -- optimizers -----------------------------------------------------------------------------------------------------


class OfAll(torch.optim.SGD):
    """Divides by the norm of all gradients, which no block knows alone."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(1 + norm)
        return super().step(closure)


def of_model(model: Any) -> Mapping[str, Any]:
    """An optimizer that holds the model, whose hooks could train it."""
    optimizer: Any = type("OfModel", (OfAll,), {})(model.parameters(), lr=0.1)
    optimizer.held = model
    return {"optimizers": (optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 3))}


T5: dict[str, Any] = {"kind": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments, "tolerance": REASSOCIATED}
GENERATED = {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}

SCENARIOS: dict[str, Scenario] = {
    "accumulation, ragged": Scenario({**TWO, "max_grad_norm": 0.5}, rows=RAGGED),
    "evaluated": Scenario(
        {**EVAL, "eval_on_start": True, "eval_accumulation_steps": 1},
        more=lambda model: {"compute_metrics": mean_of},
    ),
    "bf16, accumulation": Scenario({"bf16": True, **TWO, "label_smoothing_factor": 0.1}),
    "a scaler of the loss": Scenario(TWO, kind=Scaled, reason="fp16 scales the loss"),
    "gradient checkpointing, reentrant": Scenario(
        {**TWO, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "stops early": Scenario(
        {**BEST, "learning_rate": 0.5}, more=lambda model: {"callbacks": [EarlyStoppingCallback(1)]}
    ),
    "the best at the end": Scenario({**BEST, "save_total_limit": 1, "learning_rate": 0.3}, rows=RAGGED),
    # -- models
    "t5, generates": Scenario(
        {**SUMMED, **EVAL, "eval_steps": 2, **GENERATED}, model=t5, **T5,
        more=lambda model: {"compute_metrics": chosen}, streaming={"memory": "100KiB"},
        after=lambda t: torch.tensor(t.predict(t.eval_dataset, num_beams=1).predictions),
    ),
    "text between steps": Scenario(TWO, more=on("step_end", samples), after=kept, streaming={"memory": "300KiB"}),
    "padding in some": Scenario({**TWO, "max_steps": 6}, rows=[*FULL[:8], *RAGGED[:4]]),
    "other layers in some": Scenario({**TWO, "max_steps": 6}, model=Skipping, rows=POINTS, is_mixed=True),
    "hooks on parameters, accumulation": Scenario(
        TWO, model=hooked_parameters, reason="`model.layers.0.self_attn.q_proj.weight` has a hook"
    ),
    # -- losses
    "calls again": Scenario(
        SUMMED, kind=with_loss(twice), reason="the loss calls the model more than once", tolerance=REASSOCIATED
    ),
    "counts around the call": Scenario(
        TWO, kind=with_loss(counted), after=lambda t: [t.calls, *t.seen],
        reason="the code before the call of the model changes `calls`",
    ),
    "draws before the calls": Scenario(TWO, kind=with_loss(noisy), reason="the loss draws random numbers"),
    "divides by a norm": Scenario(
        TWO, kind=with_loss(divides_by_norm), reason="the loss asks for gradients that go through the model"
    ),
    "own training step": Scenario(TWO, kind=OwnStep, reason="OwnStep has a training_step of its own"),
    "clipping of one's own": Scenario(TWO, kind=OwnClipping, reason="OwnClipping has a _clip_grad_norm of its own"),
    # -- callbacks
    "callbacks": Scenario(TWO, more=lambda model: {"callbacks": [Notes()]}, after=lambda t: str(kept(t))),
    "unfreezes": Scenario(FOUR, more=on("step_end", unfreezes)),
    "reads gradients": Scenario(
        TWO, more=lambda model: {"callbacks": [LooksAtGradients()]}, after=kept,
        reason="the callback LooksAtGradients",
    ),
    # -- optimizers
    "adafactor": Scenario({"optim": "adafactor", **SAVED, **TWO}, rows=RAGGED),
    "an optimizer of the model": Scenario(TWO, more=of_model, reason="the optimizer can't update in a training step"),
}  # fmt: skip

FAST = ("accumulation, ragged", "bf16, accumulation", "calls again", "reads gradients", "evaluated")
GENERATES = ("t5, generates", "text between steps")


@pytest.mark.parametrize("name", fast_or_nightly(SCENARIOS, FAST))
def test_a_trainer_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    found = assert_streams_as_stock(SCENARIOS[name], tmp_path)
    walk = found.trainer.model.megatrain.walks.latest
    assert (walk is not None and walk.num_prefetches > 20) == (name in GENERATES)


@pytest.mark.nightly
def test_a_trainer_that_trains_evaluates_and_trains_again_has_the_stock_runs_bits(tmp_path: Path) -> None:
    found: list[Any] = []
    scenario = Scenario(TWO, rows=RAGGED, after=lambda t: t.evaluate())
    for streams in (False, True):
        trainer = run(scenario, tmp_path / str(streams), streams=streams).trainer
        trainer.args.max_steps = 5
        trainer.train_dataset = ROWS
        trainer.train()
        losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
        state = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
        found.append((losses, state, trainer.predict(RAGGED).metrics["test_loss"]))
    assert_same(found[1], found[0])
    assert trainer._one_step.reason is None
    assert trainer.train_step.progress.count in (5, 8)
