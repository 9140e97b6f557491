"""Scripts as people write them around transformers' Trainer, each with a habit of its own: the stock run's bits."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import (
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)

from tests.integrations.runs import (
    EVAL,
    FULL,
    RAGGED,
    REASSOCIATED,
    ROWS,
    SAVED,
    SUMMED,
    TWO,
    Scenario,
    assert_streams_as_stock,
    kept,
    llama,
    on,
    with_loss,
)
from tests.integrations.test_trainer import FOUR, READS
from tests.integrations.words import ragged_texts

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
DROPS = {"attention_dropout": 0.2}


# -- losses -----------------------------------------------------------------------------------------------------------


def head_again(self: Any, model: Any, inputs: Any) -> Any:
    """Applies the head once more, to an inner layer."""
    outputs = model(**inputs, output_hidden_states=True)
    early = model.lm_head(outputs.hidden_states[1])
    return outputs.loss + nn.functional.cross_entropy(early.flatten(0, 1), inputs["labels"].flatten()), outputs


def hidden_states(self: Any, model: Any, inputs: Any) -> Any:
    """A loss of the hidden states and the attention weights."""
    outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
    loss = outputs.loss + 0.1 * sum(h.square().mean() for h in outputs.hidden_states)
    return loss + sum(a.square().mean() for a in outputs.attentions), outputs


def logs(self: Any, model: Any, inputs: Any) -> Any:
    """Logs from within the loss what accelerate gathers."""
    outputs = model(**inputs)
    with torch.no_grad():
        right = (outputs.logits.argmax(-1) == inputs["labels"]).float().mean()
        self.log({"right": self.accelerator.gather_for_metrics(right).mean().item()})
    return outputs.loss, outputs


def nan_once(self: Any, model: Any, inputs: Any) -> Any:
    """One loss is not a number."""
    outputs = model(**inputs)
    is_nan = self.state.global_step == 1 and model.training
    return outputs.loss * (float("nan") if is_nan else 1.0), outputs


def positional(self: Any, model: Any, inputs: Any) -> Any:
    """Gives positional arguments, and takes a tuple."""
    outputs = model(inputs["input_ids"], inputs.get("attention_mask"), return_dict=False)
    return nn.functional.cross_entropy(outputs[0].mT, inputs["labels"]), {"logits": outputs[0]}


def unwraps(self: Any, model: Any, inputs: Any) -> Any:
    """Calls `forward` by its name, of what accelerate unwraps."""
    outputs = self.accelerator.unwrap_model(model).forward(**inputs)
    return outputs.loss, outputs


def sharpens_logits(self: Any, model: Any, inputs: Any) -> Any:
    """A penalty of a gradient by the model's result, which is differentiated itself."""
    outputs = model(**inputs)
    [found] = torch.autograd.grad(outputs.logits.logsumexp(-1).sum(), outputs.logits, create_graph=True)
    return outputs.loss + found.square().sum(), outputs


class WithParameters(with_loss(lambda *_: None)):
    """A loss with parameters of its own, which its optimizer trains too; and a teacher, which stays plain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.centre = nn.Parameter(torch.randn(64))
        self.teacher = llama(num_hidden_layers=1).eval()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().create_optimizer(*args, **kwargs)
        if not any(p is self.centre for group in found.param_groups for p in group["params"]):
            found.add_param_group({"params": [self.centre], "lr": 0.1})
        return found

    def loss_of(self, model: Any, inputs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.softmax(-1)
        loss = nn.functional.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean")
        return loss + (outputs.logits - self.centre).square().mean(), outputs


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


# -- trainers ---------------------------------------------------------------------------------------------------------


class OwnOptimizer(Trainer):
    """Makes an optimizer, in groups by name, and a scheduler by itself."""

    optimizer: Any
    lr_scheduler: Any

    def create_optimizer(self, model: Any = None) -> Any:
        named = dict(self.model.named_parameters())  # pyright: ignore
        heads = [p for name, p in named.items() if "head" in name]
        rest = [p for name, p in named.items() if "head" not in name]
        self.optimizer = torch.optim.NAdam([{"params": heads, "lr": 0.03}, {"params": rest}], lr=0.01)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer if optimizer is None else optimizer, [0.03, 0.01], total_steps=num_training_steps + 1
        )
        return self.lr_scheduler


class Before(Trainer):
    """A script's calls between the constructor and train()."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluate()
        self.create_optimizer_and_scheduler(num_training_steps=self.args.max_steps)
        self.model.model.embed_tokens.requires_grad_(False)  # pyright: ignore
        assert self.get_num_trainable_parameters() > 0
        assert self.get_learning_rates()
        return super().train(*args, **kwargs)


