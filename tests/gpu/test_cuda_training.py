"""Training on an accelerator: numbers, order, races, memory and overlap."""

from __future__ import annotations

import copy
import gc
import statistics
import time

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import megatrain
from megatrain.device import find
from megatrain.runtime.streams.stream_set import Chaos
from tests.models import MODELS, Gpt
from tests.runtime.parity import assert_close, train
from tests.simulated_device import is_loaded

NAMES = [
    "gpt_loss",
    "mlp",
    "cnn",
    "torch_encoder",
    "llama_labels",
    "qwen2_labels",
    "gpt2_labels",
    "bert_labels",
    "t5_labels",
    "vit_labels",
]

on_a_card = pytest.mark.skipif(is_loaded(), reason="measures time on a card; the simulated device has virtual time")


def device() -> torch.device:
    return find(None).torch_device


def moved(value):
    """The same nested arguments with their tensors on the accelerator."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device()), value)


def assert_parity_there(name: str, **options) -> None:
    """Eager on the accelerator against compiled there: the same kernels, in the same order."""
    model, args, kwargs = MODELS[name]()
    eager, streamed = copy.deepcopy(model).to(device()), copy.deepcopy(model)
    args, kwargs = moved(args), moved(kwargs)
    compiled = megatrain.compile(streamed, device=device(), **options)
    found = train(compiled, streamed, args, kwargs)
    reasons = {name: template.cost.unmeasured for name, template in compiled.program.templates.items() if template.cost}
    assert not any(reasons.values()), reasons
    expected = train(eager, eager, args, kwargs)
    assert_close(expected, found, 0.0)


CASES = tuple(zip(NAMES, ["offload", "keep", "recompute", "offload", "keep"] * 2, strict=True))


@pytest.mark.parametrize(
    ("name", "activations"),
    [*CASES[1:3], *(pytest.param(*case, marks=pytest.mark.nightly) for case in (CASES[0], *CASES[3:]))],
)
def test_training_equals_eager(name: str, activations: str) -> None:
    assert_parity_there(name, activations=activations)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 11))])
def test_training_equals_eager_under_chaos(seed: int) -> None:
    assert_parity_there(NAMES[seed % len(NAMES)], activations="offload", chaos=Chaos(seed=seed))


def allocated_peak(depth: int) -> tuple[int, megatrain.Schedule]:
    """Peak of torch's allocator in the second step, and the schedule."""
    model = Gpt(width=512, heads=8, depth=depth)
    ids = torch.randint(0, 32, (8, 16), device=device())
    compiled = megatrain.compile(model, device=device(), activations="offload")
    compiled(ids, targets=ids)[1].backward()
    gc.collect()
    torch.accelerator.synchronize()
    find(None).reset_peak()
    compiled(ids, targets=ids)[1].backward()
    torch.accelerator.synchronize()
    assert compiled.peak_bytes <= compiled.schedule.peak_bytes
    peak = find(None).peak_bytes()
    assert peak is not None
    return peak, compiled.schedule


def test_peak_is_flat_and_near_the_schedules_figure() -> None:
    shallow, small = allocated_peak(6)
    deep, large = allocated_peak(16)
    assert large.peak_bytes == small.peak_bytes
    slack = sum(nbytes for _, nbytes in find(None).uncounted())
    assert deep <= large.device_bytes + slack
    assert abs(deep - shallow) <= 64 << 20


class Wide(nn.Module):
    """Blocks whose compute, prefetch and offload take comparable time."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def median_seconds(work, repeats: int = 5) -> float:
    """Median time of `work` with the device idle before and after."""
    times: list[float] = []
    for _ in range(repeats + 1):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def copy_seconds(nbytes: int) -> tuple[float, float]:
    """Time of one copy to the device and of one back, through page-locked memory."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device())
    there = median_seconds(lambda: on_device.copy_(host, non_blocking=True))
    return there, median_seconds(lambda: host.copy_(on_device, non_blocking=True))


@on_a_card
def test_transfers_overlap_with_compute() -> None:
    width, depth = 8192, 16
    model = Wide(width, depth)
    bytes_moved = depth * width * width * 4
    h2d, d2h = copy_seconds(bytes_moved)
    h2d *= 2  # each block's weights cross twice a step
    weight = torch.randn(width, width, device=device())

    def compute(rows: int) -> float:
        x = torch.randn(rows, width, device=device())

        def run():
            for _ in range(4 * depth):
                x @ weight  # pyright: ignore[reportUnusedExpression]

        return median_seconds(run)

    # As many rows as make compute (forward, recompute, two products backward) take as long as the prefetches.
    rows = 1024
    while compute(rows) < h2d and rows < 1 << 17:
        rows *= 2
    # Each half waits for the longer of its own: a forward is a quarter of the products, and half of the prefetches.
    products = compute(rows)
    alone = max(products / 4, h2d / 2) + max(products * 3 / 4, h2d / 2, d2h)
    x = torch.randn(rows, width, device=device())
    compiled = megatrain.compile(model, device=device(), activations="recompute", memory="60GiB")

    def step():
        compiled(x).backward()
        for parameter in model.parameters():
            parameter.grad = None

    measured = median_seconds(step)
    print(f"step {measured:.3f} s; compute {compute(rows):.3f}, h2d {h2d:.3f}, d2h {d2h:.3f} s alone")
    assert measured < 1.15 * alone


def test_a_model_on_the_device_is_refused() -> None:
    model = Gpt().to(device())
    compiled = megatrain.compile(model, device=device())
    with pytest.raises(megatrain.ExecuteError, match=rf"is on {device()}.\n  Parameters stay in host memory"):
        compiled(torch.randint(0, 32, (2, 8), device=device()))


def test_an_input_on_another_device_is_refused() -> None:
    compiled = megatrain.compile(Gpt(), device=device())
    with pytest.raises(megatrain.ExecuteError, match=f"input `ids` is on meta, the compute device is {device()}"):
        compiled(torch.randint(0, 32, (2, 8), device="meta"))
