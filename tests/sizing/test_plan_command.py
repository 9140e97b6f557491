"""`megatrain plan`: what it prints is what megatrain.plan says of the same model, batch and machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from megatrain.base.counts import counted
from megatrain.device.accelerator import of_card
from megatrain.hardware.presets import PRESETS
from megatrain.planning.model_sizes import DEPTH
from megatrain.tools import cli
from megatrain.tools.sizing.sized_models import ConfigModel
from megatrain.tools.sizing.sizing_options import SizingOptions
from tests.test_bad_command_line import keywords

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
STEP = ("--sequence=16", "--tokens-per-step=64")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, next to a file of weights that nobody can read."""
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(**SIZES).save_pretrained(folder)
    (folder / "model.safetensors").write_text("no weights")
    return folder


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of two layers."""
    folder = tmp_path_factory.mktemp("deeper")
    LlamaConfig(**{**SIZES, "num_hidden_layers": 2}).save_pretrained(folder)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert not keywords(said), said
    assert said.count("\n") >= 2, "an error has a rule and a way out"
    return said


def planned(size: int, count: int, **options: Any) -> megatrain.Plan:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    ids = torch.zeros(size, 16, dtype=torch.long)
    asked = {"optimizer": "AdamW", "precision": "bf16", "max_grad_norm": 1.0, "hardware": "rtx-4090", **options}
    return megatrain.plan(model, micro_batches=count, example_kwargs={"input_ids": ids, "labels": ids}, **asked)


def test_adapters_have_a_rank_of_16_if_none_is_given(config: Path, capsys: pytest.CaptureFixture[str]):
    said = printed(capsys, config, "--hardware=rtx-4090", "--lora", *STEP)
    assert said == printed(capsys, config, "--hardware=rtx-4090", "--lora=16", *STEP)
    assert said != printed(capsys, config, "--hardware=rtx-4090", "--lora=8", *STEP)


def test_the_plan_is_that_of_the_fastest_micro_batch(config: Path, capsys: pytest.CaptureFixture[str]):
    said = printed(capsys, config, "--hardware=rtx-4090", "--memory=300KiB", "--host-memory=1MiB", *STEP)
    plans = {n: planned(n, 4 // n, device_memory="300KiB", host_memory="1MiB") for n in (1, 2, 4)}
    seconds = {n: plan.simulation.step_s for n, plan in plans.items() if plan.fits and plan.simulation is not None}
    best = min(seconds, key=lambda n: seconds[n])
    assert 0 < len(seconds) < 4
    batches = counted(4 // best, "micro-batch")
    assert f"step: 64 tokens, 4 sequences of 16, as {batches} of {best}: the shortest step of 2, 4 " in said
    assert str(plans[best]) in said


def test_chunks_and_tiles_are_planned_as_they_are_asked_for(config: Path, capsys: pytest.CaptureFixture[str]):
    asked = (
        config,
        "--hardware=rtx-4090",
        "--memory=4MiB",
        "--sequence=64",
        "--tokens-per-step=512",
        "--micro-batch=8",
    )
    always, never = (printed(capsys, *asked, f"--chunking={way}") for way in ("always", "never"))
    assert "chunked: logits of" in always
    assert "chunked:" not in never


def test_a_config_file_a_folder_and_a_function_give_the_same_plan(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code = f"""
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    config = LlamaConfig(**{SIZES!r}, use_cache=False)
    model = LlamaForCausalLM(config)
    assert model.lm_head.weight.is_meta
    return model
