"""What can't be trained is refused before any work: what is wrong, the rule, and the way out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.planning import host_plan
from megatrain.tools.finetune.run_record import RunRecord
from tests.finetune.commands import data, save_model, train, write_lines
from tests.test_bad_command_line import keywords

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
ON_CPU = ("--device=cpu", "--precision=fp32", "--length=16")
TURN = {"role": "user", "content": "w1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, others whose tokenizers have no chat template or no end token, a model of half its weights, and data."""
    made = tmp_path_factory.mktemp("materials")
    save_model(made / "model")
    save_model(made / "silent", template=None)
    save_model(made / "endless", eos_token_id=None)
    save_model(made / "small", vocab_size=20)
    save_model(made / "halved")
    halve(made / "halved" / "model.safetensors")
    save_model(made / "packed")
    config = made / "packed" / "config.json"
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": packed}))
    (made / "empty").mkdir()
    for kind in ("text", "messages", "prompt"):
        data(made, kind)
    write_lines(made / "words.jsonl", [{"words": "w1"}])
    write_lines(made / "alone.jsonl", [{"messages": [TURN]}])
    write_lines(made / "tools.jsonl", [{"conversations": [{"from": "tool", "value": "w1"}]}])
    (made / "broken.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    (made / "blank.txt").write_text("")
    write_lines(made / "long.jsonl", [{"prompt": "w1 " * 20, "completion": "w2"}])
    return made


def halve(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    save_file({name: t for name, t in weights.items() if "layers.1" not in name}, file, metadata={"format": "pt"})


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["model", "none.jsonl"], "there is no file `none.jsonl`."),
    "no data": (["model", "./none"], "the data `./none` can't be read: "),
    "broken": (["model", "broken.jsonl"], "the data `broken.jsonl` can't be read: "),
    "blank": (["model", "blank.txt"], "`blank.txt` has nothing to learn within 16 tokens."),
    "no column": (["model", "words.jsonl"], "`words.jsonl` has the columns words."),
    "a turn of nobody": (["model", "tools.jsonl"], "row 0 of `tools.jsonl` has a turn from 'tool'."),
    "no answer": (["model", "alone.jsonl"], "the data `alone.jsonl` can't be read: You're using `assistant_only"),
    "nothing to learn": (["model", "long.jsonl"], "has nothing to learn within 16 tokens."),
    "no folder": (["./none", "text.jsonl"], "there is no folder `./none`."),
    "quantized": (["packed", "text.jsonl", "--lora"], "the weights of `packed` are quantized."),
    "no config": (["empty", "text.jsonl"], "the configuration of `empty` can't be read: "),
    "weights missing": (["halved", "text.jsonl"], "lack 9 weights of the model: model.layers.1."),
    "no chat template": (["silent", "messages.jsonl"], "the tokenizer has no chat template"),
    "no end token": (["endless", "text.jsonl"], "the tokenizer has no end token."),
    "a small vocabulary": (["small", "text.jsonl"], "makes token id 63, and the model knows the ids below 20."),
    "no such device": (["model", "text.jsonl", "--device=cuda:9"], "--device='cuda:9' is not available here: there "),
    "too long": (["model", "text.jsonl", "--length=65"], "--length 65 is longer than what the model takes: 64"),
    "a step too small": (["model", "text.jsonl", "--tokens-per-step=8"], "is less than one micro-batch: 1 x 16"),
    "a long warm-up": (["model", "text.jsonl", "--steps=3", "--warmup=4"], "--warmup 4 is longer than the training"),
    "both counts": (["model", "text.jsonl", "--steps=3", "--epochs=1"], "--steps and --epochs are both given."),
    "a split of a file": (["model", "text.jsonl", "--eval-split=a"], "--eval-split is of a data set, and `text.jsonl`"),
    "a file": (["model/config.json", "text.jsonl"], "is a file, and a model is a folder."),
    "no rate": (["model", "text.jsonl", "--lr=0"], "--lr=0.0 is not above 0.\n  --lr is a number above 0 and finite."),
    "no file to evaluate": (["model", "text.jsonl", "--eval="], "--eval='' is not a path: it is empty."),
}


@pytest.mark.usefixtures("no_smaller_blocks")
@pytest.mark.parametrize("name", BAD)
def test_a_run_that_can_not_be_is_refused(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    given, words = BAD[name]
    assert train(*ON_CPU, *given, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    said = said[said.rindex("megatrain: ") :]
    assert words in said
    assert len(said.splitlines()) >= 3, "what is wrong, the rule, and the way out"
    assert not (tmp_path / "out" / "config.json").exists()


def test_libraries_that_are_missing_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))
    assert train(folder / "model", folder / "text.jsonl", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "megatrain train needs trl, which is not installed." in said
    assert "pip install trl" in said


def test_too_little_memory_of_the_host_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "wide", hidden_size=128, intermediate_size=512)
    halve(tmp_path / "wide" / "model.safetensors")
    monkeypatch.setattr(host_plan, "available_now", lambda: 7_000_000)
    assert train(tmp_path / "wide", folder / "text.jsonl", "--out", tmp_path / "out", *ON_CPU) == 2
    said = capsys.readouterr().err
    assert "of host memory, 6.68 MiB are available" in said
    (ways,) = (text for text in said.split("What helps: ")[1:])
    assert " more of the host" in ways
    assert keywords(ways) == [], "the command has no such options"
    assert "--optimizer adamw8bit" in ways
    assert "sgd" not in ways


def test_a_folder_of_other_settings_is_refused_with_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [save_model(tmp_path / "model"), data(tmp_path, "text", 4), "--out", out, *ON_CPU]
    broken: dict[str, Any] = {"version": 2, "settings": {}, "inputs": {}, "is_finished": False}
    out.mkdir()
    (out / "megatrain_train.json").write_text(json.dumps(broken))  # of a run that ended before it trained anything
    assert train(*command, "--steps=1") == 0
    data(tmp_path, "text", 3)
    save_model(tmp_path / "model", num_hidden_layers=1)
    capsys.readouterr()
    assert train(*command, "--steps=2", "--lora", "--lr=0.1") == 2
    said = capsys.readouterr().err
    lines = said[said.index("megatrain: ") :].splitlines()
    assert lines[0] == f"megatrain: `{out}` has the training of other settings:"
    assert lines[1:6] == [
        "  --lora: yes is given, but no was",
        "  --steps: 2 is given, but 1 was",
        "  --lr: 0.1 is given, but nothing was",
        "  data: not the one it was",
        "  model: not the one it was",
    ]
    for wrong in ({**broken, "version": 1}, {**broken, "settings": 3}, [], {}):
        (out / "megatrain_train.json").write_text(json.dumps(wrong))
        assert train(*command, "--steps=1") == 2
        assert "megatrain_train.json` can't be read: " in capsys.readouterr().err


def test_a_folder_that_cant_be_the_trainings_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [folder / "model", folder / "text.jsonl", *ON_CPU, "--out"]
    with RunRecord(tmp_path / "out", {}, {}).locked():
        assert train(*command, tmp_path / "out") == 2
    assert "another process trains in" in capsys.readouterr().err
    (tmp_path / "thesis.txt").write_text("years of work")
    assert train(*command, tmp_path) == 2
    assert "has other files, and no training of this command." in capsys.readouterr().err
    assert train(*command, tmp_path / "thesis.txt" / "out") == 2
    assert f"megatrain: `{tmp_path / 'thesis.txt' / 'out'}` can't be made: " in capsys.readouterr().err
