"""Scripts of sentence-transformers, its cross-encoders and sparse encoders, in a trainer that streams."""

from __future__ import annotations

import importlib
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import BertConfig, BertModel

import megatrain
from tests.comparing import assert_same
from tests.integrations.runs import streamed_kind
from tests.integrations.words import text, tokenizer

sentences: Any = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: pip install -e .[users]"
)
datasets: Any = pytest.importorskip("datasets")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
ONE = [text(i, 4) for i in range(12)]
PAIRS: dict[str, Any] = {"one": ONE, "other": [text(i + 1, 5) for i in range(12)]}
TRIPLES = {**PAIRS, "third": [text(i + 4, 3) for i in range(12)]}
SCORED = {**PAIRS, "score": [i / 12 for i in range(12)]}
LABELLED = {"one": ONE, "label": [i % 3 for i in range(12)]}
RANKING = "MultipleNegativesRankingLoss"
AGAIN, REPLACES = "the loss calls the model more than once", "the loss replaces the model's forward"


def of(name: str) -> Any:
    """A loss by the place where this version has it."""
    for place in ("sentence_transformers.sentence_transformer.losses", "sentence_transformers.losses"):
        if importlib.util.find_spec(place.rpartition(".")[0]) and hasattr(
            found := importlib.import_module(place), name
        ):
            return getattr(found, name)
    raise AttributeError(name)


def saved(kind: Any, folder: Path, **config: Any) -> str:
    torch.manual_seed(0)
    kind(BertConfig(**{**CONFIG, **config})).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def encoder(folder: Path) -> Any:
    return sentences.SentenceTransformer(saved(BertModel, folder), device="cpu")


def simple(name: str, **options: Any) -> Any:
    return lambda model: of(name)(model, **options)


def nested(outer: str, inner: str, **options: Any) -> Any:
    if outer.startswith("Matryoshka"):
        options["matryoshka_dims"] = [16, 8, 4]
    return lambda model: of(outer)(model, of(inner)(model), **options)


def train(folder: Path, name: str, model: Any, loss: Any, rows: Any, *, streams: bool, **options: Any) -> Any:
    """What a script leaves, and why its updates aren't training steps."""
    packages = {"SentenceTransformer": "", "CrossEncoder": ".cross_encoder", "SparseEncoder": ".sparse_encoder"}
    place: Any = importlib.import_module(f"sentence_transformers{packages[name]}")
    kind, arguments = (getattr(place, f"{name}{end}") for end in ("Trainer", "TrainingArguments"))
    recording = megatrain.Recording()
    more: dict[str, Any] = {"evaluator": options.pop("evaluator", None)}
    if streams:
        more |= {"megatrain_transfer": "copy", "megatrain_recording": recording}
    made = arguments(
        str(folder), **{"max_steps": 3, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-3, **options},
    )  # fmt: skip
    table: Any = datasets.Dataset.from_dict
    several = {key: table(each) for key, each in rows.items()} if "pairs" in rows else table(rows)
    trainer = (streamed_kind(kind) if streams else kind)(
        model=model, args=made, train_dataset=several, loss=loss(model), **more
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    assert not streams or sum(entry.stream == "compute" for entry in recording.issued) > 0
    times = ("runtime", "per_second", "flos")
    log = [{k: v for k, v in row.items() if not any(t in k for t in times)} for row in trainer.state.log_history]
    known = set(trainer.model.parameters())
    own = [p.detach().clone() for group in trainer.optimizer.param_groups for p in group["params"] if p not in known]
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    return [log, state, own], trainer._one_step.reason if streams else None


LOSSES: dict[str, tuple[Any, dict[str, Any], int, str | None]] = {
    "triplets": (simple("TripletLoss"), TRIPLES, 1, AGAIN),
    "cached": (simple("CachedMultipleNegativesRankingLoss", mini_batch_size=2), PAIRS, 1, AGAIN),
    "widths, one call": (nested("MatryoshkaLoss", "BatchAllTripletLoss"), LABELLED, 1, None),
    "widths, accumulation": (nested("MatryoshkaLoss", "BatchAllTripletLoss"), LABELLED, 2, REPLACES),
    "two data sets": (
        lambda model: {"pairs": of(RANKING)(model), "scored": of("CosineSimilarityLoss")(model)},
        {"pairs": PAIRS, "scored": SCORED}, 1, AGAIN,
    ),
    "prompts, evaluated": (simple(RANKING), PAIRS, 1, AGAIN),
}  # fmt: skip
"""Loss, rows, micro-batches, and why an update isn't one training step. Where a loss calls the model several times in
each of several micro-batches, gradients are added in another order, so these have one micro-batch."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    loss, rows, count, expected = LOSSES[name]

    found: list[Any] = []
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = encoder(tmp_path / "bert")
        options: dict[str, Any] = {"gradient_accumulation_steps": count}

        if name == "two data sets":
            options["multi_dataset_batch_sampler"] = "round_robin"
        if name == "prompts, evaluated":
            kind = importlib.import_module("sentence_transformers.evaluation").EmbeddingSimilarityEvaluator
            options |= {"evaluator": kind(PAIRS["one"], PAIRS["other"], SCORED["score"]), "eval_strategy": "steps"}
            options |= {"eval_steps": 1, "prompts": {"one": "w1 w2 ", "other": "w3 "}}
        random.seed(0)
        ran, reason = train(
            tmp_path / str(streams), "SentenceTransformer", model, loss, rows, streams=streams, **options
        )
        found.append([str(ran[0]), *ran[1:], model.encode([text(i, 5) for i in range(3)], convert_to_tensor=True)])
        assert (reason or "").startswith(expected or "") if streams else reason is None
        assert bool(reason) == bool(streams and expected)
    assert_same(found[1], found[0])
