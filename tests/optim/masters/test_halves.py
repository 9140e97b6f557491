"""Masters in two halves: every bit comes back, and the high half is the nearest bf16 value."""

import pytest
import torch

from megatrain.optim.masters.halves import CHUNK, RoundedMaster, SplitMaster, read_, write_

LOW_BITS = (0, 1, 2, 3, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xABCD)


def every_upper_half() -> torch.Tensor:
    """All 2^16 upper halves with each of the sampled lower ones, as fp32."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = (upper[:, None] | torch.tensor(LOW_BITS)).flatten()
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def test_every_bit_comes_back():
    values = every_upper_half()
    back = read_(torch.empty_like(values), SplitMaster.of(values))
    nan = values.isnan()
    assert torch.equal(bits(back)[~nan], bits(values)[~nan])
    # A NaN keeps its sign and what of its payload fits the high half, and becomes quiet.
    assert torch.equal(bits(back)[nan], (bits(values)[nan] | 0x400000) & -0x10000)
    assert back[nan].isnan().all()


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


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2 * CHUNK + 5,)])
def test_shapes_and_pieces(shape: tuple[int, ...]):
    values = torch.randn(shape)
    master = SplitMaster.of(values)
    assert master.high.shape == master.low.shape == values.shape
    assert torch.equal(read_(torch.empty(shape), master), values)


def test_a_master_that_is_not_contiguous_splits_in_its_own_order():
    values = torch.randn(6, 4).t()
    assert torch.equal(read_(torch.empty(4, 6), SplitMaster.of(values)), values)


def test_bf16_values_have_no_low_half():
    values = torch.randn(100).bfloat16()
    master = SplitMaster.of(values.float())
    assert torch.equal(master.high, values)
    assert not master.low.any()


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


def test_stochastic_rounding_leaves_what_bf16_holds():
    values = torch.cat([torch.randn(100).bfloat16().float(), torch.tensor([torch.inf, -torch.inf, -0.0])])
    master = RoundedMaster(torch.empty(values.shape, dtype=torch.bfloat16), torch.Generator().manual_seed(5))
    write_(master, values)
    assert torch.equal(bits(master.high.float()), bits(values))
    write_(master, bits(values).bitwise_or(0x7F800001).view(torch.float32))
    assert master.high.isnan().all()


def test_stochastic_rounding_draws_the_same_whatever_the_pieces(monkeypatch):
    values = torch.randn(1000)
    results = []
    for chunk in (CHUNK, 16):
        monkeypatch.setattr("megatrain.optim.masters.halves.CHUNK", chunk)
        master = RoundedMaster(torch.empty(1000, dtype=torch.bfloat16), torch.Generator().manual_seed(5))
        write_(master, values)
        results.append(master.high)
    assert torch.equal(results[0], results[1])
