"""Training arguments, callbacks and overridden methods of transformers' Trainer: the stock run's bits with each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForQuestionAnswering,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    LlamaForCausalLM,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)

from tests.comparing import assert_same
from tests.integrations.runs import RAGGED, ROWS, Scenario, assert_streams_as_stock, llama, run
from tests.integrations.test_trainer import ACCUMULATED, EVAL, FULL, LABELLED, bert, mean_of
from tests.integrations.words import text, tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]
SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {**EVAL, **SAVED, "load_best_model_at_end": True, "metric_for_best_model": "loss", "max_steps": 4}


# -- data -----------------------------------------------------------------------------------------------------------


class Endless(torch.utils.data.IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from ROWS


def answered() -> list[dict[str, Any]]:
    return [{**row, "start_positions": torch.tensor(i % 8), "end_positions": torch.tensor((i + 2) % 8)}
            for i, row in enumerate({"input_ids": row["input_ids"]} for row in ROWS)]  # fmt: skip


def question_answering() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForQuestionAnswering(BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16))  # pyright: ignore


def ragged_texts() -> list[dict[str, Any]]:
    return [{"input_ids": tokenizer()(text(i, 3 + i % 6))["input_ids"]} for i in range(12)]


def next_token(model: Any) -> Mapping[str, Any]:
    return {"data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False, pad_to_multiple_of=4)}


# -- parameters and optimizers --------------------------------------------------------------------------------------


def in_groups(model: Any) -> Mapping[str, Any]:
    """Each layer has its own rate, and norms have no decay."""
    groups = [
        {"params": [p], "lr": 0.01 / (1 + i), "weight_decay": 0.1 * (p.ndim > 1)}
        for i, p in enumerate(model.parameters())
    ]
    return {"optimizers": (torch.optim.AdamW(groups), None)}


class OwnOptimizer(Trainer):
    """Makes an optimizer, in groups by name, and a scheduler by itself."""

    optimizer: Any
    lr_scheduler: Any

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:  # pyright: ignore[reportUnnecessaryComparison]
            named = dict(self.model.named_parameters())  # pyright: ignore
            heads = [p for name, p in named.items() if "head" in name]
            rest = [p for name, p in named.items() if "head" not in name]
            self.optimizer = torch.optim.NAdam([{"params": heads, "lr": 0.03}, {"params": rest}], lr=0.01)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer if optimizer is None else optimizer, [0.03, 0.01], total_steps=num_training_steps + 1
            )
        return self.lr_scheduler


class NoDecayAtAll(Trainer):
    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return ["lm_head.weight"]


# -- callbacks ------------------------------------------------------------------------------------------------------


class Unfreezes(TrainerCallback):
    """Trains the head alone first, and everything later."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_head" in name)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.requires_grad_(state.global_step >= 2)
        model.lm_head.weight.requires_grad_(True)


class Freezes(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            model.model.layers[0].requires_grad_(False)


class Averages(TrainerCallback):
    """Keeps an average of the weights, and swaps it in for evaluations."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            known = self.shadow.setdefault(name, parameter.detach().clone())
            known.lerp_(parameter.detach(), 0.5)
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.shadow[name])

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.kept[name])


class ClampsWeights(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class SetsRate(TrainerCallback):
    """A rate of its own for each step, and another decay."""

    def on_step_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01 * (state.global_step + 1), 0.01 * state.global_step


class LooksAtState(TrainerCallback):
    """Reads the optimizer's state and the model's logits behind each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        moments = [optimizer.state[p]["exp_avg"].abs().sum() for p in model.parameters()]
        with torch.no_grad():
            logits = model(input_ids=ROWS[0]["input_ids"][None]).logits
        self.found += [float(sum(moments)), float(logits.sum())]


class ChangesDropout(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1 * state.global_step


class Asks(TrainerCallback):
    """Evaluates, logs and saves when it likes."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_evaluate = control.should_log = control.should_save = state.global_step == 2
        return control


class LooksBehindTheStep(TrainerCallback):
    """Reads gradients where the optimizer has used them: a stock run still has them there."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.found += [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


def callbacks(*kinds: Any) -> Any:
    return lambda model: {"callbacks": [kind() for kind in kinds]}


def noted(kind: Any) -> Any:
    return lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, kind))


# -- overridden methods ---------------------------------------------------------------------------------------------


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=3, shuffle=False)  # pyright: ignore


