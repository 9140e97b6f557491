"""Models with odd state, inputs and outputs under Trainer, and rare training arguments: the stock run's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DataCollatorForPermutationLanguageModeling,
    DataCollatorWithFlattening,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
    YolosConfig,
    YolosForObjectDetection,
)
from transformers.utils import ModelOutput

from tests.comparing import assert_same
from tests.integrations.runs import GIVEN, RAGGED, ROWS, Scenario, assert_streams_as_stock, llama, run, streamed_kind
from tests.integrations.test_peft import lora
from tests.integrations.test_trainer import ACCUMULATED, EVAL, FULL, POINTS, REASSOCIATED, Plain
from tests.integrations.test_trainer_options import SAVED, ragged_texts
from tests.integrations.words import tokenizer

pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]


def seeded(kind: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return kind()

    return make


def answer(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Answer(ModelOutput):
    """A class of outputs of one's own."""

    loss: Any = None
    logits: Any = None
    names: Any = None


class OwnOutputs(Plain):
    """Takes the count of items, and returns a class of its own with a text in it."""

    accepts_loss_kwargs = True

    def forward(self, x: Any, labels: Any = None, num_items_in_batch: Any = None) -> Any:  # pyright: ignore
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return Answer(loss / (len(x) if num_items_in_batch is None else num_items_in_batch), logits, None)


class NestedInputs(nn.Module):
    """Two towers with a dictionary and a list as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 2)

    def forward(self, pair: Any, parts: Any, labels: Any = None) -> Any:
        both = self.left(pair["x"]) * self.scale.exp() + self.right(pair["deep"][0])
        return answer(self.head(both + sum(parts)), labels)


def nested(batch: list[Any]) -> dict[str, Any]:
    x = torch.stack([row["x"] for row in batch])
    labels = torch.stack([row["labels"] for row in batch])
    return {"pair": {"x": x, "deep": (x.flip(0),)}, "parts": [x * 0.1, x * 0.2], "labels": labels}


class Keeps(Plain):
    """Keeps what it has computed, for the log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, torch.Tensor] = {}

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.layers(x)
        found = answer(logits, labels)
        self.logged = {"entropy": torch.distributions.Categorical(logits=logits).entropy().mean().detach()}
        return found


class LogsKept(Trainer):
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, **{k: float(v) for k, v in self.model.logged.items()}}, start_time)  # pyright: ignore


class DropPath(nn.Module):
    """Leaves residual branches out, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any) -> Any:
        for number, block in enumerate(self.blocks):
            branch = block(x).tanh()
            if self.training:
                keep = 1 - 0.1 * number
                branch = branch * x.new_empty((len(x), 1)).bernoulli_(keep) / keep
            x = x + branch
        return answer(self.head(x), labels)


class Odd(nn.Module):
    """Parameters in lists and dictionaries, of no dimension, unused and frozen; buffers of many kinds."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.tensor(0.5))})
        self.last = nn.Parameter(torch.randn(4, 2))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("count", torch.tensor(0), persistent=False)

    def forward(self, x: Any, labels: Any) -> Any:
        for weight in self.list:
            x = torch.where(self.mask, x @ weight, x) + self.dict["a"]
        self.count += 1
        return answer((x * self.dict["b"] + self.frozen) @ self.last, labels)


class Spectral(nn.Module):
    """A Fourier layer with a complex filter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 2))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers:
            mixed = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter.contiguous()), n=4)
            x = x + layer(mixed).relu()
        return answer(self.head(x), labels)


class TiedByHand(nn.Module):
    """Two layers share a weight, which no configuration knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.body(self.embedding(input_ids)).relu())
        return answer(logits.flatten(0, 1), labels.flatten())


class Anneals(Plain):
    """A weight that grows with the number of forwards."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, labels: Any) -> Any:
        if self.training:
            self.calls += 1
        found = answer(self.layers(x), labels)
        found["loss"] = found["loss"] + torch.clamp(self.calls / 10, max=1.0) * found["logits"].square().mean()
        return found


class Hooks(TrainerCallback):
    """Watches activations from the first step to the last, and takes the hooks away."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        for layer in model.model.layers:
            hook = lambda module, args, result: self.found.append(float(result.detach().double().sum()))  # noqa: E731
            self.handles.append(layer.mlp.register_forward_hook(hook))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            for handle in self.handles:
                handle.remove()


def yolos() -> Any:
    config: Any = YolosConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=[16, 16],
        patch_size=8, num_detection_tokens=4, use_mid_position_embeddings=False, hidden_dropout_prob=0.1,
    )  # fmt: skip
    config.num_labels = 3
    return YolosForObjectDetection(config)


def boxes() -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=made),
            "labels": {
                "class_labels": torch.arange(1 + i % 2) % 3,
                "boxes": torch.rand(1 + i % 2, 4, generator=made) * 0.4 + 0.3,
            },
        }
        for i in range(12)
    ]


def pictured(batch: list[Any]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in batch]),
        "labels": [row["labels"] for row in batch],
    }


def xlnet() -> Any:
    return XLNetLMHeadModel(XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.1))


def permuted(model: Any) -> Any:
    words = tokenizer()
    words.mask_token = "<unk>"
    return {"data_collator": DataCollatorForPermutationLanguageModeling(words)}


def even_texts() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"].tolist()} for row in ROWS]


def flat(**options: Any) -> Any:
    return lambda model: {"data_collator": DataCollatorWithFlattening(**options)}


def in_double() -> Any:
    return llama().double()


