"""Trainers with `megatrain_lengths=`: the losses of the stock run, of batches that always have another length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from megatrain.errors import ScheduleError
from megatrain.integrations.hf.streamed import longest_row
from tests.integrations.runs import EVAL, SAVED, Scenario, assert_streams_as_stock, llama, run

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = 8
LONGEST = 23
SIZES = (5, 23, 9, 3, 12, 7, 17, 4, 21, 2, 8, 16)
ROUNDED = 2e-5
"""Kernels round otherwise for another number of rows (tests/training/test_lengths.py), and three steps of SGD with a
rate of 0.01 follow each other; the norm that is logged is rounded to fp32 as well."""
ROWS = [
    {"input_ids": ids, "labels": ids}
    for seed, size in enumerate(SIZES)
    for ids in [torch.randint(1, 63, (size,), generator=torch.Generator().manual_seed(seed)).tolist()]
]


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest row, as `DataCollatorWithPadding` does, and the labels as well."""
    length = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[at, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def without_mask(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in padded(rows).items() if name != "attention_mask"}


def of_a_collator(collate: Any, **options: Any) -> Scenario:
    return Scenario(
        {"gradient_accumulation_steps": 2, "optim": "sgd", "label_names": ["labels"], **options},
        rows=ROWS,
        more=lambda model: {"data_collator": collate},
        streaming={"lengths": LENGTHS},
        tolerance=ROUNDED,
    )


def num_of(ran: Any, *, is_training: bool) -> int:
    """How many captures a run has made for training, or for evaluation."""
    captures = list(ran.trainer.model.megatrain._variants)
    return sum(variant.lowered._is_training == is_training for variant in captures)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("collate", "longest"),
    [(padded, LONGEST), (without_mask, LONGEST), (DataCollatorWithFlattening(), 2 * LONGEST)],
)
def test_a_trainer_has_the_stock_runs_losses_in_few_captures(collate: Any, longest: int, tmp_path: Path) -> None:
    """Gradients of two micro-batches, `num_items_in_batch`, evaluation and checkpoints included."""
    ran = assert_streams_as_stock(of_a_collator(collate, **EVAL, **SAVED), tmp_path)
    assert 1 < num_of(ran, is_training=True) <= -(-longest // LENGTHS)


@pytest.mark.nightly
def test_a_resumed_training_has_the_losses_of_one_that_never_stopped(tmp_path: Path) -> None:
    scenario = of_a_collator(padded, **SAVED)
    whole = run(scenario, tmp_path / "whole", streams=True)
    again = run(
        scenario, tmp_path / "again", streams=True, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1")
    )
    assert [row for row in whole.log if row.get("step", 0) > 1 and "loss" in row] == [
        row for row in again.log if row.get("step", 0) > 1 and "loss" in row
    ]
    assert all(torch.equal(whole.values[name], value) for name, value in again.values.items())


@pytest.mark.nightly
def test_the_longest_rows_are_planned_first(tmp_path: Path) -> None:
    """So that memory which is too small for them is refused before the first step."""

    def wide() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                use_cache=False, pad_token_id=0,
            )
        )  # fmt: skip

    rows = [*ROWS[:8], {"input_ids": [1] * 4000, "labels": [1] * 4000}]
    scenario = of_a_collator(padded)
    given = {"lengths": 16, "memory": "2MiB", "chunking": "never"}
    small = Scenario(**{**vars(scenario), "model": wide, "rows": rows, "streaming": given})
    with pytest.raises(ScheduleError) as caught:
        run(small, tmp_path, streams=True)
    assert "this is the step of the longest batches, whose rows have 4000 tokens" in "".join(caught.value.__notes__)


def test_rows_of_a_data_set_tell_their_longest() -> None:
    datasets: Any = pytest.importorskip("datasets")
    assert longest_row(ROWS) == longest_row(datasets.Dataset.from_list(ROWS)) == LONGEST
    assert longest_row(datasets.Dataset.from_list(ROWS).select([0, 2])) == 9
    assert longest_row(datasets.Dataset.from_list([{"text": "a"}])) is None
    assert longest_row(datasets.Dataset.from_list(ROWS).to_iterable_dataset()) is None
    assert longest_row(iter(ROWS)) is None


