"""`megatrain train` on a data set of the `datasets` library: the numbers of the same rows in a file."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import OptionError
from megatrain.finetune.data_set import read_data_set
from megatrain.finetune.documents import read_documents
from megatrain.finetune.run_callbacks import StopBetweenSteps
from tests.comparing import assert_same
from tests.finetune.commands import log_of, train, weights_of
from tests.finetune.materials import ON_CPU, chat, data, save_model, write_lines

pytestmark = [
    pytest.mark.users,
    pytest.mark.filterwarnings("ignore"),  # what these libraries warn of is theirs
    pytest.mark.usefixtures("lowered_once"),  # of few models
]
NEEDS = "needs datasets: pip install -e .[users]"
GIVEN = (*ON_CPU, "--accumulate=2", "--steps=6", "--lr=1e-2", "--save-every=2")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("datasets", reason=NEEDS).config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def folder_of(folder: Path, files: dict[str, Path]) -> Path:
    """A folder as the hub has them: a file for each split."""
    folder.mkdir()
    for name, path in files.items():
        shutil.copy(path, folder / f"{name}.jsonl")
    return folder


@pytest.mark.parametrize("kind", ["text", "messages", "prompt"])
def test_a_folder_trains_as_the_file_in_it(kind: str, model: Path, tmp_path: Path) -> None:
    path = data(tmp_path, kind)
    other = data(tmp_path, "text" if kind == "prompt" else "prompt", 6)
    folder = folder_of(tmp_path / "set", {"train": path})
    assert train(model, path, "--out", tmp_path / "one", "--eval", other, *GIVEN) == 0
    assert train(model, folder, "--out", tmp_path / "two", "--eval", other, *GIVEN) == 0
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")
    assert_same(weights_of(tmp_path / "two"), weights_of(tmp_path / "one"))


def test_splits_and_configurations_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = data(tmp_path, "prompt"), write_lines(tmp_path / "other.jsonl", [chat(i) for i in range(3)])
    folder = folder_of(tmp_path / "set", {"a": path, "b": other, "c": path})
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files:\n  - {split: train, path: a.jsonl}\n"
        "  - {split: held_out, path: c.jsonl}\n- config_name: two\n  data_files: b.jsonl\n---\n"
    )
    assert train(model, path, "--out", tmp_path / "one", "--eval", path, *GIVEN) == 0
    capsys.readouterr()
    named = ["--data-config=one", "--split=train[:100%]", "--eval-split=held_out"]
    assert train(model, folder, "--out", tmp_path / "two", *named, *GIVEN) == 0
    said = capsys.readouterr().out
    assert "data    set (train[:100%]): 24 prompts\n" in said
    assert "eval    set (held_out): 24 prompts: " in said or "eval    set (held_out): 24 prompts: 24 sequences" in said
    assert log_of(tmp_path / "two") == log_of(tmp_path / "one")
    assert str(read_data_set(str(folder), "two", "train")) == "set (train): 3 chats"
    for config, split, words in (
        (None, "train", "Config name is missing"),
        ("three", "train", "three"),
        ("one", "test", 'Unknown split "test"'),
    ):
        with pytest.raises(OptionError, match=words) as refused:
            read_data_set(str(folder), config, split)
        assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("has_splits", [False, True])
def test_what_save_to_disk_wrote_is_read(has_splits: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason=NEEDS)
    path = data(tmp_path, "messages", 5)
    table = datasets.Dataset.from_list(rows_of(path))
    saved = datasets.DatasetDict({"train": table, "rest": table.select(range(2))}) if has_splits else table
    saved.save_to_disk(str(tmp_path / "saved"))
    found = read_data_set(str(tmp_path / "saved"), None, "train")
    assert list(found.records) == list(read_documents(path).records)
    with pytest.raises(OptionError, match="has not a split test; its splits are train"):
        read_data_set(str(tmp_path / "saved"), None, "test")
    with pytest.raises(OptionError, match="has not the configuration a; its splits are train"):
        read_data_set(str(tmp_path / "saved"), "a", "train")


def test_keys_that_some_messages_lack_are_lacking_in_a_table_too(tmp_path: Path) -> None:
    """A table has all keys in each row, and a chat template may ask whether a key is there."""
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "content": "1"},
    ]
    rows = [{"messages": turns, "tools": [{"name": "f"}], "id": 1}, {**chat(1), "tools": None, "id": 2}]
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    found = read_data_set(str(tmp_path / "set"), None, "train")
    assert list(found.records) == [{"messages": turns, "tools": [{"name": "f"}]}, {**chat(1), "tools": None}]


BAD: dict[str, tuple[list[Any], str]] = {
    "no column": ([{"words": "w1"}], "the split train of `.*set` has `words`.\n"),
    "no text": ([{"text": "w1"}, {"text": None}], "`text` in row 2 of `.*set`, train is not a text.\n"),
    "numbers": ([{"text": 1}], "`text` in row 1 of `.*set`, train is not a text.\n"),
    "no role": ([{"messages": [{"content": "w1"}]}], "has a message 1 without a role and a content.\n"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_are_refused_with_their_number(name: str, tmp_path: Path) -> None:
    rows, words = BAD[name]
    path = write_lines(tmp_path / "train.jsonl", rows)
    with pytest.raises(OptionError, match=words):
        read_data_set(str(folder_of(tmp_path / "set", {"train": path})), None, "train")


def test_what_is_no_data_set_is_refused_before_any_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (
        (tmp_path / "empty", "can't be read"),
        (tmp_path / "nowhere", "there is no file and no folder `"),
        ("nobody/nothing", "the data set `nobody/nothing` can't be read"),
    ):
        assert train(model, name, "--out", tmp_path / "out", *GIVEN) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_other_rows_are_other_data(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was stopped goes on with the same rows, wherever they are, and is refused with others."""
    path = data(tmp_path, "prompt")
    folder = folder_of(tmp_path / "set", {"train": path})
    assert train(model, folder, "--out", tmp_path / "whole", *GIVEN) == 0
    ends: Any = StopBetweenSteps.on_step_end
    monkeypatch.setattr(StopBetweenSteps, "on_step_end", _stops_at_3)
    assert train(model, folder, "--out", tmp_path / "out", *GIVEN) == 130
    monkeypatch.setattr(StopBetweenSteps, "on_step_end", ends)
    rows = rows_of(path)
    write_lines(folder / "train.jsonl", [rows[1], rows[0], *rows[2:]])
    capsys.readouterr()
    assert train(model, folder, "--out", tmp_path / "out", *GIVEN) == 2
    assert "data: not the one it was" in capsys.readouterr().err
    moved = folder_of(tmp_path / "moved", {"validation": path})
    assert train(model, moved, "--split=validation", "--out", tmp_path / "out", *GIVEN) == 0
    assert "resume  step 3 of 6" in capsys.readouterr().out
    assert log_of(tmp_path / "out") == log_of(tmp_path / "whole")
    assert_same(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole"))


def _stops_at_3(self: StopBetweenSteps, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    if state.global_step == 3:
        self.is_asked = control.should_save = control.should_training_stop = True


def test_the_rows_stay_on_the_disk(tmp_path: Path) -> None:
    rows = [{"text": f"{i} " + "w1 " * 4000} for i in range(400)]
    path = write_lines(tmp_path / "train.jsonl", rows)
    folder = folder_of(tmp_path / "set", {"train": path})
    read_data_set(str(folder), None, "train")  # writes its table
    tracemalloc.start()
    try:
        found = read_data_set(str(folder), None, "train")
        assert sum(len(record["text"]) for record in found.records) > 4_000_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
