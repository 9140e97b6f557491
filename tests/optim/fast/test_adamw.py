"""AdamW over split masters has the bits of torch.optim.AdamW over fp32 masters."""

from typing import Any

import pytest
import torch

from megatrain.errors import OptimizerError
from megatrain.native import native_kernel as native
from megatrain.optim.fast.adamw import AdamWOptions, Kernel, Moments, adamw_, native_reason
from megatrain.optim.masters.halves import CHUNK, RoundedMaster, SplitMaster, WholeMaster, read_

NUMELS = (0, 1, 7, 16, 1000, 2 * CHUNK + 37)
KERNELS = ("plain", "fused", "native", "auto")


def needs(kernel: Kernel) -> None:
    if kernel == "native" and native_reason():
        pytest.skip(str(native_reason()))


def train(kernel: Kernel, numel: int, steps: int = 6, *, kind=SplitMaster.of, coefficient: float = 1.0, **options):
    """Trains masters, and fp32 ones with torch's optimizer; returns both with their states."""
    generator = torch.Generator().manual_seed(numel)
    reference = torch.nn.Parameter(torch.randn(numel, generator=generator) * 0.02)
    fused = kernel != "plain"
    optimizer = torch.optim.AdamW([reference], foreach=None if fused else False, fused=fused, **options)
    master = kind(reference.detach().clone())
    moments = Moments.zeros(master)
    for step in range(1, steps + 1):
        gradient = torch.randn(numel, generator=generator) * 10.0 ** (step % 3 - 3)
        reference.grad = gradient.clone().mul_(torch.tensor(coefficient))
        optimizer.step()
        kept = gradient.clone()
        group = AdamWOptions.of(optimizer.param_groups[0])
        adamw_(master, moments, gradient, step=step, options=group, scale=coefficient, kernel=kernel)
        assert torch.equal(gradient, kept)
    return master, moments, reference.detach(), optimizer.state[reference]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [SplitMaster.of, WholeMaster], ids=["split", "whole"])
def test_every_kernel_has_torchs_bits(kind, kernel: Kernel, numel: int):
    needs(kernel)
    master, moments, reference, state = train(kernel, numel, kind=kind, lr=1e-3, weight_decay=0.1)
    assert torch.equal(read_(torch.empty(numel), master), reference)
    assert torch.equal(moments.exp_avg, state["exp_avg"])
    assert torch.equal(moments.exp_avg_sq, state["exp_avg_sq"])


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 3e-4, "betas": (0.3, 0.95), "eps": 1e-6, "weight_decay": 0.0},
        {"lr": torch.tensor(1e-2), "betas": (0.5, 0.5)},
        {"lr": 1e-2, "maximize": True, "weight_decay": 0.3},
        {"lr": 1e-2, "coefficient": 0.37},
        {"lr": 1e-2, "coefficient": 0.37, "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [SplitMaster.of, WholeMaster], ids=["split", "whole"])
def test_options_and_clipping_have_torchs_bits(kind, kernel: Kernel, options: dict[str, Any]):
    needs(kernel)
    master, _, reference, _ = train(kernel, 1003, kind=kind, **options)
    assert torch.equal(read_(torch.empty(1003), master), reference)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bf16_gradient_is_widened_first(kernel: Kernel):
    needs(kernel)
    gradient = torch.randn(1003).bfloat16()
    halves = [SplitMaster.of(torch.linspace(-1, 1, 1003)) for _ in range(2)]
    for master, given in zip(halves, (gradient, gradient.float()), strict=True):
        adamw_(master, Moments.zeros(master), given, step=1, options=AdamWOptions(1e-3), scale=0.3, kernel=kernel)
    assert torch.equal(halves[0].high, halves[1].high)
    assert torch.equal(halves[0].low, halves[1].low)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_that_is_not_finite_shows_in_the_weights(kernel: Kernel):
    needs(kernel)
    master = SplitMaster.of(torch.ones(64))
    gradient = torch.ones(64)
    gradient[5], gradient[6] = torch.nan, torch.inf
    adamw_(master, Moments.zeros(master), gradient, step=1, options=AdamWOptions(1e-3), kernel=kernel)
    assert master.high.isnan().nonzero().flatten().tolist() == [5, 6]
    assert read_(torch.empty(64), master).isnan().nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_update_by_nothing_leaves_every_kind_of_master(kernel: Kernel):
    needs(kernel)
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)[:, None] << 16
    values = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x4321], dtype=torch.int32)).flatten()
    values = values.view(torch.float32)
    master, before = SplitMaster.of(values), SplitMaster.of(values)
    options = AdamWOptions(1e-3, weight_decay=0.0)
    adamw_(master, Moments.zeros(master), torch.zeros(values.shape), step=1, options=options, kernel=kernel)
    nan = values.isnan()
    assert torch.equal(master.high.isnan(), nan)
    for mine, theirs in ((master.high, before.high), (master.low, before.low)):
        assert torch.equal(mine.view(torch.int16)[~nan], theirs.view(torch.int16)[~nan])


