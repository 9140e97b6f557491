"""Kernels alone: rates of products, attention and memory, what a launch costs, and how such times are taken."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatrain.base.torch_private import TorchDispatchMode
from megatrain.device import HOST, Device
from megatrain.hardware.work import SHARED_BYTES

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Of products: so long that a launch doesn't count, so short that all of them take a second or two.
_ABOUT_S = 0.004
_IN_A_ROW = 3
_LARGEST, _SMALLEST = 8192, 256
# In a model each weight comes from memory once in each pass, so weights take turns here, more than caches hold.
_BEYOND_CACHES = 256 << 20
_MOST_WEIGHTS = 64
_WARM_UP_S = 0.02


def seconds_of(device: Device, work: Callable[[], object], *, least_s: float, most: int = 200) -> float:
    """The median time of some work on the device's current stream, and of what its launch takes longer.

    Repeated for `least_s`, three times at least.
    """
    begin, is_warm = time.perf_counter(), False
    while not is_warm:
        work()
        device.settle()  # without that, a queue of so much work might take far longer
        is_warm = time.perf_counter() - begin >= min(_WARM_UP_S, least_s)
    found: list[float] = []
    while len(found) < 3 or (sum(found) < least_s and len(found) < most):
        before = device.moment()
        work()
        found.append(device.moment().seconds_since(before))
    return median(found)


class Beside:
    """Work of a thread, again and again, each time until its end, for as long as the body of a `with` runs."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._is_over:
            self._work()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()


class Product(NamedTuple):
    """A product of matrices, whose rate is `"bf16"` or `"fp32"`."""

    rows: int
    inner: int
    columns: int
    rate: str

    @property
    def flops(self) -> int:
        """Its floating-point operations."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices and of the result."""
        sizes = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return sizes * DTYPES[self.rate].itemsize


def product_rates(device: Device, woken_s: float) -> dict[str, float]:
    """FLOP/s of products of a layer, by the name of the rate; threads that wake for them take so long besides."""
    rates: dict[str, float] = {}
    for rate in ("bf16", "fp32"):
        products = _of_layers(_fitting_width(device, rate), rate)
        rates[rate] = sum(p.flops for p in products) / sum(_alone_s(device, p, woken_s) for p in products)
    return rates


def _alone_s(device: Device, product: Product, woken_s: float) -> float:
    taken = _product_s(device, product)
    return max(taken - woken_s, taken / 2) if product.nbytes >= SHARED_BYTES else taken


