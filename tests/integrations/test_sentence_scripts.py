"""Losses of sentence-transformers, its cross-encoders and sparse encoders, in a trainer that streams."""

from __future__ import annotations

import importlib
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

import megatrain
from megatrain.integrations.hf import Streamed
from tests.comparing import assert_same
from tests.integrations.test_trainer import REASSOCIATED
from tests.integrations.words import text, tokenizer

sentences: Any = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: pip install -e .[users]"
)
datasets: Any = pytest.importorskip("datasets")
pytestmark = [pytest.mark.users, pytest.mark.filterwarnings("ignore")]
IS_NEW = importlib.util.find_spec("sentence_transformers.sentence_transformer") is not None  # from version 6 on

CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
PAIRS = {"one": [text(i, 4) for i in range(12)], "other": [text(i + 1, 5) for i in range(12)]}
TRIPLES = {**PAIRS, "third": [text(i + 4, 3) for i in range(12)]}
SCORED = {**PAIRS, "score": [i / 12 for i in range(12)]}
CLASSED = {**PAIRS, "label": [i % 3 for i in range(12)]}
LABELLED = {"one": PAIRS["one"], "label": [i % 3 for i in range(12)]}
TAUGHT = {"one": PAIRS["one"], "label": [[float(i + j) for j in range(16)] for i in range(12)]}


def of(package: str, name: str) -> Any:
    """A class by the place where this version has it."""
    for place in (f"sentence_transformers.{package}.losses", "sentence_transformers.losses"):
        if importlib.util.find_spec(place.rpartition(".")[0]) and hasattr(
            found := importlib.import_module(place), name
        ):
            return getattr(found, name)
    raise AttributeError(name)


def around(inner: str, **options: Any) -> Any:
    return lambda loss, model: loss(model, of("sentence_transformer", inner)(model), **options)


def given(**options: Any) -> Any:
    return lambda loss, model: loss(model, **options)


LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "TripletLoss": (TRIPLES, given()),
    "CoSENTLoss": (SCORED, given()),
    "AnglELoss": (SCORED, given()),
    "ContrastiveLoss": ({**PAIRS, "label": [i % 2 for i in range(12)]}, given()),
    "OnlineContrastiveLoss": ({**PAIRS, "label": [i % 2 for i in range(12)]}, given()),
    "SoftmaxLoss": (CLASSED, given(sentence_embedding_dimension=16, num_labels=3)),
    "BatchHardTripletLoss": (LABELLED, given()),
    "BatchAllTripletLoss": (LABELLED, given()),
    "MSELoss": (TAUGHT, given()),
    "AdaptiveLayerLoss": (PAIRS, around("MultipleNegativesRankingLoss")),
    "CachedMultipleNegativesRankingLoss": (PAIRS, given(mini_batch_size=2)),
    "MultipleNegativesSymmetricRankingLoss": (PAIRS, given()),
    "GISTEmbedLoss": (PAIRS, lambda loss, model: loss(model, guide=encoder())),
    "MegaBatchMarginLoss": (PAIRS, given(mini_batch_size=2, use_mini_batched_version=False)),
}


def encoder(folder: Path | None = None) -> Any:
    import tempfile

    place = folder or Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    BertModel(BertConfig(**CONFIG)).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return sentences.SentenceTransformer(str(place), device="cpu")