"""
    (tmp_path / "made.py").write_text(code)
    targets = (config, config / "config.json", f"{tmp_path / 'made.py'}:build")
    options = ("--memory=1GiB", "--micro-batch=2", *STEP)
    said = [printed(capsys, target, *options) for target in targets]
    assert said[0] == said[1]
    # The buffers that a function's model computes are on meta, too.
    assert said[0].splitlines()[:3] == said[2].splitlines()[:3]


def test_inputs_of_a_function_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = "import torch\ndef build():\n    return torch.nn.Linear(8, 8), torch.ones(4, 8)\n"
    (tmp_path / "made.py").write_text(code)
    target = f"{tmp_path / 'made.py'}:build"
    said = printed(capsys, target, "--memory=1GiB", "--tokens-per-step=8", "--micro-batch=2")
    assert "as 4 micro-batches of 2" in said
    assert "--sequence 4 can't be: the example has neither" in refused(capsys, target, "--memory=1GiB", "--sequence=4")
    assert "--lora and the function" in refused(capsys, target, "--memory=1GiB", "--lora=2")


def test_a_table_of_all_machines_has_the_rows_of_single_plans(config: Path, capsys: pytest.CaptureFixture[str]):
    said = printed(capsys, config, "--hardware=all", "--micro-batch=4", *STEP)
    rows = {line.split()[0]: line for line in said.splitlines()[2:]}
    assert list(rows) == list(PRESETS)
    for name in ("rtx-4090", "h200"):
        memory = int(PRESETS[name].gib * 2**30)
        plan = planned(4, 1, hardware=name, device_memory=memory - of_card(memory), host_memory="1TiB")
        assert plan.simulation is not None
        assert f"  {64 / plan.simulation.step_s:.0f}  " in rows[name]
    assert "GiB  1 x 4" in rows["gb10"]


@pytest.mark.nightly
def test_reasons_and_alternatives_are_in_the_words_of_the_command(config: Path, capsys: pytest.CaptureFixture[str]):
    options = ("--hardware=rtx-4090", "--memory=300KiB", "--micro-batch=1", "--host-memory=1MiB", *STEP)
    said = printed(capsys, config, *options, "--why", "--alternatives")
    assert "On rtx-4090 a step takes" in said
    assert "With 1 GiB more of the device" in said
    for option in ("--memory ", "--micro-batch 2, 2 micro-batches", "--masters rounded", "--no-clipping", "--lora 16"):
        assert f"  {option}" in said
    assert not keywords(said.partition("alternatives:")[2])


@pytest.mark.nightly
def test_what_does_not_fit_is_refused_with_ways_out(config: Path, capsys: pytest.CaptureFixture[str]):
    said = refused(capsys, config, "--memory=60KiB", "--micro-batch=4", *STEP, "--host-memory=1GiB")
    assert "megatrain: a memory of 61440 B is too small: at least" in said
    assert "more of the device, or one of these, each planned" in said
    assert "\n    --micro-batch " in said


@pytest.mark.nightly
def test_what_the_host_has_no_room_for_is_refused_with_ways_out(config: Path, capsys: pytest.CaptureFixture[str]):
    host = refused(capsys, config, "--memory=280KiB", "--micro-batch=4", *STEP, "--host-memory=150KiB")
    assert "of host memory, 150.00 KiB are available" in host
    assert "\n    --optimizer " in host


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--memory=1GiB", "--sequence=100"), "--sequence 100 is longer than what the model takes: 64 tokens."),
        (("--memory=1GiB", "--sequence=16", "--tokens-per-step=8"), "--tokens-per-step 8 is less than one micro-batch"),
        (("--hardware=rtx-9090",), "--hardware='rtx-9090' is not known"),
        ((), "there is nothing to plan for"),
        (("--hardware=all", "--why"), "--why, --alternatives and --largest are of one plan"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], said: str, config: Path, capsys: pytest.CaptureFixture[str]
):
    assert said in refused(capsys, config, *arguments)


def test_a_configuration_that_says_something_of_each_layer_keeps_its_depth(tmp_path: Path):
    LlamaConfig(**{**SIZES, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 2, "kinds": [1, 2]')
    )
    source = ConfigModel(SizingOptions(str(tmp_path), memory="1GiB"))
    assert source.fixed == {DEPTH: "the configuration says something of each layer: kinds"}
    assert DEPTH not in source.sizes


def test_the_step_is_drawn(deeper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = (deeper, "--hardware=rtx-4090", "--micro-batch=1", "--sequence=16", "--host-bandwidth=400GB")
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    drawn = (f"--report={page}", f"--trace={trace}")
    said = printed(capsys, *asked, "--tokens-per-step=16", *drawn)
    assert said.index("report: ") < said.index(f"written: {page}") < said.index(f"written: {trace}")
    assert re.search(r"^report: LlamaForCausalLM, \d+ blocks, ", said, re.MULTILINE)
    assert "What holds the peak" in page.read_text()
    assert "--report draws the step of one machine" in refused(capsys, deeper, "--memory=1GiB", *drawn, *STEP)
    assert "--trace draws the step of one machine" in refused(capsys, deeper, "--hardware=all", drawn[1], *STEP)
    assert "--trace goes with --report" in refused(capsys, *asked, drawn[1])
    broken = tmp_path / "config.json"
    broken.write_text("{}")
    said = refused(capsys, str(broken), *asked[1:], f"--report={tmp_path / 'no' / 'page.html'}")
    assert "can't be written: there is no such folder" in said  # ahead of the model
