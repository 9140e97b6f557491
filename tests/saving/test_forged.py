"""Manifests that are forged, checksum included, and those that are no JSON: one kind of error, or the same meaning."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.errors import CheckpointError
from megatrain.saving import load, save
from tests.saving.forging import CHANGES, NAMES, Place, at, changed, content_of, forge, kinds, places, renamed
from tests.saving.training import Tied, adamw, refusal, same, save_trained, state_of, trained

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
    torch.manual_seed(1)
    model = Tied()
    optimizer = adamw(model)
    checkpoint.read_weights(model.state_dict())
    checkpoint.read_optimizer(optimizer, dict(model.named_parameters()))
    tensors = {name: list(map(torch.clone, saved.pieces())) for name, saved in checkpoint.tensors.items()}
    return {
        "weights": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "tensors": tensors,
        "extra": checkpoint.extra,
    }


def may_say(content: Any, forged: Any, place: Place) -> bool:
    """Whether it is a value of the caller's, or an option that is of the same kind still."""
    if place[0] in ("extra", "torch"):
        return True
    if place[:2] == ("optimizer", "param_groups") and len(place) > 3 and place[3] != "params":
        return _is_like(at(content, place), at(forged, place))
    return False


def _is_like(value: Any, forged: Any) -> bool:
    numbers = (int, float)
    if type(value) is bool or type(forged) is bool:
        return forged is None or type(value) is type(forged) or value is None
    if isinstance(value, numbers) or value is None:
        return isinstance(forged, numbers) and abs(forged) < 2**63
    return type(value) is type(forged)


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[str, Any]:
    return outcome(whole)


def judge(whole: Path, expected: dict[str, Any], forged: Any, place: Place) -> str | None:
    """Says what is wrong with what becomes of a forged manifest."""
    manifest = whole / "checkpoint.json"
    before = manifest.read_bytes()
    forge(whole, forged)
    try:
        found = outcome(whole)
    except CheckpointError as error:
        return None if len(str(error).splitlines()) > 2 else f"too short: {error}"
    except Exception as error:
        return f"raw: {error!r}"
    finally:
        manifest.write_bytes(before)
    place = place or ("",)
    if place[0] == "extra" or may_say(content_of(whole), forged, place):
        # Someone else's value in the place of one: but all else is as it was.
        parts = [part for part in expected if part != ("extra" if place[0] == "extra" else "optimizer")]
    else:
        parts = list(expected)
    differing = [part for part in parts if not same(expected[part], found[part])]
    return f"accepted, with others: {differing}" if differing else None


def problems(whole: Path, expected: dict[str, Any], every: int, of_names: bool) -> dict[Any, str]:
    """Forges each kind of place in one of `every` ways, the ways by turns; says what goes wrong."""
    content, found = content_of(whole), {}
    ways: dict[str, Any] = NAMES if of_names else CHANGES
    for number, place in enumerate(kinds(content)):
        if of_names and not (place and isinstance(place[-1], str)):
            continue
        for name in list(ways)[number % every :: every]:
            forged = (renamed if of_names else changed)(content, place, ways[name])
            if (
                place
                and not of_names
                and isinstance(forged, dict)
                and at(content, place[:-1]) == at(forged, place[:-1])
            ):
                continue
            problem = judge(whole, expected, forged, place)
            if problem is not None:
                found[place, name] = problem
    return found


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_changed_field_or_name_is_refused_or_means_the_same(whole: Path, expected: dict[str, Any], every: int):
    assert problems(whole, expected, every, of_names=False) == {}
    assert problems(whole, expected, every, of_names=True) == {}


def test_no_two_values_can_change_places(whole: Path, expected: dict[str, Any]):
    """Tensors of the same spec, files, digests: each stays what it is."""
    content = content_of(whole)
    by_text: dict[str, list[Place]] = {}
    for place in places(content):
        if len(place) == 4 and place[0] == "files" and place[2] == "tensors":
            kind, shape, _, _ = at(content, place)
            by_text.setdefault(f"{kind}{shape}{place[1]}", []).append(place)
        elif len(place) == 4 and place[:2] == ("optimizer", "state") and "!tensor" in at(content, place):
            by_text.setdefault(place[2], []).append(place)
    pairs = [found[:2] for found in by_text.values() if len(found) > 1]
    assert len(pairs) > 3
    for one, other in pairs:
        first, second = at(content, one), at(content, other)
        forged = changed(changed(content, one, lambda _, s=second: s), other, lambda _, f=first: f)
        assert judge(whole, expected, forged, one) is None
        forge_and_refuse(whole, forged)


def forge_and_refuse(whole: Path, forged: Any) -> str:
    manifest = whole / "checkpoint.json"
    before = manifest.read_bytes()
    forge(whole, forged)
    try:
        return refusal(lambda: outcome(whole))
    finally:
        manifest.write_bytes(before)


