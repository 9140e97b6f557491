"""Manifests that are forged, checksum included, and those that are no JSON: one kind of error, or the same meaning."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.files import load, save
from tests.saving.forging import DROPPED, Place, at, changed, content_of, forge
from tests.saving.training import Tied, adamw, refusal, state_of, trained

EXTRA = {
    "plain": [None, True, 3, 2.5, "text", (1, "two")],
    "limits": [float("inf"), float("nan")],
    "odd keys": {1: "one", (2, 3): "two", None: torch.ones(1)},
    "count": Counter("aab"),
    "tensors": {"one": torch.arange(3), "two": torch.arange(3.0)},
    "array": np.arange(4),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all kinds of files and values."""
    folder = tmp_path_factory.mktemp("forged") / "run"
    model, optimizer = trained()
    more = {"one": torch.ones(3), "two": torch.empty(0, 2), "three": torch.zeros(3)}
    note = lambda place: (place / "notes.txt").write_text("years of work")  # noqa: E731
    save(folder, state_of(model), optimizer=optimizer, extra=EXTRA, tensors=more, more=note, shard_bytes=250)
    return folder


def outcome(folder: Path) -> dict[str, Any]:
    """All that can be had of a checkpoint."""
    checkpoint = load(folder)
    checkpoint.check()
    model = Tied()
    optimizer = adamw(model)
    checkpoint.read_weights(model.state_dict())
    checkpoint.read_optimizer(optimizer, dict(model.named_parameters()))
    return {"optimizer": optimizer.state_dict(), "extra": checkpoint.extra}


def forge_and_refuse(whole: Path, forged: Any) -> str:
    manifest = whole / "checkpoint.json"
    before = manifest.read_bytes()
    forge(whole, forged)
    try:
        return refusal(lambda: outcome(whole))
    finally:
        manifest.write_bytes(before)


NOTES, SHARD = ("files", "notes.txt"), ("files", "first", "tensors", "evil")
TEXT = {"bytes": 1, "header_bytes": 1, "sha256": "0" * 64, "tensors": {}}
FIELDS: dict[str, tuple[Place, Any, str]] = {
    "a file elsewhere": (("files", "../notes.txt"), TEXT, "'../notes.txt' isn't the name of a file in this folder"),
    "a flag": ((*NOTES, "bytes"), True, "bytes` is wrong: expected `int`, got `bool`"),
    "kind of tensor": (SHARD, ["X9", [], 8, "0" * 64], "is wrong: 'X9' is no kind of tensor"),
    "a field more": ((*NOTES, "evil"), 1, "is wrong: object contains unknown field `evil`"),
    "no text": (("optimizer", "class"), 7, "`content.optimizer.class` is wrong: expected `str`, got `int`"),
    "weights elsewhere": (("weights", "files"), ["evil"], "'evil' isn't among its files"),
    "unknown tag": (("extra", "plain"), {"!evil": 1}, "is no value that a save writes"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field_is_refused_with_its_place_and_the_rule(whole: Path, name: str):
    place, value, said = FIELDS[name]
    content = content_of(whole)
    place = tuple(content["weights"]["files"][0] if key == "first" else key for key in place)
    at(content, place[:-1])[place[-1]] = value
    text = forge_and_refuse(whole, content)
    assert said in text
    assert len(text.splitlines()) > 2


def test_options_of_groups_stay_what_they_are(whole: Path):
    place = ("optimizer", "param_groups", 0, "lr")
    text = forge_and_refuse(whole, changed(content_of(whole), place, []))
    assert "here, but [] in the checkpoint" in text
    text = forge_and_refuse(whole, changed(content_of(whole), place, DROPPED))
    assert "`lr of group 0` is not in the checkpoint" in text


def test_an_older_torch_may_have_had_fewer_options(whole: Path):
    content = content_of(whole)
    content["torch"] = "1.13"
    del content["optimizer"]["param_groups"][0]["differentiable"]
    manifest = whole / "checkpoint.json"
    before = manifest.read_bytes()
    forge(whole, content)
    try:
        assert outcome(whole)["optimizer"]["param_groups"][0].get("differentiable", False) is False
    finally:
        manifest.write_bytes(before)


ODD: dict[str, bytes] = {
    "empty": b"",
    "no UTF-8": b"\xff\xfe{}",
    "list": b"[]",
    "object": b"{}",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "twice": b'{"schema": 2, "schema": 2}',
    "cut": b'{"schema": 2, "sha256',
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_bytes_are_no_manifest(tmp_path: Path, odd: str):
    save(tmp_path / "run", {"w": torch.ones(1)})
    manifest = tmp_path / "run/checkpoint.json"
    manifest.write_bytes(ODD[odd])
    text = refusal(lambda: load(tmp_path / "run"))
    assert text.startswith(f"`{manifest}` is damaged: ")
    assert len(text.splitlines()) > 2


def test_what_load_would_refuse_is_refused_by_save(tmp_path: Path):
    list_in_itself: list[Any] = []
    list_in_itself.append(list_in_itself)
    for problem, options in {
        r"`a\ud800` isn't a name": {"weights": {"a\ud800": torch.ones(1)}},
        "`loop": {"weights": {}, "extra": {"loop": list_in_itself}},
    }.items():
        assert problem in refusal(lambda options=options: save(tmp_path / "run", **options))
    extra = {"!tuple": 1, "!": {"!float": 2}}
    save(tmp_path / "run", {}, extra=extra)
    assert load(tmp_path / "run").extra == extra
    assert json.loads((tmp_path / "run/checkpoint.json").read_text())["schema"] == 2


def test_a_name_twice_in_the_manifest_is_refused(whole: Path):
    manifest = whole / "checkpoint.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before.replace(b'"ties":{', b'"ties":{"head.weight":"frozen",'))
    try:
        assert "'head.weight' is in one object twice" in refusal(lambda: load(whole))
    finally:
        manifest.write_bytes(before)