def whisper() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    layers: dict[str, Any] = {
        f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    ids: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "dropout": 0.0,
    }
    sounds: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **layers, **ids, **sounds))


def spoken(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Sounds of one length, as Whisper's feature extractor makes them, and their texts padded to the longest."""
    seeds = [sum(row["labels"]) for row in rows]
    sounds = [torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return {
        "input_features": torch.stack(sounds),
        "labels": padded([{"input_ids": row["labels"]} for row in rows])["labels"],
    }


PICTURES = ((4, 4), (2, 8), (4, 8))


def qwen_vl() -> Any:
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }  # fmt: skip
    pictures: dict[str, Any] = {
        "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        "temporal_patch_size": 2,
    }  # fmt: skip
    ids: dict[str, Any] = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 57}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=pictures, **ids))


def pictured(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """One text with a picture, whose size and place depend on the text."""
    (row,) = rows
    height, width = PICTURES[sum(row["input_ids"]) % 3]
    words, count = torch.tensor(row["input_ids"]).clamp(max=50), height * width // 4
    ids = torch.cat([words[:1], torch.tensor([57, *[60] * count, 58]), words[1:]])[None]
    seen = torch.randn(height * width, 96, generator=torch.Generator().manual_seed(len(words)))
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids >= 57, -100),
        "pixel_values": seen, "image_grid_thw": torch.tensor([[1, height, width]]),
        "mm_token_type_ids": (ids == 60).long(),
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "collate", "options", "most"),
    [
        (whisper, spoken, {}, -(-LONGEST // LENGTHS)),
        # A picture's size is read by the model's code, so each is captured for itself.
        (qwen_vl, pictured, {"per_device_train_batch_size": 1}, 3 * -(-(LONGEST + 10) // LENGTHS)),
    ],
)
def test_speech_and_pictures(model: Any, collate: Any, options: Any, most: int, tmp_path: Path) -> None:
    scenario = Scenario(**{**vars(of_a_collator(collate, **options)), "model": model})
    ran = assert_streams_as_stock(scenario, tmp_path)
    assert 1 < num_of(ran, is_training=True) <= most


def trl_script(name: str, rows: Any, model: Any = llama, **options: Any) -> Scenario:
    pytest.importorskip("trl", reason="needs trl: pip install -e .[users]")
    from tests.integrations import test_trl

    scenario = test_trl.script(name, getattr(test_trl, rows), model=model, options=options)()
    more = {"ref_model": llama} if name == "DPO" else {}
    return Scenario(
        **{
            **vars(scenario),
            "more": lambda model: {**scenario.more(model), **{key: make() for key, make in more.items()}},
            "streaming": {"lengths": LENGTHS},
            # DPO logs differences of log-probabilities that are 1e4 times as large, by their own size.
            "tolerance": 1e-3 if name == "DPO" else 1e-4,
        }
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("SFT", "texts", {}),
        ("SFT", "texts", {"padding_free": True, "max_length": None}),
        ("SFT", "texts", {"packing": True, "max_length": 16}),
        ("DPO", "preferences", {}),
    ],
)
def test_trls_trainers(name: str, rows: str, options: dict[str, Any], tmp_path: Path) -> None:
    given = {"gradient_accumulation_steps": 2, "optim": "sgd", **options}
    ran = assert_streams_as_stock(trl_script(name, rows, **given), tmp_path)
    assert num_of(ran, is_training=True) <= 4


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["grpo, lora, a penalty", "grpo, accumulation"])
def test_completions_of_grpo(name: str, tmp_path: Path) -> None:
    """Each update has completions of other lengths; the stock run draws the same ones."""
    pytest.importorskip("trl", reason="needs trl: pip install -e .[users]")
    from tests.integrations import test_trl

    scenario = vars(test_trl.SCENARIOS[name]())
    given = {"streaming": {**scenario["streaming"], "lengths": LENGTHS}, "tolerance": 1e-4}
    ran = assert_streams_as_stock(Scenario(**{**scenario, **given}), tmp_path)
    assert num_of(ran, is_training=True) <= 4
