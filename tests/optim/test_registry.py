"""The masters of a compiled model: which there are, what a user's write does to them, and how checkpoints keep them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import CheckpointError, ExecuteError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.fast.adamw import AdamWOptions, adamw_
from megatrain.optim.masters.halves import RoundedMaster, SplitMaster, WholeMaster, read_
from megatrain.saving import load, save
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


def test_fp32_parameters_are_their_own_masters():
    model = stack()
    model[0].bias.requires_grad_(False)
    model[2].double()
    compiled = megatrain.compile(model, device="cpu")
    masters = compiled.masters
    assert list(masters) == [model[0].weight, *model[4].parameters()]
    assert all(isinstance(master, WholeMaster) for master in masters.values())
    assert masters[model[0].weight].values.data_ptr() == model[0].weight.data_ptr()
    assert model[2].weight not in masters
    assert masters.get(nn.Parameter(torch.ones(3))) is None
    assert masters.sources() == {}
    assert repr(masters) == "Masters(whole, 3 parameters, 0 B of low halves)"


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


def test_a_model_and_its_masters_go_when_nobody_needs_them():
    compiled = narrow()
    compiled(X)
    low = weakref.ref(compiled.masters[compiled.megatrain.model[0].weight].low)
    model = weakref.ref(compiled.megatrain.model)
    del compiled
    gc.collect()
    assert model() is None
    assert low() is None


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


def test_a_parameter_put_in_anothers_place_begins_with_its_values():
    loop = trained()
    before = values_of(loop.compiled)
    loop.model[2].weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    for _ in range(2):
        after = values_of(loop.compiled)
        assert_same_bits(torch.ones(8, 8), after["2.weight"], "2.weight")
        assert_same_bits(before["0.weight"], after["0.weight"], "0.weight")
        loop.compiled(X)


def test_a_write_that_nobody_sees_counts_to_within_its_rounding():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    values[:4] = torch.tensor([1.0 - 2**-10, -1.0 + 2**-10, 3.4e38, -3.4e38])
    master = SplitMaster.of(values)
    assert master.low[:2].lt(0).any()
    written = torch.randn(64).bfloat16()
    written[:20] = torch.tensor([0.0, -0.0, 0.0, -0.0] * 5)
    written[20:22] = torch.tensor([torch.inf, -torch.inf])
    master.high.copy_(written)
    found = read_(torch.empty(64), master)
    assert not found.isnan().any()
    assert_same_bits(SplitMaster.of(found).high.abs(), written.abs(), "rounded")
    options = AdamWOptions(lr=0.0, weight_decay=0.0)
    adamw_(master, (torch.zeros(64), torch.zeros(64)), torch.zeros(64), step=1, options=options)
    assert_same_bits(found, read_(torch.empty(64), master), "after an update by nothing")


def test_a_master_can_be_set_by_itself():
    compiled = trained().compiled
    values = torch.randn(8, 8)
    assert compiled.masters.take(compiled.megatrain.model[2].weight, values)
    compiled(X)
    assert_same_bits(values, values_of(compiled)["2.weight"], "2.weight")
    assert not compiled.masters.take(compiled.megatrain.model[2].weight, values[:2])
    assert not compiled.masters.take(nn.Parameter(values), values)


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


def test_moments_in_another_memory_order_are_laid_out_anew():
    """As after a load: state is contiguous then, whatever the parameter is."""
    results = []
    for loads in (False, True):
        model = seeded(lambda: nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        compiled = narrow(model)
        optimizer = MAKERS["adamw"](list(model.parameters()))
        step = MasterStep(compiled.masters)
        x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
        for index in range(3):
            model.zero_grad()
            compiled(x).float().square().mean().backward()
            if loads and index:
                for state in optimizer.state.values():
                    state.update({key: value.contiguous() for key, value in state.items()})
                model.weight.grad = model.weight.grad.contiguous()
            step(optimizer)
        results.append((values_of(compiled)["weight"], optimizer.state[model.weight]["exp_avg"]))
        assert not model.weight.is_contiguous()
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other, "with moments that were loaded")
        assert one.stride() == other.stride()


# -- rounded masters -------------------------------------------------------------------------------------------------


def rounded(order: tuple[int, ...] = (0, 1, 2), seed: int = 0, optimizer: str = "adamw") -> Loop:
    torch.manual_seed(seed)
    compiled = narrow(masters="rounded")
    loop = Loop(compiled.megatrain.model, compiled, MAKERS[optimizer])
    for _ in range(3):
        loop.step((X,), {}, order)
    return loop


@pytest.mark.parametrize("optimizer", MAKERS)
def test_rounded_masters_hang_on_the_seed_and_on_no_order(optimizer: str):
    one, other, third = rounded((0, 1, 2), 0, optimizer), rounded((2, 1, 0), 0, optimizer), rounded(seed=1)
    for name, p in one.model.state_dict().items():
        assert_same_bits(p, other.model.state_dict()[name], name)
        assert p.dtype == torch.bfloat16
    assert any(not torch.equal(p, third.model.state_dict()[name]) for name, p in one.model.state_dict().items())
    assert all(isinstance(master, RoundedMaster) for master in one.compiled.masters.values())
    assert one.compiled.masters.low_bytes == 0


# -- checkpoints --------------------------------------------------------------------------------------------------


def save_loop(folder: Path, loop: Loop) -> None:
    names = dict(loop.model.named_parameters())
    state = loop.model.state_dict(keep_vars=True)
    save(folder, state, optimizer=loop.optimizer, names=names, tensors=loop.compiled.masters.sources())


def test_the_weights_of_a_checkpoint_are_bf16_for_any_reader(tmp_path: Path):
    loop = trained()
    save_loop(tmp_path / "run", loop)
    with torch.device("meta"):
        fresh = stack()
    again = narrow(fresh, weights=tmp_path / "run")
    assert torch.equal(again(X), loop.compiled(X))
    assert not any(bool(again.masters[p].low.any()) for p in fresh.parameters())
    again.masters.restore(load(tmp_path / "run").tensors)
    for name, values in values_of(loop.compiled).items():
        assert_same_bits(values, values_of(again)[name], name)


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
