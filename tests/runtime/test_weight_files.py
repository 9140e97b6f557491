"""Files of weights: their values in any dtype and layout, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.errors import OptionError
from megatrain.files import weight_files as checkpoint
from megatrain.files.weight_files import open_checkpoint
from tests.runtime.saved import Partial, gpt, on_meta, partial_on_meta, refusal, save, save_sharded, state_of

# -- values ------------------------------------------------------------------------------------------------------

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


# -- what doesn't fit --------------------------------------------------------------------------------------------


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
  A non-persistent buffer gets its values when its module is made; on meta it gets none.
  Outside torch.device("meta"), make these again and assign them to the model: `scale`.
  Or build the model with only its parameters on meta.""",
    )


@pytest.mark.usefixtures("headers_only")
def test_tied_names_are_listed(tmp_path: Path):
    state = state_of(gpt(), drop=("embed.weight", "head.weight"))
    assert_expected_inline(
        refusal_of(on_meta(), state, tmp_path),
        """\
the weights don't fit the model: 1 missing.
  files: `FOLDER/model.safetensors`
  missing: `embed.weight` (or `head.weight`) f32[32, 16]
  As with load_state_dict(strict=True), the files must hold every parameter and persistent buffer, and nothing else.
  Give the files of this model, or save these names with safetensors.torch.save_file.""",
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


@pytest.mark.usefixtures("headers_only")
def test_a_prefix_that_the_files_lack(tmp_path: Path):
    model = nn.ModuleDict({"base": partial_on_meta()})
    assert_expected_inline(
        refusal_of(model, state_of(Partial()), tmp_path).split("\n")[-1],
        """  All names exist without the prefix `base.`: compile the module `base` of this model itself.""",
    )


@pytest.mark.usefixtures("headers_only")
def test_names_that_no_prefix_explains(tmp_path: Path):
    state = {f"base.{name}": t for name, t in state_of(Partial()).items() if name != "unused"}
    assert_expected_inline(
        refusal_of(partial_on_meta(), state, tmp_path).split("\n")[-1],
        """  Give the files of this model, or save these names with safetensors.torch.save_file.""",
    )


def test_element_types_that_torch_lacks_are_refused(tmp_path: Path):
    file = tmp_path / "a.safetensors"
    header = json.dumps({"weight": {"dtype": "F8_E8M0", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    assert "dtype: `weight` F8_E8M0[2, 2] in a.safetensors, but f32[2, 2] in the model" in refusal(
        model, file, tmp_path
    )


def test_buffers_that_are_not_persistent_keep_their_values_and_are_not_expected(tmp_path: Path):
    model = partial_on_meta()
    state = {**state_of(Partial()), "scale": torch.zeros(4)}
    assert "unexpected: `scale` f32[4]" in refusal(model, save(tmp_path / "a.safetensors", state), tmp_path)


# -- files that can't be read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut off", "empty", "text", "header", "longer"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str):
    save_sharded(tmp_path, state_of(gpt()))
    file = tmp_path / "model-1.safetensors"
    content = file.read_bytes()
    damaged = {
        "cut off": content[:-10],
        "empty": b"",
        "text": b"this is no safetensors file",
        "header": content[:8] + b"[" + content[9:],
        "longer": content + b"more",
    }[damage]
    file.write_bytes(damaged)
    text = refusal(on_meta(), tmp_path, tmp_path)
    assert text.startswith("`FOLDER/model-1.safetensors` can't be read as safetensors: ")


def test_a_file_that_an_index_names_is_missing(tmp_path: Path):
    save_sharded(tmp_path, state_of(gpt()))
    (tmp_path / "model-2.safetensors").unlink()
    text = refusal(on_meta(), tmp_path, tmp_path)
    assert text.startswith("`FOLDER/model-2.safetensors` does not exist, but `model.safetensors.index.json` names it.")


@pytest.mark.parametrize("fault", ["missing", "elsewhere"])
def test_a_name_that_an_index_promises_is_missing(tmp_path: Path, fault: str):
    state = state_of(gpt())
    index = save_sharded(tmp_path, state)
    if fault == "missing":
        save(tmp_path / "model-0.safetensors", {"blocks.9.weight": torch.ones(1)})
    else:
        listed = json.loads(index.read_text())
        listed["weight_map"]["positions.weight"] = "model-0.safetensors"
        index.write_text(json.dumps(listed))
    name = {"missing": "embed.weight", "elsewhere": "positions.weight"}[fault]
    text = refusal(on_meta(), index, tmp_path)
    assert text.startswith(
        f"`FOLDER/model-0.safetensors` has no `{name}`, but `model.safetensors.index.json` says that it has."
    )


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


@pytest.mark.parametrize("weights", [5, [], {"a": "b"}])
def test_weights_that_are_no_path(weights: Any):
    with pytest.raises(OptionError, match=r"weights=.* is not a path"):
        megatrain.compile(on_meta(), device="cpu", weights=weights)
    with pytest.raises(OptionError, match=r"weights=\[5\] has item 0, 5, which is not a path but an int"):
        megatrain.compile(on_meta(), device="cpu", weights=[5])  # pyright: ignore[reportArgumentType]


def test_a_file_given_twice_is_read_once(tmp_path: Path):
    file = save(tmp_path / "a.safetensors", state_of(gpt()))
    assert len(open_checkpoint([file, file, tmp_path])) == len(state_of(gpt()))
