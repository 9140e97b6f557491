"""Masters in two halves: each bit comes back, and updates over them leave the bits of fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.base.native import native_kernel as native
from megatrain.errors import OptimizerError
from megatrain.optim.block_update import MasterStep
from megatrain.optim.blockwise import BlockOptimizer
from megatrain.optim.fast import ParameterUpdate
from megatrain.optim.fast.adamw import AdamWInOnePass, AdamWOptions, adamw_, native_reason
from megatrain.optim.masters.halves import CHUNK, Master, RoundedMaster, SplitMaster, WholeMaster, read_, write_
from megatrain.optim.norm import GradientNorm
from megatrain.optim.proxy import is_same
from tests.comparing import assert_same

LOW_BITS = (0, 1, 2, 3, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xABCD)


def every_upper_half() -> torch.Tensor:
    """All 2^16 upper halves with each of the sampled lower ones, as fp32."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = (upper[:, None] | torch.tensor(LOW_BITS)).flatten()
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def test_the_high_half_is_torchs_rounding_but_for_exact_ties():
    values = every_upper_half()
    high, torchs = SplitMaster.of(values).high, values.bfloat16()
    nan = values.isnan()
    assert torch.equal(high.isnan(), nan)
    is_tie_to_even = (bits(values) & 0x1FFFF) == 0x8000
    differs = (high.view(torch.int16) != torchs.view(torch.int16)) & ~nan
    assert torch.equal(differs, is_tie_to_even & ~nan)
    # A tie lies as far from one neighbour as from the other.
    ties = is_tie_to_even & ~nan & high.isfinite()
    exact = values[ties].double()
    assert torch.equal((high[ties].double() - exact).abs(), (torchs[ties].double() - exact).abs())


def test_stochastic_rounding_is_unbiased_and_seeded():
    value = torch.full((1 << 16,), 1.0 + 0.3 * 2**-7)  # 0.3 of the way between two neighbours
    results = []
    for _ in range(2):
        master = RoundedMaster(torch.empty(value.shape, dtype=torch.bfloat16), torch.Generator().manual_seed(5))
        write_(master, value)
        results.append(master.high)
    assert torch.equal(results[0], results[1])
    assert results[0].unique().tolist() == [1.0, 1.0 + 2**-7]
    share = float((results[0] > 1).float().mean())
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / value.numel()) ** 0.5


SHAPES = ((50, 30), (30,), (40, 40), (7,), (20, 10))
NORMS = (1, 3)  # stay fp32
BLOCKS = ((0, 1), (2, 3), (4,))
MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.0}], fused=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=1e-2),
}


def sides():
    """Makes fp32 parameters, the same as bf16 parameters, and the masters of these."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in SHAPES]
    narrow, masters = [], {}
    for index, p in enumerate(wide):
        if index in NORMS:
            narrow.append(torch.nn.Parameter(p.detach().clone()))
            if index == NORMS[0]:  # the other has no master at all
                masters[narrow[-1]] = WholeMaster(narrow[-1].detach())
            continue
        master = SplitMaster.of(p.detach())
        narrow.append(torch.nn.Parameter(master.high))
        masters[narrow[-1]] = master
    return wide, narrow, masters


def set_gradients(wide, narrow, gradients, generator: torch.Generator) -> None:
    for p, q in zip(wide, narrow, strict=True):
        p.grad = torch.randn(p.shape, generator=generator)
        if q.dtype == torch.bfloat16:
            gradients[q] = p.grad.clone()  # as in a slab: fp32, beside the bf16 parameter
        else:
            q.grad = p.grad.clone()


@pytest.mark.parametrize("name", MAKERS)
def test_clipped_steps_block_by_block_leave_the_bits_of_fp32(name: str):
    wide, narrow, masters = sides()
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    whole, parts = MAKERS[name](wide), MAKERS[name](narrow)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10) for o in (whole, parts)]
    code = MasterStep(masters, gradient_of=lambda p: gradients.get(p, p.grad))
    blocks = BlockOptimizer(parts, [[narrow[i] for i in block] for block in BLOCKS], code=code)
    norm, generator = GradientNorm(narrow), torch.Generator().manual_seed(1)
    for step in range(6):
        norm.begin()
        set_gradients(wide, narrow, gradients, generator)
        for index, block in enumerate(BLOCKS):
            norm.add(index, {narrow[i]: gradients.get(narrow[i], narrow[i].grad) for i in block})
        torch.nn.utils.clip_grad_norm_(wide, 0.1)
        code.scale = norm.coefficient(0.1).item()
        whole.step()
        blocks.begin()
        for block in ((2, 0, 1), (0, 1, 2))[step % 2]:
            blocks.update(block)
        blocks.finish()
        for schedule in schedules:
            schedule.step()
    for index, (p, q) in enumerate(zip(wide, narrow, strict=True)):
        assert is_same(whole.state.get(p), parts.state.get(q))
        assert torch.equal(read_(torch.empty(p.shape), masters[q]) if q in masters else q, p)
        if index not in NORMS:
            assert q.dtype == torch.bfloat16
            assert q.data_ptr() == masters[q].high.data_ptr()
            assert q.grad is None


def test_moments_that_were_narrowed_by_loading_are_refused():
    _, narrow, masters = sides()
    optimizer = torch.optim.AdamW(narrow)
    for p in narrow:
        p.grad = torch.ones_like(p)
    code = MasterStep(masters)
    code(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(OptimizerError, match="moments of a"):
        code(optimizer)


@pytest.fixture(params=["in C", "by torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by torch":
        monkeypatch.setattr("megatrain.optim.fast.adamw.native_reason", lambda: "no C compiler here")
    elif native_reason():
        pytest.skip(str(native_reason()))
    return request.param


def zeros(master: Master) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(master.shape), torch.zeros(master.shape)


def train(numel: int, steps: int = 6, *, kind=SplitMaster.of, coefficient: float = 1.0, **options):
    """Trains masters, and fp32 ones with torch's optimizer; returns both with their states."""
    generator = torch.Generator().manual_seed(numel)
    reference = torch.nn.Parameter(torch.randn(numel, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([reference], fused=True, **options)
    master = kind(reference.detach().clone())
    moments = zeros(master)
    for step in range(1, steps + 1):
        gradient = torch.randn(numel, generator=generator) * 10.0 ** (step % 3 - 3)
        reference.grad = gradient.clone().mul_(torch.tensor(coefficient))
        optimizer.step()
        kept = gradient.clone()
        group = AdamWOptions.of(optimizer.param_groups[0])
        adamw_(master, moments, gradient, step=step, options=group, scale=coefficient)
        assert torch.equal(gradient, kept)
    return master, moments, reference.detach(), optimizer.state[reference]


CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {"lr": 1e-3}),
    (7, {"lr": 3e-4, "betas": (0.3, 0.95), "eps": 1e-6, "weight_decay": 0.0}),
    (2 * CHUNK + 37, {"lr": torch.tensor(1e-2), "betas": (0.5, 0.5), "weight_decay": 0.1}),
    (1003, {"lr": 1e-2, "coefficient": 0.37, "maximize": True, "weight_decay": 0.3}),
]