SCENARIOS: dict[str, Scenario] = {
    "outputs of its own": Scenario({**ACCUMULATED, **EVAL}, seeded(OwnOutputs), POINTS),
    "nested inputs": Scenario(
        {**ACCUMULATED, **EVAL, "remove_unused_columns": False}, seeded(NestedInputs), POINTS,
        more=lambda model: {"data_collator": nested},
    ),
    "keeps what it computes": Scenario(EVAL, seeded(Keeps), POINTS, kind=LogsKept),
    "branches left out": Scenario(ACCUMULATED, seeded(DropPath), POINTS),
    "odd state": Scenario({**ACCUMULATED, **SAVED}, seeded(Odd), POINTS),
    "odd state, each": Scenario({}, seeded(Odd), POINTS),
    "a Fourier layer": Scenario({"optim": "sgd"}, seeded(Spectral), POINTS, tolerance=REASSOCIATED),
    "a weight that grows": Scenario({**ACCUMULATED, **EVAL}, seeded(Anneals), POINTS),
    "hooks that come and go": Scenario(
        {"max_steps": 4}, more=lambda model: {"callbacks": [Hooks()]},
        after=lambda t: next(c.found for c in t.callback_handler.callbacks if isinstance(c, Hooks)),
    ),
    "boxes": Scenario(
        {"remove_unused_columns": False, "eval_do_concat_batches": False, **EVAL}, seeded(yolos), boxes(),
        more=lambda model: {"data_collator": pictured},
    ),
    "words in another order": Scenario({"max_steps": 2}, seeded(xlnet), even_texts(), more=permuted),
    "flattened": Scenario(ACCUMULATED, rows=ragged_texts(), more=flat()),
    "flattened, with lengths": Scenario(
        ACCUMULATED, rows=ragged_texts(), more=flat(return_flash_attn_kwargs=True, return_seq_idx=True)
    ),
    "a decoder that generates": Scenario(
        {**ACCUMULATED, **EVAL, "eval_steps": 3, "predict_with_generate": True, "generation_max_length": 12},
        kind=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, rows=FULL,
        more=lambda model: {"compute_metrics": lambda found: {"sum": float(found.predictions.sum())}},
    ),
    "in double precision": Scenario({**ACCUMULATED, **EVAL}, model=in_double),
    "batches dispatched": Scenario({"accelerator_config": {"dispatch_batches": False, "even_batches": False}}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_odd_model_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(SCENARIOS[name], tmp_path)


@pytest.mark.parametrize("options", [{}, {"ignore_data_skip": True}], ids=str)
def test_a_training_goes_on_in_the_middle_of_an_epoch(options: Any, tmp_path: Path) -> None:
    saved = {
        "max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2,
        "lr_scheduler_type": "cosine",
        "restore_callback_states_from_checkpoint": True, **ACCUMULATED, **options,
    }  # fmt: skip
    scenario = Scenario(saved, model=lambda: llama(attention_dropout=0.2), rows=RAGGED)
    found: list[Any] = []
    for streams in (False, True):
        folder = tmp_path / str(streams)
        run(scenario, folder, streams=streams)
        ran = run(scenario, folder, streams=streams, resume_from_checkpoint=str(folder / "checkpoint-2"))
        found.append((str([row.get("loss") for row in ran.log]), ran.values, ran.generators))
    assert_same(found[1], found[0])


@pytest.fixture
def no_overrides() -> Iterator[None]:
    """bitsandbytes keeps options of single parameters for the whole process."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    manager.initialize()
    yield
    manager.initialize()


OPTIMIZERS: dict[str, Scenario] = {
    "adamw_bnb_8bit, all weights": Scenario(
        {**ACCUMULATED, "optim": "adamw_bnb_8bit", "save_strategy": "steps", "save_steps": 2}, rows=RAGGED
    ),
    "adamw_bnb_8bit": Scenario({**ACCUMULATED, "optim": "adamw_bnb_8bit", **SAVED}, lora(), RAGGED),
    "lion_8bit": Scenario({"optim": "lion_8bit", "weight_decay": 0.1}, lora()),
    "paged_adamw_32bit": Scenario({**ACCUMULATED, "optim": "paged_adamw_32bit"}),
    "rmsprop_bnb": Scenario({"optim": "rmsprop_bnb"}),
}  # fmt: skip


@pytest.mark.usefixtures("no_overrides")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_bitsandbytes_has_the_stock_runs_bits(name: str, tmp_path: Path) -> None:
    assert_streams_as_stock(OPTIMIZERS[name], tmp_path)


class Transposed(Plain):
    """A parameter that isn't contiguous, which safetensors refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.randn(2, 2).t())

    def forward(self, x: Any, labels: Any) -> Any:
        return answer(self.layers(x) @ self.last, labels)


@pytest.mark.parametrize("kind", [Transposed, TiedByHand])
def test_what_the_stock_trainer_refuses_to_save_trains_and_is_refused(kind: Any, tmp_path: Path) -> None:
    found: list[Any] = []
    for streams in (False, True):
        torch.manual_seed(0)
        model = kind()
        arguments = TrainingArguments(str(tmp_path), **{**GIVEN, "optim": "sgd"})
        options: dict[str, Any] = {"megatrain_transfer": "copy"} if streams else {}
        rows = ROWS if kind is TiedByHand else POINTS
        trainer = (streamed_kind(Trainer) if streams else Trainer)(
            model=model, args=arguments, train_dataset=rows, **options
        )
        trainer.train()
        with pytest.raises((ValueError, RuntimeError)) as refused:
            trainer.save_model(str(tmp_path / "saved"))
        losses = [row.get("loss") for row in trainer.state.log_history]
        found.append((losses, {k: v.detach().clone() for k, v in model.state_dict().items()}, str(refused.value)))
    assert_same(found[1], found[0])
