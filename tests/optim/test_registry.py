"""The masters of a compiled model: which there are, what a user's write does to them, and how checkpoints keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import CheckpointError, ExecuteError
from megatrain.files import load, save
from tests.comparing import assert_same_bits
from tests.optim.reference import MAKERS, Loop, values_of
from tests.runtime.parity import seeded

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def stack(dtype: torch.dtype = torch.float32) -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))).to(
        dtype
    )


def narrow(model: nn.Module | None = None, **options: Any) -> megatrain.CompiledModule:
    return megatrain.compile(model or stack(), device="cpu", precision="bf16", **options)


def trained(steps: int = 2, **options: Any) -> Loop:
    compiled = narrow(**options)
    loop = Loop(compiled.megatrain.model, compiled, MAKERS["adamw"])
    for _ in range(steps):
        loop.step((X,), {})
    return loop


# -- which there are ---------------------------------------------------------------------------------------------


def test_which_parameters_have_masters_hangs_on_what_is_trained_now():
    compiled = narrow()
    weight, bias = compiled.megatrain.model[0].weight, compiled.megatrain.model[0].bias
    start = values_of(compiled)
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    assert len(compiled.masters) == 6  # what they have learnt is kept
    bias.detach().add_(1)
    compiled(X)
    assert_same_bits(bias.detach().float(), values_of(compiled)["0.bias"], "0.bias")
    weight.requires_grad_(True)
    assert_same_bits(start["0.weight"], values_of(compiled)["0.weight"], "0.weight")
    model = stack()
    model[0].requires_grad_(False)
    compiled = narrow(model)
    assert len(compiled.masters) == 4
    model[0].weight.requires_grad_(True)
    assert_same_bits(model[0].weight.detach().float(), values_of(compiled)["0.weight"], "trained from now on")


# -- what the user writes -----------------------------------------------------------------------------------------


def copy_in(p: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        p.copy_(values)


def replace_memory(p: torch.Tensor, values: torch.Tensor) -> None:
    p.data = values


@pytest.mark.parametrize(("write", "calls"), [(copy_in, 1), (replace_memory, 0), (replace_memory, 1)])
def test_what_the_user_writes_is_the_master(write, calls: int):
    compiled = trained().compiled
    before = values_of(compiled)
    weight = compiled.megatrain.model[2].weight
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(9)).bfloat16()
    write(weight, values.clone())
    for _ in range(calls):
        compiled(X)
    after = values_of(compiled)
    assert_same_bits(values.float(), after.pop("2.weight"), "what was written")
    for name, expected in after.items():
        assert_same_bits(before[name], expected, name)


# -- updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", MAKERS)
def test_others_see_an_update(optimizer: str):
    compiled = narrow()
    loop = Loop(compiled.megatrain.model, compiled, MAKERS[optimizer])
    result = compiled(X)
    compiled(X).float().square().mean().backward()
    versions = {p: p._version for p in loop.model.parameters()}
    loop.update()
    assert all(p._version > version for p, version in versions.items())
    with pytest.raises(ExecuteError, match=r"was modified between forward and backward"):
        result.sum().backward()


# -- rounded masters -------------------------------------------------------------------------------------------------


def rounded(order: tuple[int, ...] = (0, 1, 2), seed: int = 0, optimizer: str = "adamw") -> Loop:
    torch.manual_seed(seed)
    compiled = narrow(masters="rounded")
    loop = Loop(compiled.megatrain.model, compiled, MAKERS[optimizer])
    for _ in range(3):
        loop.step((X,), {}, order)
    return loop


# -- checkpoints --------------------------------------------------------------------------------------------------


def save_loop(folder: Path, loop: Loop) -> None:
    names = dict(loop.model.named_parameters())
    state = loop.model.state_dict(keep_vars=True)
    save(folder, state, optimizer=loop.optimizer, names=names, tensors=loop.compiled.masters.sources())


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path):
    loop = trained()
    save_loop(tmp_path / "run", loop)
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 3))
    other[2].requires_grad_(False)
    compiled = narrow(other)
    before = values_of(compiled)
    with pytest.raises(CheckpointError) as caught:
        compiled.masters.restore(load(tmp_path / "run").tensors)
    assert str(caught.value).split("\n  ") == [
        "the checkpoint doesn't fit these masters: 6 differences.",
        "differs: `4.bias.low` i16[4] in tensors-00001-of-00001.safetensors, but i16[3] here",
        "differs: `4.weight.low` i16[4, 8] in tensors-00001-of-00001.safetensors, but i16[3, 8] here",
        "missing: `5.bias.low` i16[3] is not in the checkpoint",
        "missing: `5.weight.low` i16[3, 3] is not in the checkpoint",
        "unexpected: `2.bias.low` i16[8] in tensors-00001-of-00001.safetensors belongs to no master",
        "unexpected: `2.weight.low` i16[8, 8] in tensors-00001-of-00001.safetensors belongs to no master",
        "Each trainable bf16 parameter has a low half, or with masters='rounded' a generator.",
        "Compile the model with the saved precision and masters, and with the same parameters frozen.",
    ]
    for name, values in values_of(compiled).items():
        assert_same_bits(before[name], values, name)
