"""The norm gathered block by block has the bits of clip_grad_norm_, and finds where gradients stop being finite."""

import random

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from megatrain.errors import OptimizerError
from megatrain.optim.norm import SQUARES, GradientNorm, NonFinite, sums_of_squares
from tests.gradients import grad_of

SHAPES = ((300, 70), (5,), (), (0, 3), (4, 4), (70_001,), (3,))


def with_gradients(dtypes, scale: float, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for index, shape in enumerate(SHAPES):
        dtype = dtypes[index % len(dtypes)]
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        parameters.append(parameter)
    parameters[4].grad = parameters[4].grad.t()
    parameters[1].grad = None
    return parameters


def gathered(parameters, order) -> GradientNorm:
    norm = GradientNorm(parameters)
    for place in order:
        norm.add(place // 2, {parameters[place]: parameters[place].grad})
    return norm


@pytest.mark.parametrize(
    ("dtypes", "scale"),
    [((torch.float32,), 1e-9), ((torch.bfloat16,), 1.0), ((torch.float64, torch.bfloat16, torch.float32), 1e5)],
)
def test_norm_and_clipped_gradients_have_torchs_bits_in_any_order(dtypes, scale: float):
    parameters = with_gradients(dtypes, scale)
    order = list(range(len(SHAPES)))
    random.Random(0).shuffle(order)
    norm = gathered(parameters, order)
    clipped = [p.grad if p.grad is None else p.grad.clone().mul_(norm.coefficient(0.5)) for p in parameters]
    total = norm.total()
    expected = clip_grad_norm_(parameters, 0.5)
    assert total.dtype == expected.dtype
    assert torch.equal(total, expected)
    assert norm.first_nonfinite is None
    for parameter, gradient in zip(parameters, clipped, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(grad_of(parameter), gradient)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_the_first_gradient_to_arrive_that_is_not_finite_is_named(value: float):
    parameters = with_gradients((torch.float32,), 1.0)
    for place in (0, 3 + 1, 5):
        parameters[place].grad[(-1,) * parameters[place].dim()] = value
    norm = gathered(parameters, reversed(range(len(SHAPES))))
    assert norm.first_nonfinite == NonFinite(block=2, parameter=5)
    expected = clip_grad_norm_(parameters, 1.0)
    assert torch.equal(norm.total().isnan(), expected.isnan())
    norm.begin()
    assert norm.first_nonfinite is None
    assert norm.total() == 0.0


def test_without_gradients_the_norm_is_zero_and_one_that_overflows_is_no_element_that_is_not_finite():
    norm = GradientNorm([])
    assert torch.equal(norm.total(), torch.tensor(0.0))
    assert norm.coefficient(1.0) == 1.0
    norm = gathered(with_gradients((torch.float32,), 1e30), range(len(SHAPES)))
    assert norm.total().isinf()
    assert norm.first_nonfinite is None


def test_a_sparse_gradient_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(OptimizerError, match="sparse gradient"):
        GradientNorm([parameter]).add(0, {parameter: torch.ones(4, 3).to_sparse(1)})


@pytest.mark.skipif(SQUARES.fault() is not None, reason="no C compiler")
@pytest.mark.parametrize("threads", [1, 3])
def test_squares_of_tensors_of_any_size_are_summed_exactly(threads: int):
    """Each sum is of whole numbers, so that fp64 has it without rounding."""
    draw = torch.Generator().manual_seed(0)
    sizes = (0, 1, 15, 17, (1 << 16) - 1, 1 << 16, (1 << 16) + 5, 200_003)
    tensors = [
        torch.randint(-200, 200, (size,), generator=draw).to(dtype)
        for size in sizes
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert sums_of_squares(tensors, threads) == [t.double().square().sum().item() for t in tensors]
    assert sums_of_squares([], threads) == []


@pytest.mark.skipif(SQUARES.fault() is not None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_gradients_are_summed_on_several_threads_to_the_same_bits(dtype: torch.dtype):
    """C's sum is off by the rounding of fp64; then the norms are rounded to fp32, which is 6e-8, and added up in it."""
    draw = torch.Generator().manual_seed(0)
    gradient, small = (torch.randn(size, generator=draw).to(dtype) for size in ((1500, 2000), (7,)))
    large, other = torch.empty(1500, 2000), torch.empty(7)
    norms = [GradientNorm([large, other], {large: None, other: None}, threads=threads) for threads in (1, 2, 5)]
    for norm in norms:
        norm.begin()
        norm.add(0, {large: gradient, other: small})
    totals = [norm.total() for norm in norms]
    exact = torch.cat([gradient.double().flatten(), small.double()]).norm()
    assert totals[0] == totals[1] == totals[2]
    assert abs(float(totals[0]) - float(exact)) <= 2e-7 * float(exact)
    # Small ones have torch's bits with threads too.
    few = GradientNorm([other], threads=2)
    few.begin()
    few.add(0, {other: small.float()})
    assert torch.equal(few.total(), torch.linalg.vector_norm(small.float()))
    gradient[-1, -1] = torch.nan
    norms[1].begin()
    norms[1].add(3, {large: gradient})
    assert norms[1].first_nonfinite == NonFinite(block=3, parameter=0)