def test_a_forged_manifest_is_refused_with_the_fields_and_the_rule(whole: Path):
    forged = content_of(whole)
    forged["files"]["../notes.txt"] = forged["files"].pop("notes.txt")
    next(iter(forged["files"].values()))["header_bytes"] = -1
    forged["optimizer"]["class"] = 7
    text = forge_and_refuse(whole, forged)
    assert "`checkpoint.json` is damaged: 3 places that no save writes" in text.replace(f"{whole}/", "")
    assert "\n  a name in content.files is '../notes.txt', not the name of a file in this folder" in text
    assert "\n  content.optimizer.class is 7, not a text" in text
    assert "Copy the checkpoint again" in text


def test_options_of_groups_stay_what_they_are(whole: Path):
    place = ("optimizer", "param_groups", 0, "lr")
    text = forge_and_refuse(whole, changed(content_of(whole), place, lambda _: "evil"))
    assert "`lr of group 0` is a number here, but 'evil' in the checkpoint" in text
    text = forge_and_refuse(whole, changed(content_of(whole), place, CHANGES["dropped"]))
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
    "zeros": b"\0" * 100,
    "no UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"schema": 2}'.encode("utf-16"),
    "BOM": b"\xef\xbb\xbf{}",
    "number": b"7",
    "null": b"null",
    "list": b"[]",
    "text": b'"evil"',
    "object": b"{}",
    "NaN": b'{"schema": NaN, "sha256": "", "content": {}}',
    "infinity": b'{"schema": -Infinity}',
    "beyond floats": b'{"schema": 1e999}',
    "digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "deep lists": b"[" * 100_000,
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "rather deep": b'{"content":' * 300 + b"1" + b"}" * 300,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "twice": b'{"schema": 2, "schema": 2}',
    "cut": b'{"schema": 2, "sha256',
    "more": b"{}{}",
    "surrogate": b'{"\\ud800": 1}',
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_bytes_are_no_manifest(tmp_path: Path, odd: str):
    save(tmp_path / "run", {"w": torch.ones(1)})
    manifest = tmp_path / "run/checkpoint.json"
    manifest.write_bytes(ODD[odd])
    text = refusal(lambda: load(tmp_path / "run"))
    assert text.startswith(f"`{manifest}` is damaged: ")
    assert len(text.splitlines()) > 2


def test_pipes_folders_devices_and_loops_are_no_files(tmp_path: Path):
    save_trained(tmp_path / "run")
    for file in ("checkpoint.json", "model-00001-of-00001.safetensors"):
        path = tmp_path / "run" / file
        content = path.read_bytes()
        makers = {
            "pipe": lambda path=path: os.mkfifo(path),
            "folder": lambda path=path: path.mkdir(),
            "device": lambda path=path: path.symlink_to("/dev/zero"),
            "loop": lambda path=path: path.symlink_to(path),
        }
        for kind, make in makers.items():
            path.unlink()
            make()
            assert file in refusal(lambda: load(tmp_path / "run")), kind
            path.rmdir() if kind == "folder" else path.unlink()
            path.write_bytes(content)
    load(tmp_path / "run").check()


def test_a_name_twice_in_the_manifest_is_refused(whole: Path):
    manifest = whole / "checkpoint.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before.replace(b'"ties":{', b'"ties":{"head.weight":"frozen",'))
    try:
        assert "'head.weight' is in one object twice" in refusal(lambda: load(whole))
    finally:
        manifest.write_bytes(before)


def test_headers_must_say_what_the_manifest_says(tmp_path: Path):
    """Other readers go by the header."""
    save(tmp_path / "run", {"a": torch.ones(2, 3), "b": torch.zeros(2, 3)})
    content = content_of(tmp_path / "run")
    (file,) = (name for name, record in content["files"].items() if record["tensors"])
    tensors = content["files"][file]["tensors"]
    tensors["a"], tensors["b"] = tensors["b"], tensors["a"]
    forge(tmp_path / "run", content)
    text = refusal(lambda: load(tmp_path / "run"))
    assert f"`{tmp_path / 'run' / file}` has a header that contradicts checkpoint.json" in text


def test_checkpoints_of_the_first_schema_are_read(tmp_path: Path):
    model, optimizer = save_trained(tmp_path / "run")
    content = content_of(tmp_path / "run")
    del content["torch"]
    forge(tmp_path / "run", content, schema=1)
    checkpoint = load(tmp_path / "run")
    assert (checkpoint.manifest.schema, checkpoint.manifest.torch_version) == (1, None)
    again = Tied()
    resumed = adamw(again)
    checkpoint.read_weights(again.state_dict())
    checkpoint.read_optimizer(resumed, dict(again.named_parameters()))
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())


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
