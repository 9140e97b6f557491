"""Training on an accelerator: numbers, order, races, memory and overlap."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.utils import _pytree as pytree

import megatrain
from megatrain.device import find
from tests.models import MODELS, Gpt
from tests.runtime.parity import assert_close, train
from tests.runtime.test_varlen_attention import Packed, packed, torchs

NAMES = [
    "gpt_loss",
    "mlp",
    "cnn",
    "torch_encoder",
    "llama_labels",
    "qwen2",
    "t5_labels",
    "vit_labels",
]


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


CASES = tuple(zip(NAMES, ["offload", "keep", "recompute", "offload"] * 2, strict=True))


@pytest.mark.parametrize(
    ("name", "activations"),
    [*CASES[1:3], *(pytest.param(*case, marks=pytest.mark.nightly) for case in (CASES[0], *CASES[3:]))],
)
def test_training_equals_eager(name: str, activations: str) -> None:
    assert_parity_there(name, activations=activations)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs CUDA")
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_attention_over_documents_equals_eager(activations: str) -> None:
    """By `torch.nn.attention.varlen`, whose kernels the CPU hasn't got."""
    model = Packed(torchs).bfloat16()
    x, ends, longest = packed(0, 400, 624)
    given = x.to(device(), torch.bfloat16), ends.to(device()), longest
    eager, streamed = copy.deepcopy(model).to(device()), copy.deepcopy(model)
    compiled = megatrain.compile(streamed, device=device(), activations=activations)
    expected, found = (train(m, own, given, {}) for m, own in ((eager, eager), (compiled, streamed)))
    # The kernel adds up gradients of queries in an order that isn't fixed.
    assert_close(expected, found, 2e-2)


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


def test_a_model_on_the_device_is_refused() -> None:
    model = Gpt().to(device())
    compiled = megatrain.compile(model, device=device())
    with pytest.raises(megatrain.ExecuteError, match=rf"is on {device()}.\n  Parameters stay in host memory"):
        compiled(torch.randint(0, 32, (2, 8), device=device()))


def test_an_input_on_another_device_is_refused() -> None:
    compiled = megatrain.compile(Gpt(), device=device())
    with pytest.raises(megatrain.ExecuteError, match=f"input `ids` is on meta, the compute device is {device()}"):
        compiled(torch.randint(0, 32, (2, 8), device="meta"))