class Rebuilds(Trainer):
    """Gives the model more tokens, another head and fewer layers when the trainer is there."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(4)
        model: Any = self.model
        model.resize_token_embeddings(72, mean_resizing=False)
        model.lm_head = nn.Linear(32, 72, bias=False)
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        return super().train(*args, **kwargs)


# -- callbacks ------------------------------------------------------------------------------------------------------


class Averages(TrainerCallback):
    """Trains an average of the weights, and swaps the last ones in for evaluations."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            self.shadow.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.5)
        self.last = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.copy_(self.shadow[name])

    @torch.no_grad()
    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(self.last[name])


def prunes(*, model: Any, **_: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)
        parameter.data[parameter.data.abs() < 0.01] = 0.0


def sets_rate(*, state: Any, optimizer: Any, **_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.01 * (state.global_step + 1), 0.01 * state.global_step


def resets(*, state: Any, model: Any, optimizer: Any, **_: Any) -> Any:
    """Warm restarts of the optimizer's moments, and new values for the head."""
    if state.global_step == 2:
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].zero_()
            optimizer.state[parameter]["exp_avg_sq"].mul_(0.5)
        torch.manual_seed(5)
        model.lm_head.reset_parameters()
    return [float(optimizer.state[p]["exp_avg"].abs().sum()) for p in model.parameters()]


def new_state(*, state: Any, optimizer: Any, **_: Any) -> None:
    if state.global_step == 2:
        optimizer.state.clear()


def rewinds(*, state: Any, model: Any, **_: Any) -> None:
    if state.global_step == 2:
        model.load_state_dict({k: v.flip(0) for k, v in model.state_dict().items()})


def asks(*, model: Any, **_: Any) -> Any:
    """Asks the model, and a whole copy, with inputs of all lengths."""
    other = copy.deepcopy(model).eval()
    model.eval()
    with torch.inference_mode():
        inputs = [ROWS[0]["input_ids"][None, :length] for length in (1, 3, 8)]
        found = [float(each(ids).logits.double().sum()) for each in (model, other) for ids in inputs]
    model.train()
    return [*found, [float(p.detach().norm()) for p in model.parameters()]]


def changes_dropout(*, state: Any, control: Any, model: Any, **_: Any) -> None:
    """Also evaluates, logs and saves when it likes."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1 * state.global_step
    control.should_evaluate = control.should_log = control.should_save = state.global_step == 2


def clips_less(*, args: Any, state: Any, **_: Any) -> None:
    args.max_grad_norm = 0.1 * state.global_step


def hooks(*, state: Any, model: Any, **_: Any) -> None:
    """Adds a hook after the first step, and takes a layer away after the second."""
    if state.global_step == 1:
        model.model.norm.register_forward_hook(lambda module, args, result: result * 0.9)
    if state.global_step == 2:
        del model.model.layers[-1]


def sub_steps(*, state: Any, model: Any, **_: Any) -> Any:
    return state.global_step, float(model.lm_head.weight.detach().sum())


# -- models -----------------------------------------------------------------------------------------------------------


def steered() -> Any:
    """A hook that scales, one that counts in a buffer, one that drops tokens, and pruned weights."""
    model = llama()
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_hook(lambda module, args, result: module.seen.add_(1) and None)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, result: result * 1.5)

    def drop(module: Any, args: Any, kwargs: Any) -> Any:
        if module.training:
            kwargs["input_ids"] = torch.where(torch.rand(kwargs["input_ids"].shape) < 0.1, 1, kwargs["input_ids"])
        return args, kwargs

    model.register_forward_pre_hook(drop, with_kwargs=True)
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.up_proj, "weight", amount=0.5)
    return model


def placed() -> Any:
    """As `from_pretrained(device_map=...)` leaves a model."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype="auto")


# -- data and optimizers ----------------------------------------------------------------------------------------------