class OwnClipping(Trainer):
    """Clips values in place of the norm."""

    def _clip_grad_norm(self, model: Any) -> Any:
        return torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


class OwnPrediction(Trainer):
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss.mean() * 2, outputs.logits.argmax(-1), inputs["labels"]


class LogsMore(Trainer):
    """Keeps sums in its compute_loss, and logs them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entropies: list[torch.Tensor] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found: Any = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss, outputs = found
        self.entropies.append(torch.distributions.Categorical(logits=outputs.logits.detach()).entropy().mean())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.entropies:
            logs["entropy"] = float(torch.stack(self.entropies).mean())
            self.entropies.clear()
        super().log(logs, start_time)


class Distills(Trainer):
    """Learns from another model, which stays plain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = llama(num_hidden_layers=1).eval()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.softmax(-1)
        loss = nn.functional.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


class Weighted(Trainer):
    """Reads a column that isn't the model's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weight = inputs.pop("weight")
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        losses = nn.functional.cross_entropy(logits.mT, inputs["labels"], reduction="none").mean(-1)
        return (losses * weight).sum() / weight.sum()


class Penalizes(Trainer):
    """Adds a term of the weights to the loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        return (loss, outputs) if return_outputs else loss


class DividesByNorm(Trainer):
    """The loss has a weight by the norm of its own gradient."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        found: Any = torch.autograd.grad(outputs.loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        loss = outputs.loss * (1 + sum(g.detach().square().sum() for g in found if g is not None))
        return (loss, outputs) if return_outputs else loss


class SharpensLogits(Trainer):
    """A penalty of a gradient by the model's result, which is differentiated itself."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        [found] = torch.autograd.grad(outputs.logits.logsumexp(-1).sum(), outputs.logits, create_graph=True)
        loss = outputs.loss + found.square().sum()
        return (loss, outputs) if return_outputs else loss


class SetsItsLoss(Trainer):
    """A script sets another compute_loss on the object, which reads logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss = self.entropy  # pyright: ignore[reportAttributeAccessIssue]

    def entropy(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Returns the loss, and a part of the entropy of all predictions."""
        outputs = model(**inputs)
        loss = outputs.loss - 0.1 * torch.distributions.Categorical(logits=outputs.logits).entropy().mean()
        return (loss, outputs) if return_outputs else loss


