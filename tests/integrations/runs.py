"""The same script with a library's trainer and with one that streams: what both leave."""

from __future__ import annotations

import copy
import gc
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as StockTrainer

import megatrain
from megatrain.integrations.hf import Streamed
from tests.comparing import assert_same

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(96).remainder(64).reshape(12, 8)]
RAGGED = [
    {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
    for index, ids in enumerate(torch.arange(96).remainder(63).reshape(12, 8) + 1)
    for mask in [(torch.arange(8) < 3 + index % 6).long()]
]
FULL = [{**row, "attention_mask": torch.ones_like(row["input_ids"]), "labels": row["input_ids"]} for row in RAGGED]
LABELLED = [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 2)} for i, row in enumerate(ROWS)]
POINTS = [{"x": torch.arange(4.0) + i, "labels": torch.tensor(i % 2)} for i in range(12)]
TWO: dict[str, Any] = {"gradient_accumulation_steps": 2}
EVAL: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
REASSOCIATED = 3e-6
"""What is used twice in a model has its gradients added in another order: the uses first, then the micro-batches. Under
SGD, three steps leave a few units in the last place; AdamW divides a gradient by its size, were it rounding alone."""
SUMMED: dict[str, Any] = {**TWO, "optim": "sgd"}


def llama(kind: Any = LlamaForCausalLM, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False,
    }  # fmt: skip
    return kind(LlamaConfig(**{**sizes, **config}))


def fast_or_nightly(names: Iterable[str], fast: tuple[str, ...]) -> list[Any]:
    """Marks all names but some as nightly."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def codes(page: str, *parts: str) -> list[str]:
    """The blocks of Python of a page that have all of these parts."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if all(part in block for part in parts)]


@dataclass(frozen=True)
class Scenario:
    """A script.

    Args:
        options: Training arguments.
        model: Makes the model.
        rows: Of the dataset.
        more: Keywords of the trainer, made for each run: `more(model)`.
        kind: The trainer's class.
        arguments: The class of its arguments.
        reason: Begins what the warning says if updates aren't training steps.
        streaming: `megatrain_...` options.
        is_mixed: Some updates have micro-batches that run other layers, so they aren't training steps.
        tolerance: How far numbers may be from the stock run's, relative to the largest of their tensor; 0 for none.
        after: What is compared besides, from the trainer that has trained.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: Callable[[], nn.Module] = llama
    rows: Any = field(default_factory=lambda: ROWS)
    more: Callable[[Any], Mapping[str, Any]] = lambda model: {}
    kind: Any = StockTrainer
    arguments: Any = TrainingArguments
    reason: str | None = None
    streaming: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_mixed: bool = False
    tolerance: float = 0.0
    after: Callable[[Any], Any] = lambda trainer: None


class Loss(StockTrainer):
    """A loss as a user writes one: `loss_of(model, inputs)` returns the loss and the model's outputs."""

    loss_of: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = self.loss_of(model, inputs)
        return found if return_outputs else found[0]


def with_loss(loss_of: Callable[[Any, Any, Any], Any]) -> type:
    """The class of a trainer whose loss a function makes of the trainer, the model and the inputs."""
    return type(loss_of.__name__, (Loss,), {"loss_of": loss_of})


