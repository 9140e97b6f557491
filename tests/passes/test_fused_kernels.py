"""What fused kernels move, against sums done by hand; and what holds for all models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatrain.hardware.work import MEMORY, Kernels, Works, total_bytes, total_flops, total_kernels
from megatrain.passes.fused import FusedWork
from megatrain.passes.kernels import KernelWork
from megatrain.passes.measure import measure
from megatrain.passes.pipeline import lower
from tests.captures import traced

META = torch.device("meta")
SIZE = 4 * 8 * 16 * 32


def fused(work: Callable[[], object]) -> Works:
    with FusedWork(META) as kernels:
        result = work()
    works = kernels.take()
    del result
    return works


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


X, WEIGHT, MATRIX = meta(8, 16, 32), meta(32), meta(32, 32)


def one_kernel(nbytes: int, number: int = 1) -> Works:
    return (Kernels(MEMORY, 0, nbytes, number),)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * WEIGHT


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.cat((-x[..., 16:], x[..., :16]), dim=-1) * sin


def test_a_chain_reads_its_inputs_once_and_writes_what_is_left():
    assert fused(lambda: norm(X)) == one_kernel(2 * SIZE + 4 * 32)
    assert fused(lambda: F.silu(X) * meta(8, 16, 32)) == one_kernel(3 * SIZE)
    assert fused(lambda: rotated(X, meta(16, 32), meta(16, 32))) == one_kernel(2 * SIZE + 2 * 4 * 16 * 32)
    assert fused(lambda: norm(X.to(torch.bfloat16).float()).to(torch.bfloat16)) == one_kernel(3 * SIZE // 2 + 4 * 32)
    assert fused(lambda: X.mul_(2).add_(1)) == one_kernel(2 * SIZE)


def test_what_other_kernels_or_callers_read_is_written():
    def residual() -> object:
        total = X + meta(8, 16, 32)
        return total, norm(total)

    assert fused(residual) == one_kernel(4 * SIZE + 4 * 32)

    def around_a_product() -> object:
        kept = X * 2 + 1
        return (kept @ MATRIX).tanh() + kept

    # The first chain has one result; the second reads that and the product.
    works = fused(around_a_product)
    assert [each for each in works if each.rate == MEMORY] == [Kernels(MEMORY, 0, 2 * SIZE + 3 * SIZE, 2)]
    assert total_flops(works) == 2 * 8 * 16 * 32 * 32


def test_a_sum_over_the_first_dimensions_is_a_kernel_of_its_own():
    assert total_kernels(fused(lambda: (X * 2).sum((0, 1)) + 1)) == 3


MODELS = ("gpt_loss", "llama_labels", "cnn", "lengths_read")


@pytest.mark.parametrize("name", MODELS)
def test_fused_kernels_compute_as_much_and_move_no_more(name: str):
    program = lower(traced(name))
    other = measure(program, fuses=True)
    gains = 0
    for key, template in program.templates.items():
        here, there = template.cost, other.templates[key].cost
        assert here is not None
        assert there is not None
        pairs = [(here.forward, there.forward), (here.backward, there.backward)]
        pairs += [(works, there.backward_of(needs)) for needs, works in here.backwards]
        for eager, compiled in pairs:
            assert total_flops(eager) == total_flops(compiled)
            assert total_bytes(compiled) <= total_bytes(eager)
            assert total_kernels(compiled) <= total_kernels(eager)
            gains += total_bytes(eager) - total_bytes(compiled)
        assert (here.saved_bytes, here.backward_workspace_bytes) == (there.saved_bytes, there.backward_workspace_bytes)
    assert gains > 0


def test_these_tests_notice():
    """Eager's kernels move more."""
    with KernelWork(META) as kernels:
        norm(X)
    assert total_bytes(kernels.take()) > 3 * (2 * SIZE)
