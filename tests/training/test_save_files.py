"""What TrainStep.save writes is of use to others: any reader of safetensors, transformers, compile(weights=...)."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megatrain
from megatrain.saving import load
from tests.models import MODELS
from tests.saving.training import refusal, same
from tests.tiers import wide
from tests.training.resuming import BF16, CASES, CLIP, PARKED, Case, Run, labelled, tokens

TRAINED: dict[str, Case] = {
    "tied": Case(MODELS["gpt_loss"], tokens, step=(CLIP, CLIP)),
    "buffers": CASES["cnn-sgd"],
    "opaque names": CASES["lora-adamw"],
    "bf16": Case(MODELS["gpt_loss"], tokens, compile=(BF16, BF16)),
    "columns": CASES["bf16-matrices-muon"],
}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All weights, by the safetensors library alone."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", TRAINED)
def test_weights_are_the_state_dict_in_any_reader(tmp_path: Path, name: str):
    run = Run(TRAINED[name])
    run.train(1)
    state = run.compiled.state_dict()
    first = {tensor.data_ptr(): key for key, tensor in reversed(state.items())}
    stored = {key for key, tensor in state.items() if first[tensor.data_ptr()] == key}
    for shard_bytes, least in (("5GB", 1), (700, 4)):
        run.save(tmp_path / "run", shard_bytes=shard_bytes)
        found = read_all(tmp_path / "run")
        assert found.keys() == stored
        assert all(same(found[key], state[key]) for key in stored)
        index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
        files = {key: file.name for file in (tmp_path / "run").glob("*.safetensors") for key in load_file(file)}
        assert index["weight_map"] == files
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert len(set(files.values())) >= least
        load(tmp_path / "run").check()


def test_weights_of_bf16_are_bf16_and_the_rest_lies_apart(tmp_path: Path):
    run = Run(TRAINED["bf16"])
    run.train(1)
    run.save(tmp_path / "run")
    assert {t.dtype for t in read_all(tmp_path / "run").values()} == {torch.bfloat16}
    lows = load_file(tmp_path / "run/training/tensors-00001-of-00001.safetensors")
    assert lows.keys() == {f"{name}.low" for name, _ in run.model.named_parameters()}
    moments = load_file(tmp_path / "run/training/optimizer-00001-of-00001.safetensors")
    assert {t.dtype for t in moments.values()} == {torch.float32}


ONE_OF_EACH = (("llama_labels", {}, False), ("qwen2_labels", BF16, True))


@pytest.mark.parametrize(
    ("name", "options", "by_hand"),
    [
        case if case in ONE_OF_EACH else wide(case)
        for case in product(["llama_labels", "qwen2_labels"], [{}, BF16], [False, True])
    ],
    ids=str,
)
def test_from_pretrained_reads_a_checkpoint(tmp_path: Path, name: str, options: dict[str, Any], by_hand: bool):
    """The second ties its head to the embedding."""
    import transformers

    run = Run(Case(MODELS[name], labelled, compile=({**options, **PARKED}, {})))
    run.train(1)
    run.model.config.dtype = torch.float16  # of whoever made it; the weights are something else by now
    more: Any = run.model.config.save_pretrained if by_hand else None
    run.save(tmp_path / "run", more=more, shard_bytes="4KB")
    dtype = "auto" if not by_hand else torch.bfloat16 if options else torch.float32
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run", dtype=dtype, output_loading_info=True
    )
    again, info = found
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(again) is type(run.model)
    assert same(dict(again.state_dict()), dict(run.model.state_dict()))
    if not by_hand:
        assert same(dict(type(again).from_pretrained(tmp_path / "run").state_dict()), dict(run.model.state_dict()))
        assert again.config.architectures == [type(again).__name__]
    checkpoint = load(tmp_path / "run")
    checkpoint.check()
    assert checkpoint.manifest.files.keys() >= {"config.json", "generation_config.json"}


class Configured(nn.Module):
    """A model with a configuration, as libraries have them."""

    class Config:
        def __init__(self, width: Any):
            self.width = width

        def to_json_file(self, path: Path) -> None:
            path.write_text(json.dumps({"width": self.width}))

    config_class: Any = Config

    def __init__(self, width: Any = 4):
        super().__init__()
        self.config = Configured.Config(width)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_a_config_of_any_library_is_written_unless_the_caller_did(tmp_path: Path):
    batch = lambda step: torch.ones(2, 4) * step  # noqa: E731
    run = Run(Case(Configured, batch))
    run.save(tmp_path / "run")
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert written == {"width": 4, "architectures": ["Configured"], "torch_dtype": "float32"}
    run.save(tmp_path / "run", more=lambda folder: (folder / "config.json").write_text("mine"))
    assert (tmp_path / "run/config.json").read_text() == "mine"
    assert not (tmp_path / "run/generation_config.json").exists()
    load(tmp_path / "run").check()
    # What isn't the model's own is nobody's: an adapter around a model has other names of weights.
    run = Run(Case(lambda: nn.Sequential(Configured()), batch))
    run.model.config = Configured.Config(4)
    run.save(tmp_path / "other")
    assert not (tmp_path / "other/config.json").exists()


def test_a_config_that_can_not_be_written_is_refused_and_the_checkpoint_stays(tmp_path: Path):
    run = Run(Case(Configured, lambda step: torch.ones(2, 4)))
    run.save(tmp_path / "run")
    run.model.config.width = object()
    text = refusal(lambda: run.save(tmp_path / "run"))
    assert text.startswith("the model's config can't be written to `config.json`: Object of type object is not JSON")
    assert "more=lambda folder" in text
    load(tmp_path / "run").check()
    run.save(tmp_path / "run", more=lambda folder: (folder / "config.json").write_text("mine"))


def test_compile_reads_a_checkpoint_as_weights(tmp_path: Path):
    run = Run(TRAINED["tied"])
    run.train(1)
    run.save(tmp_path / "run", shard_bytes=3000)
    with torch.device("meta"):
        model = MODELS["gpt_loss"]()[0]
    batch = tokens(0)
    compiled = megatrain.compile(model, device="cpu", weights=tmp_path / "run", example_kwargs=batch)
    compiled.load_weights()
    assert same(dict(model.state_dict()), dict(run.model.state_dict()))


def test_no_name_is_taken_for_one_of_ours(tmp_path: Path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("state/fc", nn.Parameter(torch.ones(4)))
            self.fc: torch.Tensor
            self.register_buffer("fc", torch.zeros(4, dtype=torch.bfloat16), persistent=False)

        def forward(self, x):
            self.fc.add_(x.detach().mean(0))
            return x * self._parameters["state/fc"] * self.fc

    case = Case(lambda: Named(), lambda step: torch.full((2, 4), 1.0 + step), compile=(BF16, {**BF16, **PARKED}))
    run = Run(case)
    run.train(1)
    run.save(tmp_path / "run")
    expected = run.state()
    assert Run(case, tmp_path / "run").state() == expected
