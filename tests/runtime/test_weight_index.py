"""Indexes of weights that are forged or no JSON: one kind of error, before any file is opened."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain.errors import WeightsError
from megatrain.files.weight_files import open_checkpoint
from tests.runtime.saved import gpt, on_meta, save_sharded, state_of
from tests.saving.forging import CHANGES, NAMES, changed, renamed
from tests.saving.test_forged import ODD


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "w"
    folder.mkdir()
    save_sharded(folder, state_of(gpt()))
    return folder


def index_of(folder: Path) -> Path:
    (index,) = folder.glob("*.safetensors.index.json")
    return index


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        megatrain.compile(on_meta(), device="cpu", weights=folder)
    text = str(caught.value)
    assert len(text.splitlines()) > 2
    return text


def with_index(whole: Path, folder: Path, content: bytes) -> Path:
    shutil.copytree(whole, folder)
    index_of(folder).write_bytes(content)
    return folder


@pytest.mark.parametrize("odd", ODD)
def test_odd_bytes_are_no_index(whole: Path, tmp_path: Path, odd: str):
    folder = with_index(whole, tmp_path / "w", ODD[odd])
    assert refusal(folder).startswith(f"`{index_of(folder)}` isn't an index of safetensors files: ")


@pytest.mark.parametrize("change", CHANGES)
def test_a_field_of_another_kind_is_refused(whole: Path, tmp_path: Path, change: str):
    content = json.loads(index_of(whole).read_text())
    name = next(iter(content["weight_map"]))
    for i, place in enumerate([(), ("weight_map",), ("weight_map", name)]):
        forged = changed(content, place, CHANGES[change])
        if len(place) == 2 and change == "dropped":
            continue  # the file has the name all the same
        refusal(with_index(whole, tmp_path / f"{i}", json.dumps(forged).encode()))


@pytest.mark.parametrize("change", NAMES)
def test_a_name_that_is_another_one_is_refused(whole: Path, tmp_path: Path, change: str):
    content = json.loads(index_of(whole).read_text())
    for i, key in enumerate(["weight_map", next(iter(content["weight_map"]))]):
        place = ("weight_map", key)[-1:] if i == 0 else ("weight_map", key)
        forged = renamed(content, place, NAMES[change])
        refusal(with_index(whole, tmp_path / f"{i}", json.dumps(forged).encode()))


@pytest.mark.parametrize("way", ["../w/{}", "/{}", "./{}", "sub/../{}", "{}/"])
def test_an_index_leads_nowhere_out_of_its_folder(whole: Path, tmp_path: Path, way: str):
    listed: dict[str, Any] = json.loads(index_of(whole).read_text())["weight_map"]
    files = {name: f"{whole}/{file}" if way == "/{}" else way.format(file) for name, file in listed.items()}
    folder = with_index(whole, tmp_path / "w", json.dumps({"weight_map": files}).encode())
    (folder / "sub").mkdir()
    text = refusal(folder)
    assert "not the name of a file in this folder" in text
    assert '\n  An index is JSON that maps each name to a file in its own folder, under "weight_map".' in text


def test_linked_files_and_folders_within_are_taken(whole: Path, tmp_path: Path):
    listed: dict[str, Any] = json.loads(index_of(whole).read_text())["weight_map"]
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "parts").symlink_to(whole)
    linked = {"metadata": {"total_size": 1.5}, "weight_map": {name: f"parts/{file}" for name, file in listed.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(linked))
    (tmp_path / "link").symlink_to(folder)
    assert open_checkpoint([tmp_path / "link"]).keys() == state_of(gpt()).keys()


def test_pipes_folders_and_devices_are_no_weights(tmp_path: Path):
    makers = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path),
    }
    for kind, make in makers.items():
        for name in ("w.safetensors", "w.safetensors.index.json"):
            folder = tmp_path / f"{kind}-{name}"
            folder.mkdir()
            make(folder / name)
            assert name in refusal(folder)


def test_paths_that_no_system_takes_do_not_exist():
    for path in ("a\0b", "x" * 5000, "x/" * 3000):
        with pytest.raises(WeightsError, match="does not exist"):
            open_checkpoint([Path(path)])