def _of_layers(width: int, rate: str) -> Sequence[Product]:
    """Products of a layer of this width, of half as many tokens: a projection, and those of an MLP."""
    return (
        Product(width // 2, width, width, rate),
        Product(width // 2, width, 4 * width, rate),
        Product(width // 2, 4 * width, width, rate),
    )


def _fitting_width(device: Device, rate: str) -> int:
    width = _SMALLEST
    while width < _LARGEST and _product_s(device, Product(width, width, width, rate), least_s=0) < _ABOUT_S:
        width *= 2
    return width


def _product_s(device: Device, product: Product, *, least_s: float = 0.05) -> float:
    """Seconds of a product in training: on average of the layer's own, and of both of its backward.

    Their operands lie otherwise in memory, which takes processors longer.
    """
    dtype, there = DTYPES[product.rate], device.torch_device
    x = torch.ones(product.rows, product.inner, dtype=dtype, device=there)
    gradient = torch.ones(product.rows, product.columns, dtype=dtype, device=there)
    count = min(_MOST_WEIGHTS, -(-_BEYOND_CACHES // (product.columns * product.inner * dtype.itemsize)))
    weights = cycle(torch.ones(count, product.columns, product.inner, dtype=dtype, device=there))

    def three() -> None:
        weight = next(weights)
        F.linear(x, weight)
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return seconds_of(device, three, least_s=least_s) / 3


def attention_rates(device: Device, rates: Mapping[str, float]) -> dict[str, float]:
    """FLOP/s of causal attention, its backward included, by the name of the rate."""
    found: dict[str, float] = {}
    for rate in ("bf16", "fp32"):
        # As many tokens as take about as long as the products, then as many heads: launches mustn't count.
        heads, width, rows = 8, 64, 512
        flops = 3.5 * 2 * heads * rows * (rows + 1) * width
        while rows < 4096 and 4 * flops / rates[rate] < 2 * _ABOUT_S:
            rows, flops = 2 * rows, 4 * flops
        while rows == 4096 and heads < 128 and 2 * flops / rates[rate] < 2 * _ABOUT_S:
            heads, flops = 2 * heads, 2 * flops
        shape = (1, heads, rows, width)
        parts = [torch.ones(shape, dtype=DTYPES[rate], device=device.torch_device).requires_grad_() for _ in range(3)]
        seed = torch.ones(shape, dtype=DTYPES[rate], device=device.torch_device)

        def both(parts: list[torch.Tensor] = parts, seed: torch.Tensor = seed) -> None:
            result = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            torch.autograd.grad(result, parts, seed)

        found[f"{rate} attention"] = flops / seconds_of(device, both, least_s=0.05)
    return found


def memory_rate(device: Device, launched_s: float) -> float:
    """Bytes per second that kernels read and write in the device's memory.

    On a processor exponentials take longer than their bytes, and so does a large result: the system makes its memory
    first. A good fifth of the bytes are of such a kernel, the softmax of a head; in training steps of small language
    models softmax and gradients of heads and embeddings are about as much. Each takes `launched_s` besides.
    """
    count = (4 << 20) if device.is_host else (32 << 20)
    x, y, out = (torch.ones(count, device=device.torch_device) for _ in range(3))
    # Its result is larger than what glibc keeps: how soon smaller ones are there depends on what was freed before.
    logits = torch.ones(512, 7 * count // 1024, device=device.torch_device)

    def kernels() -> None:
        for _ in range(_IN_A_ROW):  # Python launches the first, and the device doesn't wait for the others
            torch.add(x, y, out=out)
            torch.mul(x, y, out=out)
            torch.exp(x, out=out)
        F.log_softmax(logits, dim=-1)

    taken = seconds_of(device, kernels, least_s=0.2)
    moved = 8 * _IN_A_ROW * x.nbytes + 2 * logits.nbytes
    return moved / max(taken - (3 * _IN_A_ROW + 1) * launched_s, taken / 2)


# Calls that launch nothing, though their schemas don't say that they return a view.
_NOTHING = {
    "aten::_unsafe_view",
    "aten::alias",
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_local_scalar_dense",
    "aten::is_same_size",
}


@functools.cache
def launches(func: Any) -> bool:
    """Whether a call runs a kernel: a view of what it is given runs none."""
    schema = func._schema
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return bool(schema.returns) and not is_view and schema.name not in _NOTHING and not schema.name.startswith("prim::")


class _Launches(TorchDispatchMode):
    """Counts kernels while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += launches(func)
        return func(*args, **(kwargs or {}))


_TOKENS, _WIDTH, _HEADS = 8, 64, 4


class _Layer:
    """A layer of a language model, so narrow that its kernels take next to no time."""

    def __init__(self, device: Device) -> None:
        shapes = [(_WIDTH,), *4 * [(_WIDTH, _WIDTH)], (_WIDTH,), *2 * [(4 * _WIDTH, _WIDTH)], (_WIDTH, 4 * _WIDTH)]
        self._tensors = [torch.ones(s, device=device.torch_device) for s in ((1, _TOKENS, _WIDTH), *shapes)]
        self._angles = torch.ones(_TOKENS, _WIDTH // _HEADS, device=device.torch_device)

    def step(self) -> None:
        """Launches a forward, and a backward that computes the forward again."""
        self._forward(lambda _: None)  # as a block whose graph is dropped
        leaves, result = self._forward(lambda tensor: tensor)
        torch.autograd.grad(result, leaves, torch.ones_like(result))

    def _forward(self, kept: Callable[[Any], Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in self._tensors]
        x, before, query, key, value, out, after, gate, up, down = leaves
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            y = _normed(x, before)
            heads = [F.linear(y, w).view(1, _TOKENS, _HEADS, -1).transpose(1, 2) for w in (query, key, value)]
            turned = [self._turned(heads[0]), self._turned(heads[1])]
            y = F.scaled_dot_product_attention(turned[0], turned[1], heads[2], is_causal=True)
            x = x + F.linear(y.transpose(1, 2).reshape(1, _TOKENS, _WIDTH), out)
            y = _normed(x, after)
            return leaves, x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * self._angles + torch.cat((-other, one), -1) * self._angles


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def launch_s(device: Device) -> tuple[float, float]:
    """Seconds of a kernel that does nothing: on the device, and of Python, which launches it.

    Python's is the average of a layer's forward and backward with their graphs: a loop of additions launches a kernel
    in a third of that. On the host both are one: a kernel is done when its call returns.
    """
    layer, kernels = _Layer(device), _Launches()
    with kernels:
        layer.step()
    taken = seconds_of(device, layer.step, least_s=0.05)
    # What each op takes besides counts once for the forward, and once for the backward.
    issued = max(taken - 2 * op_s(), taken / 2) / kernels.number
    if device.new_stream() is None:
        return issued, 0.0
    x, count = torch.ones(16, device=device.torch_device), 400
    added = seconds_of(device, _many(x, count), least_s=0.02) / count
    # After a kernel that takes longer than Python needs for all launches, they follow each other at once.
    long = torch.ones(16 << 20, device=device.torch_device)
    for _ in range(3):
        long.add_(1)
    begin = device.moment()
    long.add_(1)
    long_s = device.moment().seconds_since(begin)
    repeats = int(2 * added * count / max(long_s, 1e-9)) + 1
    for _ in range(repeats):
        long.add_(1)
    begin = device.moment()
    _many(x, count)()
    queued = device.moment().seconds_since(begin) / count
    return min(queued, added), issued


def wake_s() -> float:
    """Seconds that a kernel of the host takes longer if all threads share it than if one thread has a part alone."""
    count, part = 200, SHARED_BYTES // 16  # which one thread computes
    alone, shared = (
        seconds_of(HOST, _many(torch.ones(size), count), least_s=0.05)
        for size in (part, part * torch.get_num_threads())
    )
    return max(0.0, shared - alone) / count


def op_s() -> float:
    """Seconds of Python for a small block: a product with a graph of its own, and its backward."""
    x, weight = torch.ones(1, 4), torch.ones(4, 4)

    def block() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            result = F.linear(leaves[0], leaves[1])
        torch.autograd.grad(result, leaves, torch.ones_like(result))

    return seconds_of(HOST, block, least_s=0.02)


def _many(x: torch.Tensor, count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            x.add_(1)

    return work
