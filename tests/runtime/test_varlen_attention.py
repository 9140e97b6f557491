"""Attention over documents of several lengths: captured, counted, recomputed or kept, with the bits of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch.library import Library
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

import megatrain
from megatrain.passes.kernels import kernel_flops, private_bytes
from tests import varlen
from tests.attention import EAGER_TO_KEEP
from tests.comparing import assert_same

TOKENS, HEADS, HEAD = 1024, 2, 16
WIDTH = HEADS * HEAD

Kernel = Callable[[Any, Any, Any, torch.Tensor, int], torch.Tensor]


def torchs(q: Any, k: Any, v: Any, ends: torch.Tensor, longest: int) -> torch.Tensor:
    found = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    assert isinstance(found, torch.Tensor)
    return found


def flash_attns(q: Any, k: Any, v: Any, ends: torch.Tensor, longest: int) -> Any:
    return varlen.FlashAttnVarlenFunc.apply(q, k, v, ends, longest, True)


KERNELS: list[Kernel] = [torchs, flash_attns]


@pytest.fixture(scope="module", autouse=True)
def kernels_on_the_cpu() -> Generator[None]:
    library = Library("torch_attn", "FRAGMENT")
    varlen.register_torchs(library)
    yield
    library._destroy()


class Layer(nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 3, HEADS, HEAD).unbind(1)
        return x + self.out(self.kernel(q, k, v, ends, longest).flatten(1))


class Packed(nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(kernel) for _ in range(3))

    def forward(self, x: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, ends, longest)
        return x.square().mean()


def packed(seed: int, *sizes: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    ends = torch.tensor([0, *sizes]).cumsum(0).int()
    return torch.randn(sum(sizes), WIDTH, generator=torch.Generator().manual_seed(seed)), ends, max(sizes)


STEPS = [packed(0, 400, 624), packed(1, 624, 400), packed(2, 624, 400)]


class Forwards(TorchDispatchMode):
    """Counts the forwards of these kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "varlen" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize(("kernel", "keeps"), [(torchs, True), (flash_attns, True), (flash_attns, False)])
def test_steps_have_eagers_bits_and_kept_results_spare_the_second_run(kernel: Kernel, keeps: bool):
    model = Packed(kernel)
    expected = copy.deepcopy(model)
    compiled = megatrain.compile(copy.deepcopy(model), device="cpu", activations="recompute", memory="1GiB")
    step = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), loss=lambda out, _: out)
    if keeps:
        memory = step.prepare([STEPS[0]]).device_bytes + 300_000
        compiled = megatrain.compile(copy.deepcopy(model), device="cpu", memory=memory, hardware=EAGER_TO_KEEP)
        step = megatrain.TrainStep(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), loss=lambda out, _: out)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in STEPS:
        loss = expected(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with Forwards() as forwards:
            assert_same(loss.detach(), step([batch]), "loss")
    step.flush()
    assert_same(list(expected.parameters()), list(compiled.parameters()))
    kept = {*step.schedule.results, *step.schedule.saves}
    assert bool(step.schedule.results) == keeps
    assert forwards.count == 2 * 3 - len(kept)
    assert len(list(compiled.megatrain._variants)) == 1, "the ends of documents are no part of a capture"
    if kernel is torchs:
        assert "torch.ops.torch_attn._varlen_attn(" in str(compiled.traced)


@pytest.mark.parametrize("kernel", KERNELS)
def test_work_and_memory_are_those_of_torchs_own_fused_kernel(kernel: Kernel):
    """Of a row of tokens with one document, as a batch of one text has it."""
    found: dict[bool, tuple[int, int]] = {}

    class Measured(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if "varlen" in func.name():
                work = kernel_flops(func, args, kwargs or {}, result)
                found["backward" in func.name()] = work, private_bytes(func, args)
            return result

    _, ends, longest = packed(0, TOKENS)
    q, k, v = (torch.randn(TOKENS, HEADS, HEAD, requires_grad=True) for _ in range(3))
    with Measured():
        kernel(q, k, v, ends, longest).sum().backward()
    pairs = TOKENS * (TOKENS + 1) // 2
    assert found[False] == (2 * 2 * HEADS * pairs * HEAD, 0)
    # The gradient of the query in fp32, with heads rounded up to 32 elements and 128 rows more for each document; and a
    # number for each row.
    assert found[True] == (5 * 2 * HEADS * pairs * HEAD, 4 * HEADS * (TOKENS + 128) * (32 + 1))