class HiddenStates(Trainer):
    """A loss of the hidden states and the attention weights."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
        loss = outputs.loss + 0.1 * sum(h.square().mean() for h in outputs.hidden_states)
        loss = loss + sum(a.square().mean() for a in outputs.attentions)
        return (loss, outputs) if return_outputs else loss


def of_batches(found: Any, compute_result: bool = True) -> dict[str, float]:
    """For `batch_eval_metrics`: the predictions are tensors, a batch at a time."""
    return {"mean": float(found.predictions.float().mean())} if compute_result else {}


def of_inputs(found: Any) -> dict[str, float]:
    return {"inputs": float(found.inputs.sum()), "losses": float(found.losses.mean())}


def two_evaluations(model: Any) -> Mapping[str, Any]:
    return {"eval_dataset": {"one": ROWS[:4], "other": RAGGED[:3]}}


def saved_again(trainer: Any) -> Any:
    """What a script does with a trained model: saves it, reads it back, and asks it."""
    folder = Path(trainer.args.output_dir) / "final"
    trainer.save_model(str(folder))
    trainer.save_state()
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = ROWS[1]["input_ids"][None]
    assert torch.equal(again(ids).logits, LlamaForCausalLM.from_pretrained(folder)(ids).logits)
    return [again(ids).logits.detach(), trainer.model(input_ids=ids).logits.detach()]


def embeddings_frozen() -> Any:
    model = llama()
    model.get_input_embeddings().requires_grad_(False)
    return model


def hooked() -> Any:
    """A hook that scales, as tools for steering do, and one that looks at gradients of activations."""
    model = llama()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, result: result * 1.5)
    return model


def hooked_parameters() -> Any:
    """Hooks on parameters clamp gradients."""
    model = llama()
    for parameter in model.model.layers[0].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


RATES = {
    "polynomial": {"lr_end": 1e-4, "power": 2.0}, "constant": {}, "constant_with_warmup": {}, "inverse_sqrt": {},
    "cosine_with_restarts": {"num_cycles": 2}, "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3}, "warmup_stable_decay": {"num_decay_steps": 1},
}  # fmt: skip

SCENARIOS: dict[str, Scenario] = {
    **{
        f"rate, {kind}": Scenario({"lr_scheduler_type": kind, "lr_scheduler_kwargs": more, "warmup_steps": 1})
        for kind, more in RATES.items()
    },
    "warm-up as a fraction": Scenario({"warmup_steps": 0.5, "max_steps": 4}),
    "no warm-up, decay, epsilon": Scenario({"weight_decay": 0.1, "adam_epsilon": 1e-3, "adam_beta1": 0.5}),
    "epochs, logged and saved in each": Scenario(
        {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch",
         "save_strategy": "epoch", **ACCUMULATED}
    ),
    "a part of an epoch": Scenario({"max_steps": -1, "num_train_epochs": 0.5, "logging_first_step": True}),
    "last batch dropped": Scenario(
        {"max_steps": -1, "num_train_epochs": 2, "dataloader_drop_last": True, "per_device_train_batch_size": 5}
    ),
    "batches of other sizes": Scenario(
        {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 5, **ACCUMULATED}
    ),
    "one order for data, one for the rest": Scenario({"data_seed": 3, "seed": 5}),
    "in the order of the rows": Scenario({"train_sampling_strategy": "sequential"}),
    "deterministic": Scenario({"full_determinism": True}),
    "without a length": Scenario(more=lambda model: {"train_dataset": Endless()}),
    "without a length, accumulation": Scenario(
        {**ACCUMULATED, "max_steps": 4}, more=lambda model: {"train_dataset": Endless()}
    ),
    "caches emptied": Scenario({"torch_empty_cache_steps": 1, **ACCUMULATED}),
    "infinite losses are counted": Scenario({"logging_nan_inf_filter": False, **ACCUMULATED}),
    "memory is watched": Scenario({"skip_memory_metrics": True, "include_num_input_tokens_seen": "non_padding"}),
    "accumulation by accelerate": Scenario({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}),
    "batches split": Scenario({"accelerator_config": {"split_batches": True, "use_seedable_sampler": False}}),
    "loaders that stay": Scenario(
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2, **EVAL}
    ),
    "texts, padded to a multiple": Scenario(ACCUMULATED, rows=ragged_texts(), more=next_token),
    "texts, grouped by length": Scenario(
        {**ACCUMULATED, "train_sampling_strategy": "group_by_length"}, rows=ragged_texts(), more=next_token
    ),
    "labels of other names": Scenario(EVAL, model=question_answering, rows=answered()),
    "labels named": Scenario({**EVAL, "label_names": ["labels"]}, model=bert, rows=LABELLED),
    "metrics of inputs and losses": Scenario(
        {**EVAL, "include_for_metrics": ["inputs", "loss"]}, more=lambda model: {"compute_metrics": of_inputs}
    ),
    "metrics batch by batch": Scenario(
        {**EVAL, "batch_eval_metrics": True}, more=lambda model: {"compute_metrics": of_batches}
    ),
    "logits prepared for metrics": Scenario(
        EVAL,
        more=lambda model: {
            "compute_metrics": mean_of, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)
        },
    ),
    "evaluations not concatenated": Scenario({**EVAL, "eval_do_concat_batches": False, "eval_delay": 2}),
    "two evaluations": Scenario(EVAL, more=two_evaluations),
    "only the loss": Scenario({**EVAL, "prediction_loss_only": True, "eval_accumulation_steps": 2}),
    "stops early": Scenario(
        {**BEST, "learning_rate": 0.5}, more=lambda model: {"callbacks": [EarlyStoppingCallback(1)]}
    ),
    "the best at the end": Scenario({**BEST, "save_total_limit": 1, "learning_rate": 0.3}, rows=RAGGED),
    "saved when best": Scenario({**BEST, "save_strategy": "best"}),
    "saved without optimizer": Scenario({**SAVED, "save_only_model": True}),
    "optimizer in groups": Scenario({**ACCUMULATED, "max_grad_norm": 0.1}, more=in_groups),
    "optimizer and rates of one's own": Scenario(kind=OwnOptimizer),
    "decay of one's own": Scenario({"weight_decay": 0.5}, kind=NoDecayAtAll),
    "a class of an optimizer": Scenario(
        more=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.1})}
    ),
    "lomo-like: one value for all": Scenario({"optim": "adagrad", "max_grad_norm": 1e-3}),
    "unfreezes": Scenario({**ACCUMULATED, "max_steps": 4}, more=callbacks(Unfreezes)),
    "freezes": Scenario({**ACCUMULATED, "max_steps": 4}, more=callbacks(Freezes)),
    "averages are evaluated": Scenario({**EVAL, **ACCUMULATED}, more=callbacks(Averages)),
    "clamps weights": Scenario(ACCUMULATED, more=callbacks(ClampsWeights)),
    "sets the rate": Scenario({"lr_scheduler_type": "constant"}, more=callbacks(SetsRate)),
    "looks at the state": Scenario(more=callbacks(LooksAtState), after=noted(LooksAtState)),
    "changes dropout": Scenario({**ACCUMULATED, "max_steps": 4}, more=callbacks(ChangesDropout)),
    "asks": Scenario({**ACCUMULATED, "max_steps": 4, "logging_steps": 3}, more=callbacks(Asks)),
    "looks behind the step": Scenario(
        ACCUMULATED, more=callbacks(LooksBehindTheStep), after=noted(LooksBehindTheStep),
        reason="the callback LooksBehindTheStep may read gradients behind",
    ),
    "a bar": Scenario({"disable_tqdm": False}, more=callbacks(ProgressCallback)),
    "clipping of one's own": Scenario(
        ACCUMULATED, kind=OwnClipping, reason="OwnClipping has a _clip_grad_norm of its own"
    ),
    "a loader of one's own": Scenario(ACCUMULATED, kind=OwnLoader),
    "predictions of one's own": Scenario(EVAL, kind=OwnPrediction, more=lambda model: {"compute_metrics": mean_of}),
    "logs more": Scenario({**ACCUMULATED, "logging_steps": 2, "max_steps": 4}, kind=LogsMore),
    "distills": Scenario(ACCUMULATED, kind=Distills),
    "weights of rows": Scenario(
        {**ACCUMULATED, "remove_unused_columns": False}, kind=Weighted,
        rows=[{**row, "weight": torch.tensor(1.0 + i)} for i, row in enumerate(FULL)],
    ),
    "divides by a norm": Scenario(
        ACCUMULATED, kind=DividesByNorm, reason="the loss asks for gradients that go through the model"
    ),
    "sharpens logits": Scenario(ACCUMULATED, kind=SharpensLogits),
    "sets its loss": Scenario(ACCUMULATED, kind=SetsItsLoss),
    "hidden states": Scenario(ACCUMULATED, kind=HiddenStates, model=lambda: llama(attn_implementation="eager")),
    "evaluated first": Scenario(EVAL, more=lambda model: {}, after=lambda t: [t.evaluate(RAGGED)["eval_loss"]]),
    "saved and read again": Scenario({"save_strategy": "no"}, after=saved_again),
    "embeddings frozen": Scenario(ACCUMULATED, model=embeddings_frozen),
    "hooks on modules": Scenario(ACCUMULATED, model=hooked),
    "hooks on parameters": Scenario(model=hooked_parameters),
    "hooks on parameters, accumulation": Scenario(
        ACCUMULATED, model=hooked_parameters, reason="`model.layers.0.self_attn.q_proj.weight` has a hook"
    ),
    "with a tokenizer": Scenario(
        SAVED, rows=RAGGED,
        more=lambda model: {"processing_class": tokenizer(), "data_collator": DataCollatorForSeq2Seq(tokenizer())},
    ),
    "padded by the tokenizer": Scenario(
        EVAL, model=bert,
        rows=[{"input_ids": row["input_ids"], "labels": i % 2} for i, row in enumerate(ragged_texts())],
        more=lambda model: {"data_collator": DataCollatorWithPadding(tokenizer())},
    ),
}  # fmt: skip

FAST = ("unfreezes", "hooks on parameters", "labels of other names")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.users) for name in SCENARIOS]
)
def test_an_option_of_a_trainer_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)


@pytest.mark.users
def test_a_trainer_that_trains_evaluates_and_trains_again_has_the_stock_runs_bits(tmp_path: Path) -> None:
    found: list[Any] = []
    scenario = Scenario(ACCUMULATED, rows=RAGGED, after=lambda t: t.evaluate())
    for streams in (False, True):
        ran = run(scenario, tmp_path / str(streams), streams=streams)
        trainer = ran.trainer
        trainer.args.max_steps = 5
        trainer.train_dataset = ROWS
        trainer.train()
        losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
        state = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
        found.append((losses, state, trainer.predict(RAGGED).metrics["test_loss"]))
    assert_same(found[1], found[0])
    assert trainer._one_step.reason is None
    assert trainer.train_step.progress.count in (5, 8)