def test_the_native_kernel_has_the_same_bits_with_any_number_of_threads():
    needs("native")
    numel = 3 * CHUNK + 5
    values, gradient = torch.randn(numel), torch.randn(numel)
    results = []
    for threads in (1, 2, 3):
        master = SplitMaster.of(values)
        adamw_(master, Moments.zeros(master), gradient, step=1, options=AdamWOptions(1e-3), threads=threads)
        results.append(read_(torch.empty(numel), master))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_without_a_compiler_the_update_falls_back_and_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "broken.c"
    assert "no C compiler" in str(native.build(broken, compilers=("no-such-compiler",)))
    broken.write_text("int main(")
    if not native_reason():
        assert "failed" in str(native.build(broken))
    monkeypatch.setattr("megatrain.optim.fast.adamw.native_reason", lambda: "no C compiler here")
    master, _, reference, _ = train("auto", 100, lr=1e-3)
    assert torch.equal(read_(torch.empty(100), master), reference)
    with pytest.raises(OptimizerError, match="no C compiler here"):
        train("native", 100, lr=1e-3)


def test_what_the_fused_update_lacks_is_refused():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], amsgrad=True)
    with pytest.raises(OptimizerError, match="amsgrad"):
        AdamWOptions.of(optimizer.param_groups[0])


def weights(numel: int = 1 << 16) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02


def tiny_updates(master, steps: int = 10) -> None:
    generator = torch.Generator().manual_seed(1)
    moments = Moments.zeros(master)
    for step in range(1, steps + 1):
        gradient = torch.randn(master.high.shape, generator=generator)
        adamw_(master, moments, gradient, step=step, options=AdamWOptions(1e-5, weight_decay=0.0))


def test_updates_too_small_for_bf16_are_not_lost():
    start = weights().bfloat16()

    plain = start.clone()
    for step, moments in ((s, m) for m in [Moments.zeros(SplitMaster.of(start.float()))] for s in range(1, 11)):
        generator = torch.Generator().manual_seed(step)
        master = SplitMaster.of(plain.float())
        gradient = torch.randn(plain.shape, generator=generator)
        adamw_(master, moments, gradient, step=step, options=AdamWOptions(1e-5, weight_decay=0.0))
        plain = master.high  # the low half is thrown away, as training in plain bf16 does
    split = SplitMaster.of(start.float())
    tiny_updates(split)

    assert (plain == start).float().mean() > 0.6
    assert int((read_(torch.empty(start.shape), split) == start.float()).sum()) == 0


def test_stochastic_rounding_follows_the_exact_masters_on_average():
    start = weights().bfloat16()
    rounded = RoundedMaster(start.clone(), torch.Generator().manual_seed(3))
    exact = SplitMaster.of(start.float())
    tiny_updates(rounded)
    tiny_updates(exact)
    moved = read_(torch.empty(start.shape), exact) - start.float()
    apart = rounded.high.float() - start.float() - moved
    # The error of each weight has mean 0; the mean of all has a standard error of std / sqrt(n).
    assert abs(apart.mean()) < 4 * apart.std() / start.numel() ** 0.5
    assert (rounded.high != start).any()
