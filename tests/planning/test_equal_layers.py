"""Plans of models with equal layers: a capture of a few layers gives the program and the plan of the whole model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from megatrain.planning.planner import Planner
from megatrain.tools.sizing.plan_command import _step_limits
from megatrain.tools.sizing.sized_models import ConfigModel
from megatrain.tools.sizing.sizing_options import SizingOptions
from tests.nightly import nightly

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "equal": {"model_type": "llama", "num_hidden_layers": 7},
    "tied": {"model_type": "qwen3", "num_hidden_layers": 6, "tie_word_embeddings": True},
    "alternating": {"model_type": "gemma2", "num_hidden_layers": 9, "sliding_window": 8},
    "experts": {"model_type": "mixtral", "num_hidden_layers": 5, "num_local_experts": 4},
}


@pytest.mark.parametrize(
    ("kind", "lora", "machine"),
    [("tied", 0, None), *(nightly((kind, 2, "rtx-4090")) for kind in MODELS)],
)
def test_a_few_layers_give_the_plan_of_all(
    kind: str, lora: int, machine: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    figures = {**SIZES, **MODELS[kind]}
    AutoConfig.for_model(**figures).save_pretrained(tmp_path)
    options = SizingOptions(str(tmp_path), hardware=machine, memory="200KiB", sequence=16, lora=lora)
    source = ConfigModel(options)
    limits = replace(_step_limits(options, machine), micro_batches=2)
    found = Planner(source).plan(limits)
    few = source.few(source.sizes)
    assert few is not None
    assert few[2].fewest < few[2].count
    monkeypatch.setattr(ConfigModel, "few", lambda *_: None)
    whole = Planner(source).plan(limits)
    assert str(found) == str(whole)
    assert str(found.schedule) == str(whole.schedule)
    assert named_by_block(found.program) == named_by_block(whole.program)


def test_a_few_layers_give_all_where_an_embedding_is_cut(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    AutoConfig.for_model(**{**SIZES, **MODELS["equal"], "vocab_size": 1024}).save_pretrained(tmp_path)
    options = SizingOptions(str(tmp_path), memory="1MiB", sequence=16, lora=2)
    source, limits = ConfigModel(options), _step_limits(options, None)
    few = Planner(source)._captured(limits, source.sizes).programs
    monkeypatch.setattr(ConfigModel, "few", lambda *_: None)
    whole = Planner(source)._captured(limits, source.sizes).programs
    found = few.at(few.width)
    assert len(found.blocks) > len(few.at(0).blocks) == len(whole.at(0).blocks)
    assert few._repeated is not None, "the whole model was captured"
    assert any(entry.base for entry in found.state.values())
    assert named_by_block(found) == named_by_block(whole.at(few.width))


def named_by_block(program: Any) -> str:
    """A program as text, its values named by the blocks that make them: copies have names of their own."""
    names = {name: f"{block.index}.{i}" for block in program.blocks for i, name in enumerate(block.outputs)}
    lines = [line for line in str(program).splitlines() if line.startswith("  block")]
    order = "\n".join(map(str, program.gradient_order)) + "\n".join(map(str, program.state.items()))
    return re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), "\n".join(lines)) + order
