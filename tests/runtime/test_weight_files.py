"""Files of weights: their values in any dtype and layout, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.files import weight_files as checkpoint
from tests.runtime.saved import Partial, gpt, on_meta, partial_on_meta, refusal, save, save_sharded, state_of

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Bag(nn.Module):
    """One parameter or buffer, of any spec."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if tensor.is_floating_point():
            self.tensor = nn.Parameter(tensor)
        else:
            self.register_buffer("tensor", tensor)

    def forward(self, x):
        return self.linear(x) + self.tensor.sum().to(x.dtype)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    order=st.randoms(use_true_random=False),
    dtypes=st.one_of(
        st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
        st.sampled_from([torch.bool, torch.int8, torch.int64, torch.uint8]).map(lambda d: (d, d)),
    ),
    piece_bytes=st.sampled_from([8, 64, 4096]),
)
def test_values_are_those_of_load_state_dict(tmp_path_factory, shape, order, dtypes, piece_bytes):
    stored, wanted = dtypes
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(stored)
    dims = list(range(len(shape)))
    order.shuffle(dims)
    strides = torch.empty([shape[d] for d in dims]).permute([dims.index(d) for d in range(len(dims))]).stride()
    file = tmp_path_factory.mktemp("values") / "a.safetensors"
    ordinary = Bag(torch.empty_strided(shape, strides, dtype=wanted))
    bag = Bag(torch.empty_strided(shape, strides, dtype=wanted, device="meta"))
    state = {**ordinary.state_dict(), "tensor": values}
    ordinary.load_state_dict(state)
    save(file, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "PIECE_BYTES", piece_bytes)
        compiled = megatrain.compile(bag, device="cpu", example_args=(torch.ones(1, 2),), weights=file)
        compiled.load_weights()
    assert bag.tensor.dtype == wanted
    assert torch.equal(bag.tensor.nan_to_num(7), ordinary.tensor.nan_to_num(7))
    if bag.tensor.numel():
        # The stride of a dimension of size 1 means nothing.
        assert all(a == b for n, a, b in zip(shape, bag.tensor.stride(), strides, strict=True) if n > 1)


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No refusal may need more than headers, or memory for the state."""
    monkeypatch.setattr(checkpoint.Stored, "_fill", None)
    monkeypatch.setattr("megatrain.runtime.stores.host_store.HostArena", None)


def refusal_of(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> str:
    return refusal(model, save(folder / "model.safetensors", state), folder)


@pytest.mark.usefixtures("headers_only")
def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path):
    with torch.device("meta"):
        model = Partial()
    state = state_of(Partial(), drop=("first.weight", "norm.num_batches_tracked"))
    state |= {"extra": torch.ones(2), "second.bias": torch.ones(5), "norm.num_batches_tracked": torch.tensor(1.0)}
    assert_expected_inline(
        refusal_of(model, state, tmp_path),
        """\
the weights don't fit the model: 1 missing, 1 unexpected, 1 of another shape, 1 of another dtype, 1 without values.
  files: `FOLDER/model.safetensors`
  missing: `first.weight` f32[4, 4]
  unexpected: `extra` f32[2] in model.safetensors
  shape: `second.bias` f32[5] in model.safetensors, but f32[4] in the model
  dtype: `norm.num_batches_tracked` f32[] in model.safetensors, but i64[] in the model; only floats convert
  without values: `scale` is on meta and no file is expected to hold it
  As with load_state_dict(strict=True), the files must hold every parameter and persistent buffer, and nothing else.
  Give the files of this model, or save these names with safetensors.torch.save_file.
  Adapters and non-persistent buffers get values when their module is made; on meta they get none.
  Outside torch.device("meta"), make these again and assign them to the model: `scale`.
  Or build the model with only its parameters on meta.""",
    )


@pytest.mark.usefixtures("headers_only")
def test_a_prefix_that_the_model_lacks(tmp_path: Path):
    state = {f"base.{name}": t for name, t in state_of(Partial()).items()}
    text = refusal_of(partial_on_meta(), {**state, "head.weight": torch.ones(2)}, tmp_path)
    assert_expected_inline(
        "\n".join([text.split("\n")[0], text.split("\n")[-1]]),
        """\
the weights don't fit the model: 10 missing, 11 unexpected.
  All names exist with the prefix `base.`: compile a module that holds this one as `base`.""",
    )


def test_a_damaged_file_is_named(tmp_path: Path):
    save_sharded(tmp_path, state_of(gpt()))
    file = tmp_path / "model-1.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-10], b"", b"this is no safetensors file", whole[:8] + b"[" + whole[9:], whole + b"more"):
        file.write_bytes(damaged)
        text = refusal(on_meta(), tmp_path, tmp_path)
        assert text.startswith("`FOLDER/model-1.safetensors` can't be read as safetensors: ")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda f: f / "nowhere", "`FOLDER/nowhere` does not exist."),
        (lambda f: f, "`FOLDER` has no *.safetensors in it."),
        (lambda f: (f / "x.safetensors.index.json").write_text("{}") and f, "index.json` isn't an index"),
        (lambda f: (f / "x.safetensors.index.json").write_text("[") and f, "index.json` isn't an index"),
        (
            lambda f: [(f / f"{x}.safetensors.index.json").write_text("{}") for x in "ab"] and f,
            "`FOLDER` has several indexes: `a.safetensors.index.json`, `b.safetensors.index.json`.",
        ),
        (
            lambda f: [save(f / f"{x}.safetensors", {"w": torch.ones(1)}) for x in "ab"],
            "`w` is in `FOLDER/a.safetensors` and in `FOLDER/b.safetensors`.",
        ),
    ],
)
def test_files_that_are_not_there_or_ambiguous(tmp_path: Path, build, message: str):
    weights = build(tmp_path)
    assert message in refusal(on_meta(), weights, tmp_path).split("\n")[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "w"
    folder.mkdir()
    save_sharded(folder, state_of(gpt()))
    return folder


@pytest.mark.parametrize("way", ["../w/{}", "/{}", "{}/"])
def test_an_index_leads_nowhere_out_of_its_folder(tmp_path: Path, way: str):
    save_sharded(tmp_path, state_of(gpt()))
    (index,) = tmp_path.glob("*.safetensors.index.json")
    listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {name: f"{tmp_path}/{file}" if way == "/{}" else way.format(file) for name, file in listed.items()}
    index.write_text(json.dumps({"weight_map": files}))
    text = refusal(on_meta(), tmp_path, tmp_path)
    assert "not the name of a file in this folder" in text
    assert '\n  An index is JSON that maps each name to a file in its own folder, under "weight_map".' in text