def on(event: str, act: Callable[..., Any]) -> Callable[[Any], Mapping[str, Any]]:
    """For `more`: a callback that does something at an event, and keeps what that returns; see `kept`."""

    def happens(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.kept.append(act(args=args, state=state, control=control, **rest))

    def made(model: Any) -> Mapping[str, Any]:
        callback: Any = type(act.__name__, (TrainerCallback,), {f"on_{event}": happens})()
        callback.kept = []
        return {"callbacks": [callback]}

    return made


def kept(trainer: Any) -> list[Any]:
    """For `after`: what the callback of `on` has kept."""
    return next(callback.kept for callback in trainer.callback_handler.callbacks if hasattr(callback, "kept"))


GIVEN: dict[str, Any] = {
    "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip
_TIMES = ("runtime", "per_sec", "flos", "time")


@dataclass(frozen=True)
class Ran:
    """What a script left."""

    trainer: Any
    log: list[dict[str, Any]]
    values: dict[str, torch.Tensor]
    generators: Any
    after: Any


def streamed_kind(stock: Any) -> Any:
    """The trainer that streams."""
    return type("Streaming", (Streamed, stock), {})


def run(scenario: Scenario, folder: Path, *, streams: bool, **training: Any) -> Ran:
    """Runs a script from its first line."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps the first precision of a process
    kind = streamed_kind(scenario.kind) if streams else scenario.kind
    random.seed(0)
    np.random.seed(0)
    model = scenario.model()
    arguments = scenario.arguments(str(folder), **copy.deepcopy({**GIVEN, **scenario.options}))
    options = {f"megatrain_{name}": value for name, value in scenario.streaming.items()} if streams else {}
    few = scenario.rows[:3] if isinstance(scenario.rows, list) else scenario.rows.select(range(3))
    rows = {"train_dataset": scenario.rows, "eval_dataset": few}
    trainer = kind(**{"model": model, "args": arguments, **rows, **scenario.more(model), **options})
    trainer.train(**training)
    trainer.save_model(str(folder / "saved"))
    log = [
        {key: value for key, value in row.items() if not any(word in key for word in _TIMES)}
        for row in trainer.state.log_history
    ]
    after = scenario.after(trainer)
    tensors = trainer.model.state_dict().items()
    # torchao's tensors have no bits to compare, but those that they stand for.
    state = {key: t.dequantize() if hasattr(t, "qdata") else t.detach().cpu().clone() for key, t in tensors}
    drawn = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return Ran(trainer, log, state, (drawn, random.random(), float(np.random.rand())), after)


def assert_streams_as_stock(scenario: Scenario, folder: Path) -> Ran:
    """Runs a script both ways; everything has the same bits, and the model streamed."""
    stock = run(scenario, folder / "stock", streams=False)
    recording = megatrain.Recording()
    streaming = {"transfer": "copy", "recording": recording, **scenario.streaming}
    found = run(Scenario(**{**vars(scenario), "streaming": streaming}), folder / "streams", streams=True)
    if scenario.tolerance:
        assert found.log == [pytest.approx(row, rel=scenario.tolerance, nan_ok=True) for row in stock.log]
    else:
        assert str(found.log) == str(stock.log)  # as texts, NaN equals itself
    assert_same(found.values, stock.values, tolerance=scenario.tolerance)
    assert_same(found.generators[0], stock.generators[0])
    assert found.generators[1:] == stock.generators[1:]
    assert_same(found.after, stock.after, tolerance=scenario.tolerance)
    assert_same_files(folder / "streams", folder / "stock", tolerance=scenario.tolerance)
    one_step = found.trainer._one_step
    if scenario.reason is None:
        assert one_step.reason is None
        taken = one_step.step.progress.count
        steps = stock.trainer.state.global_step
        assert taken == steps or (scenario.is_mixed and 0 < taken < steps)
    else:
        assert one_step.reason is not None
        assert one_step.reason.startswith(scenario.reason), one_step.reason
    blocks = len(found.trainer.model.program.blocks)
    issued = sum(entry.stream == "compute" for entry in recording.issued)
    assert issued >= stock.trainer.state.global_step * blocks  # and backwards, but of frozen blocks
    gc.collect()
    return found


_OWN = ("optimizer.pt", "scheduler.pt", "megatrain")
"""What differs in a checkpoint: docs/trainers.md."""
_OF_FOLDERS = ("training_args.bin",)
"""What names its own folder, and the trainer's class."""


def assert_same_files(found: Path, expected: Path, *, tolerance: float) -> None:
    """Both runs have written the same files: tensors with the same bits, and the same texts."""

    def files(folder: Path) -> dict[str, Path]:
        paths = (path for path in folder.rglob("*") if path.is_file() and "runs" not in path.parts)
        named = {path.relative_to(folder).as_posix(): path for path in paths}
        return {name: path for name, path in named.items() if not any(own in name.split("/") for own in _OWN)}

    ours, theirs = files(found), files(expected)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("saved/") and name.endswith(".safetensors") for name in ours)
    for name, path in theirs.items():
        if path.suffix == ".safetensors":
            tensors = [safetensors.torch.load_file(each) for each in (ours[name], path)]
            assert_same(tensors[0], tensors[1], tolerance=tolerance)
        elif path.name == "trainer_state.json":
            continue  # its log is compared as it is, and the rest are names of folders and the class's own counts
        elif path.suffix == ".json":
            assert json.loads(ours[name].read_text()) == json.loads(path.read_text()), name
        elif path.suffix == ".pth":
            states = [torch.load(each, weights_only=False) for each in (ours[name], path)]
            assert str(states[0]) == str(states[1]), name  # tensors and arrays of generators, shortened
            assert torch.equal(states[0]["cpu"], states[1]["cpu"])
        elif path.name == "README.md":  # a model's card, which names its folder
            texts = [
                each.read_text().replace(folder.name, "") for each, folder in ((ours[name], found), (path, expected))
            ]
            assert texts[0] == texts[1], name
        elif path.name not in _OF_FOLDERS:
            assert ours[name].read_bytes() == path.read_bytes(), name
