"""What can't be trained is refused before any work: what is wrong, the rule, and the way out."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.finetune.run_record import RunRecord, fingerprint
from megatrain.planning import host_plan
from tests.finetune.commands import train
from tests.finetune.materials import ON_CPU, chat, config, data, save_model, write_lines
from tests.test_bad_command_line import keywords

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one whose tokenizer has no chat template, a configuration alone, and data."""
    made = tmp_path_factory.mktemp("materials")
    save_model(made / "model")
    save_model(made / "silent", template=None)
    save_model(made / "small", vocab_size=20)
    config().save_pretrained(made / "bare")
    (made / "broken").mkdir()
    (made / "broken" / "config.json").write_text('{"model_type": "nothing_known"}')
    save_model(made / "halved")
    (made / "empty").mkdir()
    halve(made / "halved" / "model.safetensors")
    for kind in ("text", "messages", "prompt"):
        data(made, kind)
    return made


def halve(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    save_file({name: t for name, t in weights.items() if "layers.1" not in name}, file, metadata={"format": "pt"})


def lines(*rows: Any) -> Callable[[Path], Path]:
    return lambda folder: write_lines(folder / "given.jsonl", list(rows))


def raw(content: bytes, name: str = "given.jsonl") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


TEXT = {"text": "w1 w2 w3 w4"}
TURN = {"role": "user", "content": "w1"}
BAD_DATA: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda folder: folder / "none.jsonl", "there is no file `"),
    "no format": (raw(b"w1", "given.csv"), "is neither a .jsonl nor a .txt file."),
    "empty": (raw(b""), "is empty."),
    "blank": (raw(b" \n\n", "given.txt"), "has no text."),
    "no json": (raw(b'{"text": "w1"}\n\n{"text": \n'), "line 3 of `"),
    "no object": (lines(TEXT, ["w1"]), "is not a JSON object."),
    "not utf-8": (raw(b'{"text": "w1"}\n{"text": "\xff"}\n'), "line 2 of `"),
    "no column": (lines({"words": "w1"}), "has `words`."),
    "a column is missing": (lines(TEXT, {"texts": "w1"}), "has no `text`; it has `texts`."),
    "a prompt alone": (lines({"prompt": "w1"}), "has `prompt`."),
    "no text": (lines(TEXT, {"text": 5}), "`text` in line 2 of `"),
    "no messages": (lines({"messages": "w1"}), "is not a list of messages."),
    "no role": (lines({"messages": [TURN, {"content": "w2"}]}), "has a message 2 without a role and a content."),
    "nothing to learn": (lines({"messages": [TURN]}), "has nothing to learn within sequences of 16 tokens."),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, out: Path) -> str:
    assert train(*arguments, "--out", out, *ON_CPU) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatrain: ")
    assert len(said.splitlines()) >= 3, "what is wrong, the rule, and the way out"
    assert keywords(said) == []
    assert not out.exists()
    return said


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_is_refused_with_its_line(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = BAD_DATA[name]
    assert words in refused(capsys, folder / "model", make(tmp_path), out=tmp_path / "out")
    good = folder / "text.jsonl"
    assert words in refused(capsys, folder / "model", good, "--eval", make(tmp_path), out=tmp_path / "out")


BAD_RUNS: dict[str, tuple[list[str], str]] = {
    "no folder": (["./none", "text.jsonl"], "there is no folder `./none`."),
    "no config": (["empty", "text.jsonl"], "has no config.json."),
    "a config alone": (["bare", "text.jsonl"], "has no weights."),
    "a file": (["bare/config.json", "text.jsonl"], "is a file, and a model is a folder."),
    "no tokenizer": (["bare", "text.jsonl", "--from-config"], "the tokenizer of `bare` can't be read"),
    "unknown": (["broken", "text.jsonl", "--from-config"], "the configuration of `broken` can't be read"),
    "weights missing": (["halved", "text.jsonl"], "lack 9 weights of the model: model.layers.1."),
    "no chat template": (["silent", "messages.jsonl"], "the tokenizer has no chat template"),
    "a small vocabulary": (["small", "text.jsonl"], "makes token id 63, and the model knows the ids below 20."),
    "no such device": (["model", "text.jsonl", "--device=cuda:9"], "--device='cuda:9' is not available here: there "),
    "a device without values": (["model", "text.jsonl", "--device=meta"], "--device='meta' has no values to compute"),
    "too long": (["model", "text.jsonl", "--length=65"], "--length 65 is longer than what the model takes: 64"),
    "no device memory": (["model", "text.jsonl", "--memory=20KiB"], "a memory of 20480 B is too small: at least"),
    "a step too small": (["model", "text.jsonl", "--tokens-per-step=8"], "is less than one micro-batch: 1 x 16"),
    "a long warm-up": (["model", "text.jsonl", "--steps=3", "--warmup=4"], "--warmup 4 is longer than the training"),
    "both counts": (["model", "text.jsonl", "--steps=3", "--epochs=1"], "--steps and --epochs are both given."),
    "a split of a file": (
        ["model", "text.jsonl", "--split=train"],
        "--split is of a data set, and `text.jsonl` is a file.",
    ),
    "no data": (["model", "./none"], "there is no file and no folder `./none`."),
    "two evaluations": (
        ["model", "some/data", "--eval-split=test", "--eval=text.jsonl"],
        "--eval and --eval-split are",
    ),
    "both held out": (
        ["model", "text.jsonl", "--eval=text.jsonl", "--eval-fraction=0.1"],
        "--eval and --eval-fraction are",
    ),
    "no rate": (
        ["model", "text.jsonl", "--lr=0"],
        "--lr=0.0 is not above 0.\n  --lr is a number above 0 and finite.\n  Give --lr",
    ),
    "no file to evaluate": (["model", "text.jsonl", "--eval="], "--eval='' is not a path: it is empty."),
    "no model": (
        ["", "text.jsonl"],
        "model '' is not a path: it is empty.\n  model is the path of",
    ),
    "a random base": (["bare", "text.jsonl", "--from-config", "--lora"], "adapters over random weights are of no use"),
}


@pytest.mark.usefixtures("no_smaller_blocks")
@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_run_that_can_not_be_is_refused(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    given, words = BAD_RUNS[name]
    arguments = [*ON_CPU, *given, "--out", str(tmp_path / "out")]
    assert train(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert keywords(said[said.rindex("megatrain: ") :]) == []
    assert len([line for line in said.splitlines() if line.startswith("  ")]) >= 2, said
    assert not (tmp_path / "out" / "config.json").exists()


def test_libraries_that_are_missing_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    said = refused(capsys, folder / "model", folder / "text.jsonl", "--lora", out=tmp_path / "out")
    assert "megatrain train needs peft, which is not installed." in said
    assert "pip install peft" in said
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    said = refused(capsys, folder / "model", "owner/data", out=tmp_path / "out")
    assert "megatrain train needs datasets, which is not installed." in said
    assert "pip install datasets" in said


def test_too_little_memory_of_the_host_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "wide", hidden_size=128, intermediate_size=512)
    halve(tmp_path / "wide" / "model.safetensors")
    capsys.readouterr()
    monkeypatch.setattr(host_plan, "available_now", lambda: 5_000_000)
    said = refused(capsys, tmp_path / "wide", folder / "text.jsonl", out=tmp_path / "out")
    assert "of host memory, 4.77 MiB are available" in said
    (ways,) = (text for text in said.split("What helps: ")[1:])
    assert " more of the host" in ways
    assert "\n    --lora: " in ways
    assert "masters" not in ways, "the command has no such option"


@pytest.fixture
def begun(folder: Path, tmp_path: Path) -> list[object]:
    """A training that has ended, as a command without options."""
    save_model(tmp_path / "model")
    command = [tmp_path / "model", data(tmp_path, "text", 4), "--out", tmp_path / "out", *ON_CPU]
    assert train(*command, "--steps=1") == 0
    return command


def test_a_folder_of_other_settings_is_refused_with_the_differences(
    begun: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    write_lines(tmp_path / "text.jsonl", [TEXT])
    save_model(tmp_path / "model", num_hidden_layers=1)
    assert train(*begun, "--steps=2", "--lora", "--lr=0.1") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"megatrain: `{tmp_path / 'out'}` has the training of other settings:"
    assert said[1:6] == [
        "  --lora: yes is given, but no was",
        "  --steps: 2 is given, but 1 was",
        "  --lr: 0.1 is given, but nothing was",
        "  data: not the one it was",
        "  model: not the one it was",
    ]


def test_a_folder_in_which_nothing_was_trained_takes_other_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [folder / "text.jsonl", "--out", out, *ON_CPU, "--steps=1"]
    assert train(folder / "halved", *command) == 2
    (out / "megatrain_train.json").write_text(
        json.dumps({"version": 1, "settings": {}, "inputs": {}, "is_finished": False})
    )
    assert train(folder / "model", *command) == 0
    assert train(folder / "model", *command, "--seed=1") == 2
    assert "--seed: 1 is given, but 0 was" in capsys.readouterr().err


def test_a_folder_of_something_else_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert train(folder / "model", folder / "text.jsonl", "--out", tmp_path, *ON_CPU) == 2
    assert "has other files, and no training of this command." in capsys.readouterr().err
    whole = {"version": 1, "settings": {}, "inputs": {}, "is_finished": True}
    for broken, why in (
        ({"settings": {}}, "`megatrain_train.json` is wrong: object missing required field `version`"),
        ({**whole, "version": 2}, "`megatrain_train.json.version` is wrong: invalid enum value 2"),
        ({**whole, "is_finished": "no"}, "`megatrain_train.json.is_finished` is wrong: expected `bool`, got `str`"),
        ({**whole, "inputs": {"model": 1}}, "`megatrain_train.json.inputs[...]` is wrong: expected `str`, got `int`"),
    ):
        (tmp_path / "megatrain_train.json").write_text(json.dumps(broken))
        assert train(folder / "model", folder / "text.jsonl", "--out", tmp_path, *ON_CPU) == 2
        assert f"megatrain_train.json` can't be read: {why}" in capsys.readouterr().err


def test_a_folder_that_the_system_refuses_is_one_of_our_errors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert train(folder / "model", folder / "text.jsonl", "--out", out, *ON_CPU) == 2
    assert f"megatrain: `{out}` can't be made: " in capsys.readouterr().err


def test_models_that_differ_at_their_end_alone_are_two(tmp_path: Path) -> None:
    """As two tunings of one model do, whose embeddings are frozen."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 * 2**20))
    before = fingerprint(str(tmp_path))
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert fingerprint(str(tmp_path)) != before


def test_a_folder_has_one_training_at_a_time(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunRecord(tmp_path, {}, {}).locked():
        assert train(folder / "model", folder / "text.jsonl", "--out", tmp_path, *ON_CPU) == 2
    assert "another process trains in" in capsys.readouterr().err


def test_a_training_that_diverges_ends_with_the_parameter(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [folder / "model", folder / "text.jsonl", "--out", tmp_path / "out", *ON_CPU]
    assert train(*command, "--lr=1e30", "--accumulate=2", "--steps=6", "--warmup=0") == 2
    said = capsys.readouterr().err
    assert "megatrain: the gradient of `" in said
    assert "is not finite." in said
    assert "Give a smaller --lr or a longer --warmup" in said
    assert keywords(said[said.index("megatrain: ") :]) == []


def test_a_chat_that_the_template_refuses_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}w1"
    save_model(tmp_path / "model", template=template)
    wrong = {"messages": chat(1)["messages"][::-1]}
    given = write_lines(tmp_path / "given.jsonl", [chat(0), wrong])
    said = refused(capsys, tmp_path / "model", given, out=tmp_path / "out")
    assert "the chat template refuses chat 2 of `given.jsonl`: user first" in said
