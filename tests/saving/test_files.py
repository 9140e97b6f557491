"""What lies on the disk: files that others read, what is refused, and errors that name everything at once."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatrain.files import load, save
from tests.models import MODELS
from tests.saving.training import Tied, adamw, known, refusal, same, save_trained, state_of, trained

# -- read by others ----------------------------------------------------------------------------------------------


def test_the_files_are_those_of_the_library(tmp_path: Path):
    tensors = {"b": torch.randn(3), "a": torch.randn(2, 5), "half": torch.randn(3).bfloat16(), "none": torch.empty(0)}
    save(tmp_path / "run", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "run/model-00001-of-00001.safetensors").read_bytes() == (
        tmp_path / "theirs.safetensors"
    ).read_bytes()


def test_any_reader_finds_weights_and_state_by_name_in_files_of_limited_size(tmp_path: Path):
    model, optimizer = save_trained(tmp_path / "run", shard_bytes="400 B")
    index = json.loads((tmp_path / "run/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "run").glob("*.safetensors"))
    assert len(files) > 1
    assert set(index["weight_map"].values()) == set(files)
    for file in files:
        for name, tensor in load_file(tmp_path / "run" / file).items():
            assert index["weight_map"][name] == file
            assert same(tensor, model.state_dict()[name])
    assert set(index["weight_map"]) == set(model.state_dict()) - {"head.weight"}
    moments = {}
    for file in (tmp_path / "run/training").glob("optimizer-*.safetensors"):
        moments |= load_file(file)
    assert same(moments["body.weight.exp_avg"], optimizer.state[model.body.weight]["exp_avg"])
    assert load(tmp_path / "run").check() is None


def test_tensors_apart_are_read_one_by_one_and_are_no_weights(tmp_path: Path):
    model, _ = known(0)
    more = {
        "low": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(7),
    }
    save(tmp_path / "run", state_of(model), tensors=more, extra={"low": torch.ones(2)}, shard_bytes=16)
    checkpoint = load(tmp_path / "run")
    checkpoint.check()
    assert checkpoint.weights.keys() == model.state_dict().keys()
    assert checkpoint.tensors.keys() == more.keys()
    for name, saved in checkpoint.tensors.items():
        out = torch.empty_like(more[name])
        saved.read(out)
        assert same(out, more[name])
    assert len(list((tmp_path / "run/training").glob("tensors-*"))) > 1
    save(tmp_path / "run", state_of(model))
    assert load(tmp_path / "run").tensors == {}
    problem = refusal(lambda: save(tmp_path / "run", {}, tensors={"far": torch.empty(2, device="meta")}))
    assert "`far` is on the meta device" in problem


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_loads_it(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model: Any = MODELS["qwen2"]()[0]  # its head is its embedding
    save(tmp_path / "run", model.state_dict(), shard_bytes=4096, more=model.config.save_pretrained)
    again, info = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert again.lm_head.weight is again.model.embed_tokens.weight


# -- ties --------------------------------------------------------------------------------------------------------


def test_tied_names_are_stored_once_and_read_into_tied_and_untied_models(tmp_path: Path):
    model, _ = save_trained(tmp_path / "run")
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(11, 6))
    checkpoint = load(tmp_path / "run")
    assert checkpoint.weights["head.weight"] is checkpoint.weights["embed.weight"]
    checkpoint.read_weights(untied.state_dict())
    assert same(dict(untied.state_dict()), dict(model.state_dict()))
    parameters = Tied()
    checkpoint.read_weights({**dict(parameters.named_parameters()), **dict(parameters.named_buffers())})
    assert same(dict(parameters.state_dict()), dict(model.state_dict()))


def test_different_values_for_what_is_tied_here_are_refused(tmp_path: Path):
    untied = Tied()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach() + 1)
    save(tmp_path / "run", untied.state_dict())
    tied = Tied()
    before = {name: t.clone() for name, t in tied.state_dict().items()}
    text = refusal(lambda: load(tmp_path / "run").read_weights(tied.state_dict()))
    assert "tied: `head.weight` and `embed.weight` are one tensor here, but differ in the checkpoint" in text
    assert same(dict(tied.state_dict()), before)


# -- what doesn't fit --------------------------------------------------------------------------------------------


def test_all_weights_that_do_not_fit_are_in_one_error_and_none_is_read(tmp_path: Path):
    save(tmp_path / "run", {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)})
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(2).double(), "e": torch.zeros(1)}
    text = refusal(lambda: load(tmp_path / "run").read_weights({**tensors, "f": torch.empty(1, device="meta")}))
    assert text.split("\n")[0] == "the checkpoint doesn't fit these weights: 5 differences."
    file = "model-00001-of-00001.safetensors"
    for line in (
        "unexpected: `d` f32[2] in model-00001-of-00001.safetensors is not among the tensors given",
        f"shape: `b` f32[2] in {file}, but f32[3] here",
        f"dtype: `c` f32[2] in {file}, but f64[2] here",
        "missing: `e` f32[1] is not in the checkpoint",
        "missing: `f` f32[1] is not in the checkpoint",
    ):
        assert f"\n  {line}" in text
    assert not tensors["a"].any()


def test_all_of_an_optimizer_that_does_not_fit_is_in_one_error(tmp_path: Path):
    save_trained(tmp_path / "run")
    model = Tied()
    model.body = nn.Linear(6, 7)
    names = dict(model.named_parameters())
    del names["norm.bias"]
    optimizer = torch.optim.SGD([p for n, p in names.items() if n != "norm.weight"] + [model.norm.weight])
    names["other"] = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [names["other"]]})
    text = refusal(lambda: load(tmp_path / "run").read_optimizer(optimizer, names))
    for line in (
        "class: torch.optim.adamw.AdamW in the checkpoint, but torch.optim.sgd.SGD here",
        "missing: `other` f32[1] is not in the checkpoint's optimizer",
        "unexpected: `norm.bias` f32[6] is not in this optimizer",
        "parameter: `body.weight` f32[6, 6] in the checkpoint, but f32[7, 6] here",
        "group: `norm.weight` in group 1 of the checkpoint, but in group 0 here",
    ):
        assert f"\n  {line}" in text
    assert not optimizer.state


def test_all_that_can_not_be_stored_is_in_one_error(tmp_path: Path):
    save_trained(tmp_path / "run")
    weights = {"meta": torch.empty(2, device="meta"), "wide": torch.zeros(1, dtype=torch.complex128)}
    weights["sparse"] = torch.eye(2).to_sparse()
    weights["__metadata__"] = torch.ones(1)
    extra = {"model": Tied(), "deep": [{"x": (object(), math.pi)}], "text": b"bytes"}
    text = refusal(lambda: save(tmp_path / "run", weights, extra=extra))
    assert text.startswith("7 values can't be stored in a checkpoint.\n  `meta` is on the meta device")
    for name in ("`wide` is torch.complex128", "`sparse` is a", "`__metadata__`", "`model` is a", "`deep.0.x.0`"):
        assert f"\n  {name}" in text
    assert load(tmp_path / "run").extra == {"seed": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_parameters_without_a_name(tmp_path: Path):
    model, optimizer = trained()
    text = refusal(lambda: save(tmp_path / "run", model.state_dict(), optimizer=optimizer))
    assert text.startswith(
        "torch.optim.adamw.AdamW has 5 parameters without a name.\n  parameter 0 of group 0, f32[11, 6]"
    )
    names = {n: p for n, p in model.named_parameters() if n != "body.bias"}
    assert "parameter 2 of group 1, f32[6]" in refusal(
        lambda: save(tmp_path / "run", model.state_dict(), optimizer=optimizer, names=names)
    )
    assert list(tmp_path.iterdir()) == []


# -- places ------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_else_is_not_replaced(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("years of work")
    assert "exists and isn't a checkpoint" in refusal(lambda: save_trained(tmp_path / "run"))
    assert (tmp_path / "run/thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    assert "exists and isn't a checkpoint" in refusal(lambda: save_trained(tmp_path / "file"))
    assert "file` is a file, so" in refusal(lambda: save_trained(tmp_path / "file" / "deeper" / "run"))


def test_files_of_the_caller_are_checked_too_and_must_not_be_the_checkpoints(tmp_path: Path):
    save(tmp_path / "run", {"w": torch.ones(1)}, more=lambda folder: (folder / "notes.txt").write_text("a"))
    load(tmp_path / "run")
    (tmp_path / "run/notes.txt").write_text("b")
    assert "notes.txt` has content that differs from the saved one" in refusal(lambda: load(tmp_path / "run"))
    for name in ("checkpoint.json", "other.safetensors"):
        text = refusal(
            lambda name=name: save(tmp_path / "b", {"w": torch.ones(1)}, more=lambda f: (f / name).write_text(""))
        )
        assert text.startswith(f"more= wrote `{name}`")
    assert not (tmp_path / "b").exists()


# -- damage ------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_flipped_byte_is_found_and_its_tensor_named(tmp_path: Path):
    save(tmp_path / "run", {"first": torch.ones(2), "second": torch.ones(3)}, extra={"v": torch.ones(1), "n": 1.5})
    (file,) = (tmp_path / "run").glob("model-*.safetensors")
    records = load(tmp_path / "run").manifest.files[file.name].tensors
    for path in files_of(tmp_path / "run"):
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            text = refusal(lambda: load(tmp_path / "run").check())
            assert path.name in text
            inside = [n for n, r in records.items() if r.start <= at < r.start + r.spec.nbytes and path == file]
            assert all(f"`{name}`" in text for name in inside)
        path.write_bytes(content)
    load(tmp_path / "run").check()


def test_a_damaged_tensor_is_named_when_it_is_read(tmp_path: Path):
    save_trained(tmp_path / "run")
    file = tmp_path / "run/training/optimizer-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    model = Tied()
    checkpoint = load(tmp_path / "run")
    checkpoint.read_weights(model.state_dict())
    text = refusal(lambda: checkpoint.read_optimizer(adamw(model), dict(model.named_parameters())))
    last = max(
        checkpoint.manifest.files["training/optimizer-00001-of-00001.safetensors"].tensors.items(),
        key=lambda item: item[1].start,
    )[0]
    assert text.startswith(f"`{last}` in `{file}` is damaged: its bytes differ from the saved ones.")
    assert f"`{last}` in `{file}` is damaged" in refusal(checkpoint.check)


def test_what_is_no_checkpoint_and_another_schema(tmp_path: Path):
    assert "has no checkpoint.json" in refusal(lambda: load(tmp_path / "nowhere"))
    assert "has no checkpoint.json" in refusal(lambda: load(tmp_path))
    save(tmp_path / "run", {"w": torch.ones(1)})
    path = tmp_path / "run/checkpoint.json"
    whole = path.read_text()
    path.write_text(whole.replace('"schema":2', '"schema":7'))
    assert "has schema 7; this version of megatrain reads 2" in refusal(lambda: load(tmp_path / "run"))
    for text in ("", whole[:-5], "[]", "{}", whole.replace('"ties":{}', '"ties":{"v":"w"}')):
        path.write_text(text)
        assert refusal(lambda: load(tmp_path / "run")).startswith(f"`{path}` is damaged: ")


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(compile(code, "checkpoints.md", "exec"), found)
    assert found["checkpoint"].extra["step"] == 7
    files = {str(path.relative_to(tmp_path / "runs/first")) for path in (tmp_path / "runs").rglob("*.*")}
    names = ("model.safetensors", "model.safetensors.index.json", "training/extra.safetensors", "checkpoint.json")
    assert {re.sub(r"-\d{5}-of-\d{5}", "", name) for name in files} == set(names)