def flat(model: Any) -> Mapping[str, Any]:
    return {"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)}


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer of two, with slow weights that follow."""

    def __init__(self, parameters: Any) -> None:
        known = list(parameters)
        matrices, rest = [p for p in known if p.ndim == 2], [p for p in known if p.ndim != 2]
        self.parts = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
        self.slow = {p: p.detach().clone() for p in known}
        super().__init__(known, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()
        with torch.no_grad():
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def optimized(make: Any) -> Any:
    def more(model: Any) -> Mapping[str, Any]:
        optimizer = make(model)
        return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))}

    return more


LINEAR = {"optim_target_modules": "all-linear", "optim_args": "rank=4"}
ALL = "the optimizer can't update in a training step"

SCENARIOS: dict[str, Scenario] = {
    "the head once more": Scenario(SUMMED, kind=with_loss(head_again), reason=READS, tolerance=REASSOCIATED),
    "hidden states": Scenario(TWO, kind=with_loss(hidden_states), model=lambda: llama(attn_implementation="eager")),
    "a loss with parameters": Scenario(TWO, kind=WithParameters),
    "logs in the loss": Scenario(TWO, kind=with_loss(logs)),
    "a loss that is no number": Scenario({**TWO, "logging_nan_inf_filter": False}, kind=with_loss(nan_once)),
    "positional": Scenario(TWO, kind=with_loss(positional), rows=FULL),
    "unwraps": Scenario(TWO, kind=with_loss(unwraps)),
    "sharpens logits": Scenario(TWO, kind=with_loss(sharpens_logits)),
    "sets its loss": Scenario(TWO, kind=SetsItsLoss),
    "optimizer and rates of one's own": Scenario(TWO, kind=OwnOptimizer),
    "used before it trains": Scenario(TWO, kind=Before),
    "rebuilt before it trains": Scenario(TWO, kind=Rebuilds),
    "averages are trained": Scenario({**EVAL, **TWO}, more=lambda model: {"callbacks": [Averages()]}),
    "weights pruned": Scenario(TWO, more=on("step_end", prunes)),
    "sets the rate": Scenario({"lr_scheduler_type": "constant"}, more=on("step_begin", sets_rate)),
    "moments and a head reset": Scenario(FOUR, more=on("step_end", resets), after=kept),
    "state thrown away": Scenario(FOUR, more=on("step_end", new_state)),
    "weights loaded between": Scenario(FOUR, more=on("step_end", rewinds)),
    "asked in all lengths": Scenario(TWO, more=on("step_end", asks), after=kept),
    "changes dropout": Scenario({**FOUR, "logging_steps": 3}, more=on("step_end", changes_dropout)),
    "clipping changed": Scenario(FOUR, more=on("step_end", clips_less), is_mixed=True),
    "a hook more, a layer less": Scenario(FOUR, more=on("step_end", hooks)),
    "sub-steps": Scenario({"gradient_accumulation_steps": 3}, more=on("substep_end", sub_steps), after=kept),
    "hooks on modules, pruned": Scenario({**TWO, **EVAL}, model=steered),
    "placed by device_map": Scenario(TWO, model=placed),
    "flattened, with lengths": Scenario(TWO, rows=ragged_texts(), more=flat),
    "cache in training": Scenario({"use_cache": True, **TWO}, model=lambda: llama(use_cache=True)),
    "an optimizer of the head": Scenario(
        TWO, more=optimized(lambda model: torch.optim.AdamW(model.lm_head.parameters(), lr=0.01))
    ),
    "several optimizers in one": Scenario(TWO, more=optimized(lambda model: Both(model.parameters()))),
    "amsgrad, a rate that is a tensor": Scenario(
        TWO, more=optimized(lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True))
    ),
}  # fmt: skip
PACKAGED: dict[str, tuple[str, Scenario]] = {
    "galore, layer by layer": ("galore_torch", Scenario({"optim": "galore_adamw_layerwise", **LINEAR}, reason=ALL)),
    "lomo": ("lomo_optim", Scenario({"optim": "lomo", "max_grad_norm": 0.0}, reason=ALL)),
    "schedule-free": (
        "schedulefree", Scenario({"optim": "schedule_free_adamw", **TWO, **SAVED, **EVAL,
                                  "lr_scheduler_type": "constant"}),
    ),
    "adamw of torchao": ("torchao", Scenario({"optim": "adamw_torch_8bit"})),
    "adamw of bitsandbytes": ("bitsandbytes", Scenario({**TWO, **SAVED, "optim": "adamw_bnb_8bit"}, rows=RAGGED)),
}  # fmt: skip
"""Optimizers of packages that few have."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_that_streams_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)


@pytest.mark.parametrize("name", PACKAGED)
def test_an_optimizer_of_another_package_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    package, scenario = PACKAGED[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    manager: Any = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it keeps options of single parameters for the whole process
    try:
        assert_streams_as_stock(scenario, tmp_path)
    finally:
        manager.initialize()
