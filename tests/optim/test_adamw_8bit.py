"""AdamW8bit: codes and updates equal a reference of NumPy bit for bit, whoever computes them; errors are bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import megatrain
from megatrain.errors import CheckpointError, OptimizerError, ResumeWarning
from megatrain.optim.block_update import MasterStep
from megatrain.optim.fast import adamw_8bit
from megatrain.optim.fast.codes import CODES, GROUP, SCALES, coded_state, exact_state
from megatrain.optim.masters.halves import SplitMaster, WholeMaster, read_
from megatrain.optim.need import Updated, optimizer_need
from megatrain.tracer.spec import TensorSpec
from tests.comparing import assert_same
from tests.draws import draws

F = np.float32


class Reference:
    """One parameter, group by group, in NumPy: an operation rounds to fp32, as the module says them."""

    def __init__(self, values: torch.Tensor, options: dict[str, Any]) -> None:
        self.values, self.options, self.count = values.numpy().reshape(-1).copy(), options, 0
        groups = -(-len(self.values) // GROUP)
        self.mean, self.square = np.zeros(len(self.values), np.int8), np.zeros(len(self.values), np.uint8)
        self.mean_scales, self.root_scales = np.zeros(groups, F), np.zeros(groups, F)

    def step(self, gradient: torch.Tensor, scale: float) -> None:
        o, self.count = self.options, self.count + 1
        (beta1, beta2), lr, t = o["betas"], o["lr"], self.count
        correction, eps, size = F((1 - beta2**t) ** 0.5), F(o["eps"]), F(-lr / (1 - beta1**t))
        given = gradient.float().numpy().reshape(-1) * F(-scale if o["maximize"] else scale)
        for at in range(len(self.mean_scales)):
            own = slice(at * GROUP, (at + 1) * GROUP)
            g, code = given[own], self.mean[own].astype(F)
            mean = code * np.abs(code) * (self.mean_scales[at] * F(1 / 127**2))
            mean = mean + (g - mean) * F(1 - beta1)
            root = (self.square[own].astype(F) + F(0.5)) * (self.root_scales[at] * F(1 / 255.5))
            root = np.sqrt(root * root * F(beta2) + g * g * F(1 - beta2))
            self.values[own] = self.values[own] * F(1 - lr * o["weight_decay"]) + mean * (size * correction) / (
                root + eps * correction
            )
            self.mean[own], self.mean_scales[at] = self._signed(mean)
            self.square[own], self.root_scales[at] = self._unsigned(root)

    @staticmethod
    def _signed(mean: np.ndarray) -> tuple[Any, Any]:
        largest = np.abs(mean).max()
        if largest < F(2.0**-126):
            return 0, F(0)
        bits = np.uint32((int(largest.view(np.uint32)) + 0xFFFF) & 0xFFFF0000)
        scale = F(np.nan) if np.isnan(largest) else bits.view(F)
        if not np.isfinite(scale):
            return 0, scale
        return np.copysign(np.rint(np.sqrt(np.abs(mean) * (F(1) / scale)) * F(127)), mean), scale

    @staticmethod
    def _unsigned(root: np.ndarray) -> tuple[Any, Any]:
        scale = root.max()
        if scale == 0 or not np.isfinite(scale):
            return 0, scale
        return np.rint(root * (F(1) / scale * F(255.5)) - F(0.5)), scale


def assert_is(reference: Reference, values: torch.Tensor, state: dict[str, Any]) -> None:
    expected = [reference.values, reference.mean, reference.square, reference.mean_scales, reference.root_scales]
    for name, one, found in zip(("values", *CODES, *SCALES), expected, (values, *coded_state(state)), strict=True):
        np.testing.assert_array_equal(found.reshape(-1).to(torch.float32).numpy(), one.astype(F), name)


@st.composite
def updates(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "shape": draw(st.sampled_from([(1,), (31,), (32,), (5, 13), (64, 33), (96,)])),
        "kind": draw(st.sampled_from(["whole", "split", "eager"])),
        "native": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "exponents": draw(st.lists(st.integers(-44, 18), min_size=1, max_size=4)),
        "betas": (draw(st.sampled_from([0.9, 0.3, 0.0])), draw(st.sampled_from([0.999, 0.9]))),
        "scale": draw(st.sampled_from([1.0, 0.37])),
        "maximize": draw(st.booleans()),
        "odd": draw(st.sampled_from([None, None, None, float("inf"), float("nan"), 0.0])),
        "seed": draw(st.integers(0, 99)),
    }


@draws(400)
@given(it=updates())
def test_updates_are_the_references_whoever_computes_them(it: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(it["seed"])
    values = torch.randn(it["shape"], generator=generator)
    options = {"lr": 1e-2, "betas": it["betas"], "eps": 1e-8, "weight_decay": 0.1, "maximize": it["maximize"]}
    reference = Reference(values, options)
    parameter = nn.Parameter(values.clone() if it["kind"] != "split" else values.bfloat16())
    optimizer = megatrain.AdamW8bit([parameter], **options)
    master = SplitMaster.of(values) if it["kind"] == "split" else WholeMaster(parameter.detach())
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    step = MasterStep({parameter: master}, gradient_of=gradients.get)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if not it["native"]:
            patch.setattr(adamw_8bit, "native_reason", lambda: "there is no compiler")
        for exponent in it["exponents"]:
            gradient = torch.randn(it["shape"], generator=generator) * 10.0**exponent
            if it["odd"] is not None and exponent == it["exponents"][-1]:
                gradient.view(-1)[0] = it["odd"]
            gradient = gradient.to(it["dtype"])
            if it["kind"] == "eager":
                parameter.grad = gradient.float() * it["scale"]
                optimizer.step()
            else:
                gradients[parameter], step.scale = gradient, it["scale"]
                step(optimizer)
            reference.step(gradient, it["scale"])
    if it["kind"] == "split":  # a NaN becomes a quiet one in halves: compared as NaN
        assert_is(reference, read_(torch.empty(it["shape"]), master), optimizer.state[parameter])
    else:
        assert_is(reference, parameter.detach(), optimizer.state[parameter])


def test_both_ways_are_tried_here() -> None:
    """A function in C whose bits differ from those of torch's operations isn't used."""
    assert adamw_8bit.native_reason() is None


def test_exact_moments_are_encoded_and_come_back_as_torch_has_them() -> None:
    parameter = nn.Parameter(torch.randn(7, 9))
    exact, coded = torch.optim.AdamW([parameter], lr=0.1), megatrain.AdamW8bit([parameter], lr=0.2)
    for number in range(3):
        parameter.grad = torch.randn(7, 9, generator=torch.Generator().manual_seed(number))
        exact.step()
    coded.load_state_dict(exact.state_dict())
    state, before = coded.state[parameter], exact.state[parameter]
    assert {name: value.dtype for name, value in state.items() if name != "step"} == CODES | SCALES
    assert state["step"] == 3
    assert coded.param_groups[0]["lr"] == 0.1
    back = exact_state(state)
    assert back.keys() == before.keys()
    assert (back["exp_avg"] - before["exp_avg"]).abs().max() < 0.01 * before["exp_avg"].abs().max()
    again = megatrain.AdamW8bit([parameter])
    again.register_load_state_dict_pre_hook(lambda _, given: {**given, "state": {0: {**given["state"][0], "seen": 1}}})
    again.load_state_dict(coded.state_dict())
    assert_same(dict(again.state[parameter]), {**state, "seen": 1}, "loaded, as a hook of the user's has left it")
    with pytest.raises(OptimizerError, match="has no `exp_avg_codes`"):
        coded.load_state_dict({**coded.state_dict(), "state": {0: {"step": state["step"]}}})


def test_what_has_no_codes_is_refused_with_the_way_out() -> None:
    parameter = nn.Parameter(torch.randn(4, 6, 2, 2).to(memory_format=torch.channels_last))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(OptimizerError, match="isn't contiguous"):
        megatrain.AdamW8bit([parameter]).step()
    for dtype in (torch.float64, torch.complex64):
        other = nn.Parameter(torch.ones(4, dtype=dtype))
        other.grad = torch.ones_like(other)
        with pytest.raises(OptimizerError, match=rf"parameter is {dtype}"):
            megatrain.AdamW8bit([other]).step()
    table = nn.Embedding(4, 8, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"the gradient of a \(4, 8\) parameter is torch.sparse_coo"):
        megatrain.AdamW8bit(table.parameters()).step()
    plain = nn.Parameter(torch.ones(64))
    optimizer = megatrain.AdamW8bit([plain])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OptimizerError, match="has no amsgrad=True"):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    step = MasterStep({plain: WholeMaster(plain.detach())}, gradient_of=lambda _: torch.ones(64))
    step(optimizer)
    optimizer.state[plain]["exp_avg_scales"] = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(OptimizerError, match=r"`exp_avg_scales` of a \(64,\) parameter"):
        step(optimizer)


def test_it_takes_six_bytes_and_a_fifth() -> None:
    parameter = nn.Parameter(torch.zeros(3200, dtype=torch.bfloat16))
    blocks = [[Updated(parameter, TensorSpec((3200,), torch.float32), SplitMaster)]]
    need = optimizer_need(megatrain.AdamW8bit([parameter]), blocks)
    assert sum(need.state.values()) - 4 == 3200 * (2 + 6 / GROUP)


def trained(kind: type[torch.optim.AdamW], steps: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))
    compiled = megatrain.compile(model, precision="bf16")
    optimizer = kind(model.parameters(), lr=1e-2)
    step = megatrain.TrainStep(compiled, optimizer, loss=_loss)
    for number in range(steps):
        step(batch(number))
    return compiled, optimizer, step


def _loss(result: torch.Tensor, _: Any) -> torch.Tensor:
    return result.float().square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


def test_a_checkpoint_goes_on_to_the_bit_and_exact_moments_are_told(tmp_path: Path) -> None:
    for kind, name in ((megatrain.AdamW8bit, "coded"), (torch.optim.AdamW, "exact")):
        compiled, optimizer, step = trained(kind, 3)
        step.save(tmp_path / name)
        step(batch(3))
        here, theirs, _ = trained(kind, 0)
        again = megatrain.TrainStep.load(tmp_path / name, here, theirs, loss=_loss)
        again(batch(3))
        for one, other in zip(compiled.parameters(), here.parameters(), strict=True):
            assert_same(one.detach(), other.detach(), "parameter")
            assert_same(dict(optimizer.state[one]), dict(theirs.state[other]), "state")
    for kind, name, says in (
        (megatrain.AdamW8bit, "exact", "its moments are rounded to 8 bits"),
        (torch.optim.AdamW, "coded", "its moments are decoded to fp32"),
    ):
        compiled, optimizer, _ = trained(kind, 0)
        with pytest.warns(ResumeWarning, match=says):
            step = megatrain.TrainStep.load(tmp_path / name, compiled, optimizer, loss=_loss)
        step(batch(3))
        states = {name for p in compiled.parameters() for name in optimizer.state[p]}
        assert states == {"step", *(CODES | SCALES if kind is megatrain.AdamW8bit else ("exp_avg", "exp_avg_sq"))}
    compiled, _, _ = trained(megatrain.AdamW8bit, 0)
    with pytest.raises(
        CheckpointError, match=r"class: megatrain\.AdamW8bit in the checkpoint, but torch\.optim\.adam\.Adam "
    ):
        megatrain.TrainStep.load(tmp_path / "coded", compiled, torch.optim.Adam(compiled.parameters()), loss=_loss)
