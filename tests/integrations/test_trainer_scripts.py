"""Scripts as people write them around transformers' Trainer, each with a habit of its own: the stock run's bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import SaveStrategy

from tests.integrations.runs import RAGGED, ROWS, Scenario, assert_streams_as_stock, llama
from tests.integrations.test_trainer import (
    ACCUMULATED,
    EVAL,
    FULL,
    POINTS,
    REASSOCIATED,
    SUMMED,
    Plain,
)
from tests.integrations.test_trainer_options import SAVED, noted

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
THREE = {"gradient_accumulation_steps": 3}


# -- losses -----------------------------------------------------------------------------------------------------------


class Loss(Trainer):
    """A loss as a user writes one: `loss_of(model, inputs)` returns it and the model's outputs."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = self.loss_of(model, inputs)
        return (loss, outputs) if return_outputs else loss


class Penalizes(Loss):
    """Adds a term of the weights to the loss."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs)
        return outputs.loss + 0.1 * sum(p.square().sum() for p in model.parameters()), outputs


class Embeds(Loss):
    """Calls the embedding by itself, and gives the model what it returned."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        labels = inputs.pop("labels")
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        outputs = model(inputs_embeds=embedded * 1.5, labels=labels)
        return outputs.loss, outputs


class Perturbs(Loss):
    """Adds noise to embeddings that have no gradient."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            embedded = model.get_input_embeddings()(inputs["input_ids"])
        outputs = model(inputs_embeds=embedded.detach() * 1.1, labels=inputs["labels"])
        return outputs.loss, outputs


class HeadAgain(Loss):
    """Applies the head once more, to an inner layer."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs, output_hidden_states=True)
        early = model.lm_head(outputs.hidden_states[1])
        return outputs.loss + nn.functional.cross_entropy(early.flatten(0, 1), inputs["labels"].flatten()), outputs


class LossInModule(Loss):
    """A loss with parameters of its own, which its optimizer trains too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.centre = nn.Parameter(torch.randn(64))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().create_optimizer(*args, **kwargs)
        if not any(p is self.centre for group in found.param_groups for p in group["params"]):
            found.add_param_group({"params": [self.centre], "lr": 0.1})
        return found

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs)
        return outputs.loss + (outputs.logits - self.centre).square().mean(), outputs


class Contrasts(Loss):
    """Two views of a batch in one call, drawn apart by dropout."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        labels = inputs.pop("labels")
        outputs = model(**{k: torch.cat([v, v]) for k, v in inputs.items()}, output_hidden_states=True)
        one, two = nn.functional.normalize(outputs.hidden_states[-1].mean(1), dim=-1).chunk(2)
        scores = one @ two.T / 0.1
        loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        return loss + 0 * labels.sum(), outputs


