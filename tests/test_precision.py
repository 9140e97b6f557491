"""precision="bf16": training equals fp32 masters with bf16 compute, bit for bit."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import megatrain
from megatrain.errors import ExecuteError, OptionError, TraceError, WeightsError
from megatrain.files import save
from tests.comparing import assert_same_bits
from tests.models import MODELS, Gpt
from tests.optim.reference import MAKERS, Loop, Reference, assert_same_training, values_of
from tests.runtime.parity import seeded

ROOT = Path(__file__).parent.parent
OPTIONS: dict[str, dict[str, Any]] = {
    "bind": {},
    "budget": {"memory": "48KiB"},
    "offload": {"transfer": "copy", "activations": "offload", "block_bytes": 1},
}


def with_own_norms() -> Any:
    """A GPT whose user made it bf16, but for its norms."""
    model, args, kwargs = MODELS["gpt_loss"]()
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    return model, args, kwargs


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def channels_last() -> Any:
    """Weights that lie in memory in another order than that of their dimensions."""
    model = seeded(Convolutions).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model, (torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)),), {}


STEPS = 4

CASES = {
    "gpt": MODELS["gpt_loss"],  # its head is tied to its embedding
    "own norms": with_own_norms,
    "channels last": channels_last,
}


def small_gpt() -> Any:
    model = seeded(Gpt)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    return model, (ids, ids.roll(-1, 1))


# -- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how", "optimizer"),
    [
        ("gpt", "budget", "adamw"),
        ("own norms", "offload", "sgd"),
        ("channels last", "bind", "sgd"),
    ],
)
def test_many_steps_leave_the_bits_of_fp32_masters_with_bf16_compute(name: str, how: str, optimizer: str):
    model, args, kwargs = CASES[name]()
    reference = Reference(model, MAKERS[optimizer])
    compiled = megatrain.compile(model, device="cpu", precision="bf16", **OPTIONS[how])
    loop = Loop(model, compiled, MAKERS[optimizer])
    torch.manual_seed(7)
    expected = [reference.step(args, kwargs) for _ in range(STEPS)]
    end = torch.get_rng_state()
    torch.manual_seed(7)
    assert [loop.step(args, kwargs) for _ in range(STEPS)] == expected
    assert torch.equal(end, torch.get_rng_state())
    assert_same_training(reference, loop)
    lows = [compiled.masters[p].low for p in model.parameters() if p.dtype == torch.bfloat16 and p.requires_grad]
    assert lows
    assert all(bool(low.any()) for low in lows)


# -- what becomes of the model ---------------------------------------------------------------------------------------


def test_parameters_stay_the_same_objects_and_buffers_their_dtype():
    model, _, kwargs = MODELS["llama"]()
    next(model.parameters()).requires_grad_(False)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    dtypes = {name: b.dtype for name, b in model.named_buffers()}
    compiled = megatrain.compile(model, device="cpu", precision="bf16")
    compiled(**kwargs)
    assert dtypes
    assert {name: b.dtype for name, b in model.named_buffers()} == dtypes
    masters = values_of(compiled)
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert p.dtype == torch.bfloat16
        if p.requires_grad:
            assert_same_bits(before[name][1], masters[name], name)
        else:  # what is not trained has no low half
            assert_same_bits(before[name][1].bfloat16(), p, name)
            assert p not in compiled.masters
    assert compiled.masters.low_bytes == sum(2 * p.numel() for p in model.parameters() if p.requires_grad)


def test_a_module_that_needs_fp32_parameters_is_named_and_may_keep_them():
    model, args, kwargs = MODELS["cnn"]()
    with pytest.raises(RuntimeError, match="expected scalar type") as caught:
        megatrain.compile(copy.deepcopy(model), device="cpu", precision="bf16")(*args)
    assert "as BatchNorm does" in caught.value.__notes__[0]
    for module in model.modules():
        for p in () if isinstance(module, nn.BatchNorm2d) else module.parameters(recurse=False):
            p.data = p.data.bfloat16()
    args = tuple(a.bfloat16() for a in args)
    reference = Reference(model, MAKERS["sgd"])
    loop = Loop(model, megatrain.compile(model, device="cpu", precision="bf16"), MAKERS["sgd"])
    for _ in range(3):
        assert reference.step(args, kwargs) == loop.step(args, kwargs)
    assert_same_training(reference, loop)


# -- inputs --------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y=None, index=None):
        assert x.dtype == self.layer.weight.dtype
        out = self.layer(x)
        out = out if y is None else out + y
        return out if index is None else out[index]


def test_fp32_inputs_are_cast_and_get_fp32_gradients():
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(3, 4, dtype=torch.float64)
    model = Plain()
    compiled = megatrain.compile(model, device="cpu", precision="bf16")
    result = compiled(x, y=y, index=torch.tensor([0, 2]))
    assert result.dtype == torch.float64  # y is none of fp32, and stays
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    expected = torch.ones(2, 4).bfloat16() @ model.layer.weight.detach()
    assert_same_bits(expected.float(), x.grad[[0, 2]], "gradient of x")
    assert compiled(x, x).dtype == torch.bfloat16


# -- files ---------------------------------------------------------------------------------------------------------


def meta_gpt() -> Gpt:
    with torch.device("meta"):
        return Gpt()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_files_give_a_model_on_meta_exact_masters(tmp_path: Path, stored: torch.dtype):
    reference, args = small_gpt()
    state = {name: t.to(stored) for name, t in reference.state_dict().items()}  # both of the tied names
    save_file({name: t.clone() for name, t in state.items()}, tmp_path / "a.safetensors")
    model = meta_gpt()
    model.positions.weight.requires_grad_(False)
    compiled = megatrain.compile(model, device="cpu", precision="bf16", weights=tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    compiled(*args)
    masters = values_of(compiled)
    for name, values in masters.items():
        assert_same_bits(state[name].float(), values, name)
    assert_same_bits(state["positions.weight"].bfloat16(), model.positions.weight, "positions")
    assert masters.keys() == dict(model.named_parameters()).keys() - {"positions.weight"}
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


# -- state dicts -----------------------------------------------------------------------------------------------------


def test_an_fp32_state_dict_sets_masters_exactly():
    model, args = small_gpt()
    compiled = megatrain.compile(model, device="cpu", precision="bf16")
    for seed, is_running in ((5, False), (6, True)):
        other = seeded(lambda seed=seed: (torch.manual_seed(seed), Gpt())[1])
        assert not compiled.load_state_dict(other.state_dict()).missing_keys
        if is_running:
            compiled(*args)
        for name, values in values_of(compiled).items():
            assert_same_bits(other.state_dict()[name], values, name)
    assert {t.dtype for t in compiled.state_dict().values()} == {torch.bfloat16}
    compiled.load_state_dict(compiled.state_dict())
    assert not any(bool(compiled.masters[p].low.any()) for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"Missing key.*norm.weight"):
        compiled.load_state_dict({n: t for n, t in other.state_dict().items() if n != "norm.weight"})


def test_the_state_dict_of_masters_is_fp32_and_goes_to_files(tmp_path: Path):
    model, args = small_gpt()
    model.positions.weight.requires_grad_(False)
    start = {name: t.detach().clone() for name, t in model.state_dict().items()}
    start["positions.weight"] = start["positions.weight"].bfloat16().float()
    compiled = megatrain.compile(model, device="cpu", precision="bf16")
    compiled(*args)
    sources = compiled.master_state_dict()
    assert list(sources) == list(start)
    save(tmp_path / "run", sources)
    (file,) = (tmp_path / "run").glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == start.keys() - {"head.weight"}
    for name, values in found.items():
        assert_same_bits(start[name], values, name)
    other = Gpt()
    megatrain.compile(other, device="cpu", precision="fp32", weights=tmp_path / "run")(*args)
    assert_same_bits(start["norm.weight"], other.norm.weight, "norm.weight")


# -- errors ----------------------------------------------------------------------------------------------------------


def test_parameters_of_other_dtypes_are_refused_before_anything_changes():
    dtype = torch.float16
    model = Plain()
    model.register_parameter("extra", nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False))
    model.register_parameter("more", nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False))
    with pytest.raises(OptionError, match=r"`extra` \w+\[3\] is neither fp32 nor bf16, nor are 1 others"):
        megatrain.compile(model, device="cpu", precision="bf16")
    assert model.layer.weight.dtype == torch.float32


def test_other_refusals_leave_the_model_as_it_is(tmp_path: Path):
    model = Plain()
    for options, kind, message in [
        ({"masters": "rounded"}, OptionError, 'masters="rounded" needs precision="bf16"'),
        ({"masters": "half", "precision": "bf16"}, OptionError, "masters='half' is not known"),
        ({"weights": tmp_path / "none", "precision": "bf16"}, WeightsError, "does not exist"),
    ]:
        with pytest.raises(kind, match=message):
            megatrain.compile(model, device="cpu", **options)
    model.register_buffer("view", model.layer.weight.detach()[0])
    with pytest.raises(ExecuteError, match=r"`view` and `layer.weight` share memory"):
        megatrain.compile(model, device="cpu", precision="bf16")
    with pytest.raises(TraceError, match="not initialized yet"):
        megatrain.compile(nn.Sequential(nn.LazyLinear(3)), device="cpu", precision="bf16")
    assert model.layer.weight.dtype == torch.float32


# -- verify, and the page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_loss", "input_requires_grad"])
def test_verify_compares_with_a_bf16_copy_and_leaves_the_model_alone(name: str):
    model, args, kwargs = MODELS[name]()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = megatrain.verify(
        model, *args, device="cpu", memory="1MiB", tolerance=0.0, compile_options={"precision": "bf16"}, **kwargs
    )
    assert report.ok, report
    for n, p in model.named_parameters():
        assert_same_bits(before[n], p, n)


def test_the_page_on_precision_does_what_it_says():
    page = (ROOT / "docs" / "precision.md").read_text()
    found: dict[str, Any] = {"F": F}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(compile(code, "precision.md", "exec"), found)
    assert found["model"][0][0].weight.dtype == torch.bfloat16