def train(
    folder: Path, kind: Any, arguments: Any, model: Any, loss: Any, rows: Any, *, streams: bool, **options: Any
) -> Any:
    recording = megatrain.Recording()
    more: dict[str, Any] = {"megatrain_transfer": "copy", "megatrain_recording": recording} if streams else {}
    made = arguments(
        str(folder), **{"max_steps": 3, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-3, **options},
    )  # fmt: skip
    trainer_kind = type("Streaming", (Streamed, kind), {}) if streams else kind
    trainer = trainer_kind(
        model=model, args=made, train_dataset=datasets.Dataset.from_dict(rows), loss=loss(model), **more
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    log = [[row[key] for key in ("loss", "grad_norm") if key in row] for row in trainer.state.log_history]
    assert not streams or sum(entry.stream == "compute" for entry in recording.issued) > 0
    reason = trainer._one_step.reason if streams else None
    own = [p.detach().clone() for p in loss_parameters(trainer)]
    return [log, {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}, own], reason


def loss_parameters(trainer: Any) -> list[torch.Tensor]:
    model = set(trainer.model.parameters())
    return [p for group in trainer.optimizer.param_groups for p in group["params"] if p not in model]


ONE_CALL = ("MSELoss", "BatchHardTripletLoss", "BatchAllTripletLoss")


# Several calls in each of several micro-batches: gradients are added in another order, so these have one micro-batch.
@pytest.mark.parametrize(("name", "count"), [*((name, 1) for name in LOSSES), *((name, 2) for name in ONE_CALL)])
def test_a_loss_of_sentence_transformers(name: str, count: int, tmp_path: Path) -> None:
    rows, make = LOSSES[name]
    kinds = sentences.SentenceTransformerTrainer, sentences.SentenceTransformerTrainingArguments
    loss = lambda model: make(of("sentence_transformer", name), model)  # noqa: E731
    found: list[Any] = []
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = encoder(tmp_path / "bert")
        folder = tmp_path / str(streams)
        ran, reason = train(folder, *kinds, model, loss, rows, streams=streams, gradient_accumulation_steps=count)
        found.append(ran)
        assert reason == ("the loss calls the model more than once" if streams and name not in ONE_CALL else None)
    assert_same(found[1], found[0])


NESTED: dict[str, tuple[str, str, dict[str, Any], int, dict[str, Any], str | None]] = {
    "one call": ("MatryoshkaLoss", "BatchAllTripletLoss", LABELLED, 1, {}, None),
    "one call, accumulation": (
        "MatryoshkaLoss", "BatchAllTripletLoss", LABELLED, 2, {}, "the loss replaces the model's forward",
    ),
    "several calls": (
        "MatryoshkaLoss", "MultipleNegativesRankingLoss", PAIRS, 1, {}, "the loss calls the model more than once",
    ),
    "some widths": (
        "MatryoshkaLoss", "CoSENTLoss", SCORED, 1, {"n_dims_per_step": 2}, "the loss calls the model more than once",
    ),
    "cached": (
        "MatryoshkaLoss", "CachedMultipleNegativesRankingLoss", PAIRS, 1, {},
        "the loss calls the model more than once",
    ),
    "of some layers": (
        "Matryoshka2dLoss", "MultipleNegativesRankingLoss", PAIRS, 1, {}, "the loss calls the model more than once",
    ),
}  # fmt: skip
"""Outer and inner loss, rows, micro-batches, options, and why an update isn't one training step."""


@pytest.mark.parametrize("name", NESTED)
def test_a_loss_that_replaces_the_forward(name: str, tmp_path: Path) -> None:
    outer, inner, rows, count, options, expected = NESTED[name]
    losses: list[Any] = [of("sentence_transformer", each) for each in (outer, inner)]
    loss = lambda model: losses[0](model, losses[1](model), matryoshka_dims=[16, 8, 4], **options)  # noqa: E731
    kinds = sentences.SentenceTransformerTrainer, sentences.SentenceTransformerTrainingArguments
    found: list[Any] = []
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = encoder(tmp_path / "bert")
        random.seed(0)
        folder = tmp_path / str(streams)
        ran, reason = train(folder, *kinds, model, loss, rows, streams=streams, gradient_accumulation_steps=count)
        found.append(ran)
        assert (reason or "").startswith(expected or "") if streams else reason is None
        assert bool(reason) == bool(streams and expected)
    assert_same(found[1], found[0])


LISTED = {
    "query": PAIRS["one"], "docs": [[text(i + j, 4) for j in range(3)] for i in range(12)],
    "labels": [[i % 2, 1 - i % 2, 0] for i in range(12)],
}  # fmt: skip
CROSSED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "BinaryCrossEntropyLoss": (SCORED, 1, None),
    "CrossEntropyLoss": (CLASSED, 3, None),
    "MSELoss": (SCORED, 1, None),
    "MarginMSELoss": (TRIPLES | {"score": [i / 6 for i in range(12)]}, 1, "the loss calls the model more than once"),
    "MultipleNegativesRankingLoss": (PAIRS, 1, "the loss calls the model more than once"),
    "LambdaLoss": (LISTED, 1, "the loss calls the model more than once"),
}
"""Rows, labels of the model, and why an update isn't one training step."""


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for name, (_, _, reason) in CROSSED.items() for count in (1, 2) if count == 1 or reason is None],
)
def test_a_cross_encoder(name: str, count: int, tmp_path: Path) -> None:
    module: Any = importlib.import_module("sentence_transformers.cross_encoder")
    losses: Any = importlib.import_module("sentence_transformers.cross_encoder.losses")
    kinds = module.CrossEncoderTrainer, module.CrossEncoderTrainingArguments
    rows, labels, expected = CROSSED[name]
    found: list[Any] = []
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        BertForSequenceClassification(BertConfig(**{**CONFIG, "num_labels": labels})).save_pretrained(tmp_path / "bert")
        tokenizer().save_pretrained(tmp_path / "bert")
        model = sentences.CrossEncoder(str(tmp_path / "bert"), device="cpu")
        torch.manual_seed(1)
        folder = tmp_path / str(streams)
        ran, reason = train(
            folder, *kinds, model, getattr(losses, name), rows, streams=streams, gradient_accumulation_steps=count
        )
        again = sentences.CrossEncoder(str(folder / "saved"), device="cpu")
        asked = [(text(1, 4), text(2, 5)), (text(3, 3), text(4, 4))]
        found.append([*ran, [torch.as_tensor(each.predict(asked)) for each in (model, again)]])
        assert reason == (expected if streams else None)
    assert_same(found[1], found[0])


def test_a_sparse_encoder(tmp_path: Path) -> None:
    module: Any = importlib.import_module("sentence_transformers.sparse_encoder")
    losses: Any = importlib.import_module("sentence_transformers.sparse_encoder.losses")
    kinds = module.SparseEncoderTrainer, module.SparseEncoderTrainingArguments
    weights = {"document_regularizer_weight": 0.1, "query_regularizer_weight": 0.1}
    loss = lambda model: losses.SpladeLoss(model, losses.SparseMultipleNegativesRankingLoss(model), **weights)  # noqa: E731
    found: list[Any] = []
    for streams in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        BertForMaskedLM(BertConfig(**CONFIG)).save_pretrained(tmp_path / "bert")
        tokenizer().save_pretrained(tmp_path / "bert")
        model = sentences.SparseEncoder(str(tmp_path / "bert"), device="cpu")
        ran, reason = train(tmp_path / str(streams), *kinds, model, loss, PAIRS, streams=streams, optim="sgd")
        found.append(ran)
        assert reason == ("the loss calls the model more than once" if streams else None)
    # The embedding is tied to the head and the model is called twice: its gradients are added in another order.
    assert found[1][0][0][0] == found[0][0][0][0]  # the first loss has the same bits
    assert found[1][0] == [pytest.approx(row, rel=REASSOCIATED) for row in found[0][0]]
    assert_same(found[1][1:], found[0][1:], tolerance=REASSOCIATED)