class Focal(Loss):
    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        keep = wanted != -100
        losses = nn.functional.cross_entropy(logits[keep], wanted[keep], reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean(), outputs


class Logs(Loss):
    """Logs from within the loss."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs)
        self.log({"aux": outputs.logits.detach().square().mean().item()})
        return outputs.loss, outputs


class ByStep(Loss):
    """A weight that follows the number of steps, and whether it trains."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs)
        share = self.state.global_step / self.state.max_steps if model.training else 0.0
        return outputs.loss + share * outputs.logits.square().mean(), outputs


class Nothing(Loss):
    """Skips a batch that it doesn't like: a loss without a call of the model."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        if inputs["input_ids"].sum() % 3 == 0:
            outputs = model(**inputs)
            return outputs.loss * 0, outputs
        outputs = model(**inputs)
        return outputs.loss, outputs


class NanOnce(Loss):
    """One loss is not a number."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(**inputs)
        if self.state.global_step == 1 and model.training:
            return outputs.loss * float("nan"), outputs
        return outputs.loss, outputs


class Adversarial(Loss):
    """Perturbs the embedding's weights by their gradient, as FGM does, and trains on both losses."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = Trainer.training_step(self, model, dict(inputs), num_items_in_batch)
        weight = model.get_input_embeddings().weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight += 0.5 * weight.grad / weight.grad.norm()
        Trainer.training_step(self, model, dict(inputs), num_items_in_batch)
        with torch.no_grad():
            weight.copy_(kept)
        return loss

    compute_loss = Trainer.compute_loss


class Modes(Loss):
    """Looks at its inputs in eval mode first."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        model.eval()
        with torch.no_grad():
            hard = model(**inputs).logits.logsumexp(-1).mean()
        model.train()
        outputs = model(**inputs)
        return outputs.loss * hard, outputs


class Inference(Loss):
    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        with torch.inference_mode():
            before = model(**inputs).logits.mean().item()
        outputs = model(**inputs)
        return outputs.loss * (1 + abs(before)), outputs


class PlainDict(Loss):
    """Positional arguments."""

    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        outputs = model(inputs["input_ids"], inputs.get("attention_mask"))
        return nn.functional.cross_entropy(outputs[0].mT, inputs["labels"]), outputs


class Tuples(Loss):
    def loss_of(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        loss, logits, *_ = model(**inputs, return_dict=False)
        return loss, {"loss": loss, "logits": logits}


# -- trainers ---------------------------------------------------------------------------------------------------------


class EarlyOptimizer(Trainer):
    """Makes its optimizer as soon as it can, with a rate that falls from layer to layer."""

    def create_optimizer(self, model: Any = None) -> Any:
        decayed = get_parameter_names(self.model, [nn.LayerNorm], ["bias", "norm"])  # pyright: ignore
        groups: list[dict[str, Any]] = []
        for name, parameter in self.model.named_parameters():  # pyright: ignore
            depth = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else 3
            if parameter.requires_grad:
                decay = 0.1 if name in decayed else 0.0
                groups.append({"params": [parameter], "lr": 0.01 * 0.8 ** (3 - depth), "weight_decay": decay})
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
        return self.optimizer


class Before(Trainer):
    """A script's calls between the constructor and train()."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluate()
        self.create_optimizer_and_scheduler(num_training_steps=self.args.max_steps)
        self.model.model.embed_tokens.requires_grad_(False)  # pyright: ignore
        assert self.get_num_trainable_parameters() > 0
        assert self.get_learning_rates()
        return super().train(*args, **kwargs)


class Resizes(Trainer):
    """Gives the model more tokens when the trainer is there."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(4)
        self.model.resize_token_embeddings(72, mean_resizing=False)  # pyright: ignore
        return super().train(*args, **kwargs)


class Reinitializes(Trainer):
    """Another head, and layers thrown away, when the trainer is there."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(4)
        model: Any = self.model
        model.lm_head = nn.Linear(32, 64, bias=False)
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        return super().train(*args, **kwargs)


class Evaluates(Trainer):
    """An evaluation of its own, through the wrapped model."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluate(*args, **kwargs)
        model: Any = self.model
        was, losses = model.training, []
        model.eval()
        for batch in self.get_eval_dataloader():
            with torch.no_grad():
                losses.append(model(**self._prepare_inputs(batch)).loss.item())
        model.train(was)
        found["eval_perplexity"] = float(torch.tensor(losses).mean().exp())
        self.log({"perplexity": found["eval_perplexity"]})
        return found


class Inputs(Trainer):
    """Changes its batches where it prepares them."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        found: Any = super()._prepare_inputs(inputs)
        return {**found, "input_ids": found["input_ids"].clamp(max=40)}


class OwnSave(Trainer):
    """Saves by itself."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        torch.save(self.model.state_dict(), Path(output_dir) / "weights.pt")  # pyright: ignore


class Sampled(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(7)
        return torch.utils.data.WeightedRandomSampler([float(i + 1) for i in range(12)], 12, generator=generator)


# -- callbacks ------------------------------------------------------------------------------------------------------


class OnStep(TrainerCallback):
    """Does something with the model behind each step."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        self.found.append(self.act(args, state, control, **rest))


def on_step(act: Any) -> Any:
    return lambda model: {"callbacks": [OnStep(act)]}


def halves(args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def prunes(args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
    for parameter in model.parameters():
        parameter.data[parameter.data.abs() < 0.01] = 0.0


def resets(args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
    """Warm restarts of the optimizer's moments."""
    if state.global_step == 2:
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].zero_()
            optimizer.state[parameter]["exp_avg_sq"].mul_(0.5)


def new_state(args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
    if state.global_step == 2:
        optimizer.state.clear()


def rewinds(args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
    if state.global_step == 2:
        model.load_state_dict({k: v.flip(0) for k, v in model.state_dict().items()})


def whole_copies(args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> Any:
    import copy

    other = copy.deepcopy(model).eval()
    with torch.no_grad():
        return other(input_ids=ROWS[0]["input_ids"][None]).logits.sum().item()


def norms(args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> Any:
    return [float(p.detach().norm()) for p in model.parameters()]


def stops_late(args: Any, state: Any, control: Any, **_: Any) -> None:
    control.should_training_stop = state.global_step == 2


def ends_epoch(args: Any, state: Any, control: Any, **_: Any) -> None:
    control.should_epoch_stop = state.global_step == 1


def clips_less(args: Any, state: Any, control: Any, **_: Any) -> None:
    args.max_grad_norm = 0.1 * state.global_step


def no_rate(args: Any, state: Any, control: Any, *, lr_scheduler: Any, **_: Any) -> None:
    lr_scheduler.base_lrs = [lr * 0.7 for lr in lr_scheduler.base_lrs]


def hooks(args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
    if state.global_step == 1:
        model.model.layers[0].register_forward_hook(
            lambda module, args, result: result * 0.9 if isinstance(result, torch.Tensor) else result
        )


class Epochs(TrainerCallback):
    """Another data set in each epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        torch.manual_seed(int(state.epoch or 0))


class SubSteps(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.found.append((state.global_step, float(model.lm_head.weight.detach().sum())))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.found.append(sorted(logs))


# -- models -----------------------------------------------------------------------------------------------------------


class Multi(nn.Module):
    """Several losses, of which one is for the log, and outputs of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.classes, self.score = nn.Linear(4, 3), nn.Linear(4, 1)
        self.log_scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: Any, labels: Any = None, target: Any = None, names: Any = None) -> dict[str, Any]:
        hidden = self.body(x)
        logits, score = self.classes(hidden), self.score(hidden)[..., 0]
        first = nn.functional.cross_entropy(logits, labels)
        second = nn.functional.mse_loss(score, target)
        scale = (-self.log_scale).exp()
        loss = scale[0] * first + scale[1] * second + self.log_scale.sum()
        return {"loss": loss, "logits": (logits, score), "parts": {"first": first.detach(), "none": None}}


TARGETED = [{**row, "labels": torch.tensor(i % 3), "target": torch.tensor(i / 6)} for i, row in enumerate(POINTS)]


class Normed(Plain):
    """Weight normalization, spectral normalization, and a mask that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.layers[0])
        torch.nn.utils.parametrizations.spectral_norm(self.layers[2])
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x) * self.mask
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recurrent(nn.Module):
    """An LSTM, with packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        lengths = attention_mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.rnn(packed)
        logits = self.head(torch.cat([last[-1], last[-2]], -1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


MASKED_LABELLED = [{**row, "labels": torch.tensor(i % 2)} for i, row in enumerate(RAGGED)]


def mixed_dtypes() -> Any:
    model = llama().to(torch.bfloat16)
    for name, module in model.named_modules():
        if "norm" in name:
            module.float()
    return model


def trained_from_a_middle() -> Any:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    return model


class Again(Plain):
    """Calls a layer twice."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        first, act, middle, _, last = self.layers
        logits = last(act(middle(act(middle(act(first(x)))))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


# -- data -------------------------------------------------------------------------------------------------------------


def named_rows(batch: list[Any]) -> dict[str, Any]:
    """A collator that adds what is no tensor."""
    stacked = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
    return {**stacked, "names": [f"row {int(row['x'][0])}" for row in batch]}


class Counted(torch.utils.data.Dataset[Any]):
    """Rows that are made anew each time, with noise."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {**POINTS[index], "x": POINTS[index]["x"] + torch.randn(4)}


class Batches(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from RAGGED * 2


def some_parameters(model: Any) -> Mapping[str, Any]:
    """An optimizer of the head alone, where the rest has gradients too."""
    optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=0.01)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))}


def muon(model: Any) -> Mapping[str, Any]:
    """Muon alone, of matrices."""
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))}


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer of two."""

    def __init__(self, parameters: Any) -> None:
        known = list(parameters)
        matrices = [p for p in known if p.ndim == 2]
        self.parts = [
            torch.optim.Muon(matrices, lr=0.02),
            torch.optim.AdamW([p for p in known if p.ndim != 2], lr=0.01),
        ]
        super().__init__(known, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


def muon_and_adamw(model: Any) -> Mapping[str, Any]:
    optimizer = Both(model.parameters())
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))}


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow fast ones: an optimizer around an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.slow = {p: p.detach().clone() for group in inner.param_groups for p in group["params"]}
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for parameter, slow in self.slow.items():
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


def lookahead(model: Any) -> Mapping[str, Any]:
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01))
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))}


def foreach(model: Any) -> Mapping[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True, foreach=False)
    return {"optimizers": (optimizer, None)}


def all_of_it(found: Any) -> dict[str, float]:
    return {"sum": float(found.predictions.sum()), "labels": float(found.label_ids.sum())}


READS, GIVES = "the loss reads the parameter", "the loss gives the model an input that has gradients"

SCENARIOS: dict[str, Scenario] = {
    "a penalty of the weights": Scenario(SUMMED, kind=Penalizes, reason=READS, tolerance=REASSOCIATED),
    "a penalty of the weights, each": Scenario(kind=Penalizes, reason=READS),
    "the embedding by itself": Scenario(ACCUMULATED, kind=Embeds, reason=GIVES),
    "the embedding by itself, each": Scenario(kind=Embeds, reason=GIVES),
    "noise on embeddings": Scenario(ACCUMULATED, kind=Perturbs),
    "the head once more": Scenario(kind=HeadAgain, reason=READS),
    "the head once more, accumulation": Scenario(SUMMED, kind=HeadAgain, reason=READS, tolerance=REASSOCIATED),
    "a loss with parameters": Scenario(ACCUMULATED, kind=LossInModule),
    "two views in one call": Scenario(ACCUMULATED, kind=Contrasts, model=lambda: llama(attention_dropout=0.2)),
    "focal": Scenario(ACCUMULATED, kind=Focal, rows=RAGGED),
    "logs in the loss": Scenario(ACCUMULATED, kind=Logs),
    "a weight that follows the step": Scenario({**ACCUMULATED, **EVAL}, kind=ByStep),
    "a loss of zero": Scenario(ACCUMULATED, kind=Nothing),
    "a loss that is no number": Scenario({**ACCUMULATED, "max_steps": 2}, kind=NanOnce),
    "adversarial": Scenario(kind=Adversarial, reason="Adversarial has a training_step"),
    "looks in eval mode": Scenario(ACCUMULATED, kind=Modes, model=lambda: llama(attention_dropout=0.2)),
    "looks in inference mode": Scenario(ACCUMULATED, kind=Inference),
    "positional": Scenario(ACCUMULATED, kind=PlainDict, rows=FULL),
    "tuples": Scenario(ACCUMULATED, kind=Tuples),
    "rates by layer": Scenario({**ACCUMULATED, **SAVED}, kind=EarlyOptimizer),
    "used before it trains": Scenario(ACCUMULATED, kind=Before),
    "more tokens": Scenario(ACCUMULATED, kind=Resizes),
    "other layers": Scenario(ACCUMULATED, kind=Reinitializes),
    "evaluates by itself": Scenario({**ACCUMULATED, **EVAL}, kind=Evaluates),
    "prepares its inputs": Scenario(ACCUMULATED, kind=Inputs),
    "saves by itself": Scenario(SAVED, kind=OwnSave),
    "a sampler of its own": Scenario(ACCUMULATED, kind=Sampled),
    "weights halved": Scenario(ACCUMULATED, more=on_step(halves)),
    "weights pruned": Scenario(ACCUMULATED, more=on_step(prunes)),
    "moments reset": Scenario({**ACCUMULATED, "max_steps": 4}, more=on_step(resets)),
    "state thrown away": Scenario({**ACCUMULATED, "max_steps": 4}, more=on_step(new_state)),
    "weights loaded between": Scenario({**ACCUMULATED, "max_steps": 4}, more=on_step(rewinds)),
    "whole copies": Scenario(ACCUMULATED, more=on_step(whole_copies), after=noted(OnStep)),
    "norms of weights": Scenario(ACCUMULATED, more=on_step(norms), after=noted(OnStep)),
    "stopped": Scenario({**ACCUMULATED, **SAVED}, more=on_step(stops_late)),
    "an epoch ended": Scenario({"max_steps": 4}, more=on_step(ends_epoch)),
    "clipping changed": Scenario({**ACCUMULATED, "max_steps": 4}, more=on_step(clips_less), is_mixed=True),
    "base rates changed": Scenario({"lr_scheduler_type": "cosine"}, more=on_step(no_rate)),
    "a hook added between": Scenario({**ACCUMULATED, "max_steps": 4}, more=on_step(hooks)),
    "a seed for each epoch": Scenario(
        {"max_steps": -1, "num_train_epochs": 2}, model=lambda: llama(attention_dropout=0.2),
        more=lambda model: {"callbacks": [Epochs()]},
    ),
    "sub-steps": Scenario({**THREE}, more=lambda model: {"callbacks": [SubSteps()]}, after=noted(SubSteps)),
    "several losses": Scenario(
        {**ACCUMULATED, **EVAL, "remove_unused_columns": False, "label_names": ["labels", "target"]},
        model=Multi, rows=TARGETED, more=lambda model: {"data_collator": named_rows},
    ),
    "normalized weights": Scenario(ACCUMULATED, model=Normed, rows=POINTS),
    "an lstm": Scenario(model=Recurrent, rows=MASKED_LABELLED),
    "bf16 with fp32 norms": Scenario({**ACCUMULATED, "bf16": True}, model=mixed_dtypes),
    "some layers frozen": Scenario({**ACCUMULATED, "weight_decay": 0.1}, model=trained_from_a_middle),
    "a layer twice": Scenario(SUMMED, model=Again, rows=POINTS, tolerance=REASSOCIATED),
    "rows with noise": Scenario(ACCUMULATED, model=Plain, more=lambda model: {"train_dataset": Counted()}, rows=POINTS),
    "an iterable evaluation": Scenario(
        {**EVAL, "dataloader_num_workers": 1}, more=lambda model: {"eval_dataset": Batches()}, rows=RAGGED
    ),
    "an optimizer of the head": Scenario(ACCUMULATED, more=some_parameters),
    "muon alone": Scenario(ACCUMULATED, more=muon),
    "two optimizers in one": Scenario(ACCUMULATED, more=muon_and_adamw),
    "an optimizer around another": Scenario(ACCUMULATED, more=lookahead),
    "amsgrad, a rate that is a tensor": Scenario(ACCUMULATED, more=foreach),
    "fractions of the training": Scenario(
        {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 0.5, "save_strategy": "steps", "save_steps": 0.5,
         "logging_steps": 0.25, **THREE}
    ),
    "three batches of two make two updates of an epoch": Scenario(
        {**THREE, "max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 5}, rows=RAGGED
    ),
    "smoothed labels, ragged, three": Scenario({**THREE, "label_smoothing_factor": 0.2, **EVAL}, rows=RAGGED),
    "metrics of everything": Scenario(
        {**EVAL, "eval_accumulation_steps": 1, "eval_use_gather_object": True},
        rows=RAGGED, more=lambda model: {"compute_metrics": all_of_it},
    ),
    "bf16, checkpointing, evaluation": Scenario(
        {"bf16": True, "gradient_checkpointing": True, **EVAL, **THREE}, rows=RAGGED
    ),
    "epsilon, groups, saved every epoch": Scenario(
        {"max_steps": -1, "num_train_epochs": 2, "save_strategy": SaveStrategy.EPOCH, "save_total_limit": 1, **THREE}
    ),
    "adafactor, its own rate": Scenario(
        {**ACCUMULATED, "optim": "adafactor", "optim_args": "scale_parameter=True,relative_step=True,warmup_init=True",
         "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    ),
    "cache in training": Scenario({"use_cache": True, **ACCUMULATED}, model=lambda: llama(use_cache=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)