@pytest.mark.parametrize("kind", [SplitMaster.of, WholeMaster], ids=["split", "whole"])
def test_every_kernel_has_torchs_bits_clipped_or_not(kind, kernel: str):
    for numel, options in CASES:
        master, moments, reference, state = train(numel, steps=4, kind=kind, **options)
        assert torch.equal(read_(torch.empty(numel), master), reference)
        assert torch.equal(moments[0], state["exp_avg"])
        assert torch.equal(moments[1], state["exp_avg_sq"])


def test_a_bf16_gradient_is_widened_first_and_one_that_is_not_finite_shows(kernel: str):
    gradient = torch.randn(1003).bfloat16()
    gradient[5], gradient[6] = torch.nan, torch.inf
    halves = [SplitMaster.of(torch.linspace(-1, 1, 1003)) for _ in range(2)]
    for master, given in zip(halves, (gradient, gradient.float()), strict=True):
        adamw_(master, zeros(master), given, step=1, options=AdamWOptions(1e-3), scale=0.3)
        assert master.high.isnan().nonzero().flatten().tolist() == [5, 6]
        assert read_(torch.empty(1003), master).isnan().nonzero().flatten().tolist() == [5, 6]
    for one, other in ((halves[0].high, halves[1].high), (halves[0].low, halves[1].low)):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_a_compiler_that_is_missing_or_fails_is_said_and_so_is_amsgrad(tmp_path):
    broken = tmp_path / "broken.c"
    assert "no C compiler" in str(native.build(broken, compilers=("no-such-compiler",)))
    broken.write_text("int main(")
    if not native_reason():
        assert "failed" in str(native.build(broken))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], amsgrad=True)
    with pytest.raises(OptimizerError, match="amsgrad"):
        AdamWOptions.of(optimizer.param_groups[0])


def _of_rest() -> ParameterUpdate:
    master = WholeMaster(torch.randn(17))
    return ParameterUpdate(master, torch.ones(17), zeros(master), (torch.tensor(2.0),), AdamWOptions(1e-3))


def test_one_call_for_several_parameters_has_the_bits_of_one_call_each():
    """Of masters of both kinds, gradients of both dtypes, and several threads; a rest of a lane isn't prepared."""
    generator = torch.Generator().manual_seed(7)
    sizes = (16, 32, 3 * (1 << 16) + 48, 0, 1 << 16, 160)
    sides: list[list[ParameterUpdate]] = [[], []]
    for number, size in enumerate(sizes):
        values, gradient = (torch.randn(size, generator=generator) for _ in range(2))
        options = AdamWOptions(1e-3 * (number + 1), weight_decay=0.1, maximize=number == 2)
        for side in sides:
            master = SplitMaster.of(values) if number % 2 else WholeMaster(values.clone())
            given = gradient.bfloat16() if number % 3 == 0 else gradient.clone()
            moments = zeros(master)
            side.append(ParameterUpdate(master, given, moments, (torch.tensor(2.0),), options, 0.5, threads=3))
    path = AdamWInOnePass()
    prepared = path.prepare(sides[0])
    assert prepared is not None
    assert path.prepare([*sides[0], _of_rest()]) is None
    for _ in range(3):
        prepared(*zip(*((each.gradient, each.options, each.scale) for each in sides[0]), strict=True))
        for each in sides[1]:
            path.update(each)
    for one, other in zip(*sides, strict=True):
        assert_same(
            (read_(torch.empty(one.master.shape), one.master), *one.moments, *one.numbers),
            (read_(torch.empty(other.master.shape), other.master), *other.moments, *other.numbers),
        )
