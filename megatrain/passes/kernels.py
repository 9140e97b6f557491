"""Kernels: the work of each, and the buffers that they hold."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from megatrain.base.torch_private import FakeTensor, TorchDispatchMode, pytree
from megatrain.device import is_on_host
from megatrain.hardware.kernels_alone import launches
from megatrain.hardware.work import MEMORY, Kernels, Works, put_together
from megatrain.tracer.calls import applied_function
from megatrain.tracer.packing import has_wrappers

_RATES = {
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float64: "fp64",
    torch.complex128: "fp64",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
# Calls that write what they are given without reading it.
_FILLS = {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::bernoulli_"}
# Calls that read as much of their first argument as they return.
_LOOKUPS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"}
# Calls that write as many elements of their first argument as their third, an index, has.
_SCATTERS = {"aten::scatter_"}
_CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward", "aten::_convolution"}


class KernelWork(TorchDispatchMode):
    """Notes what each kernel on the compute device computes, reads and writes, while the mode is active."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._found: list[Kernels] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented  # its class computes with plain tensors, and comes here again with these
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if launches(func):
            self._note(func, args, kwargs, result)
        return result

    def take(self) -> Works:
        """What was noted since the last call, put together."""
        found = put_together(self._found)
        self._found.clear()
        return found

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        name = func._schema.name
        operands = [value for key, value in kwargs.items() if key not in _outs(func)]
        given = [self._there((*args, *operands)), self._there((result,))]
        if not any(given):
            return
        read, written = [list(map(tensor_bytes, tensors)) for tensors in given]
        fresh = {id(tensor) for tensor in given[0]}
        made = [nbytes for tensor, nbytes in zip(given[1], written, strict=True) if id(tensor) not in fresh]
        changed = sum(written) - sum(made)
        if name in _LOOKUPS and read:
            read[0] = min(read[0], sum(written))
        if name in _SCATTERS:
            changed = args[2].numel() * args[0].element_size()
        if name in _FILLS | _SCATTERS:
            read = [nbytes for tensor, nbytes in zip(given[0], read, strict=True) if tensor is not args[0]]
        flops = kernel_flops(func, args, kwargs, result)
        rate = _rate(name, given[0]) if flops else MEMORY
        number = max(repeats(tensor) for tensor in (*given[0], *given[1]))
        self._found.append(Kernels(rate, number * flops, number * (sum(read) + sum(made) + changed), number))

    def _there(self, values: Any) -> list[torch.Tensor]:
        """The tensors among some values that are on the compute device."""
        found = {id(leaf): leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}
        return [tensor for tensor in found.values() if is_on(tensor, self._device)]


@functools.cache
def _outs(func: Any) -> frozenset[str]:
    """The names of arguments that a call writes its results to."""
    arguments = func._schema.arguments
    return frozenset(a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)


def repeats(tensor: torch.Tensor) -> int:
    """How many kernels this one stands for."""
    return getattr(tensor.fake_mode, "repeats", 1) if isinstance(tensor, FakeTensor) else 1


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that the elements of a tensor are in: what is broadcast is there once."""
    if tensor.layout != torch.strided:
        return 0
    count = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return (count if tensor.numel() else 0) * tensor.element_size()


def _rate(name: str, given: list[torch.Tensor]) -> str:
    """Which rate of a machine counts for products of these operands."""
    dtype = next((t.dtype for t in given if t.is_floating_point() or t.is_complex()), given[0].dtype)
    kind = _RATES.get(dtype, "fp32")
    if kind == "fp32" and _allows_tf32(is_convolution=name in _CONVOLUTIONS):
        kind = "tf32"
    return f"{kind} attention" if is_attention(name) else kind


def _allows_tf32(*, is_convolution: bool) -> bool:
    """Whether torch lets products of fp32 use fewer bits, as it is set now."""
    try:
        if is_convolution:
            return torch.backends.cudnn.allow_tf32
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # settings of torch's two interfaces contradict each other
        return False


def kernel_flops(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations of a kernel."""
    name = func._schema.name
    if name == PACKED_PRODUCT:  # of inputs (..., inner) and a weight whose shape is the third argument
        return 2 * args[0].numel() * args[2][0]
    if is_attention(name):
        found = _attention_flops(func, args, kwargs)
        if found is not None:
            return found
    formula = flop_registry.get(_packet(name))
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


@functools.cache
def _packet(name: str) -> Any:
    """The operator of a name such as `aten::mm`, with all its overloads."""
    space, _, plain = name.partition("::")
    return getattr(getattr(torch.ops, space), plain, None)


def is_attention(name: str) -> bool:
    """Tells whether an operator is a kernel of attention, torch's or flash-attn's."""
    return any(part in name for part in ("_attention", "_varlen_attn", "flash_attn::"))


def is_of_flash_attn(target: Any) -> bool:
    """Tells whether a call applies a `Function` of flash-attn: it calls operators, and looks at no values."""
    function = applied_function(target)
    return function is not None and function.__module__.partition(".")[0] == "flash_attn"


def _attention_flops(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int | None:
    """Two products for each head of the query: with the keys, and with the values. A backward has five.

    What a causal mask hides isn't computed. torch counts it, and up to version 2.11 refuses heads that share keys.
    Of documents one after another only the longest is known: all are taken to be as long.
    """
    named: dict[str, Any] = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    named |= {_FLASH_ATTNS[name]: value for name, value in named.items() if name in _FLASH_ATTNS} | dict(kwargs)
    if not all(isinstance(named.get(part), torch.Tensor) for part in ("query", "key", "value")):
        return None
    query, key, value = named["query"], named["key"], named["value"]
    if query.dim() == 4:
        is_rows_first = func._schema.name.startswith(("aten::_flash", "aten::_efficient", "flash_attn::"))
        sequence, head = (1, 2) if is_rows_first else (2, 1)
        rows, columns, texts = query.shape[sequence], key.shape[sequence], query.shape[0]
    elif "max_q" in named:
        rows, columns, head = max(1, named["max_q"]), named["max_k"], 1
        texts = query.shape[0] / rows
    else:
        return None  # torch has a formula for its own
    left, right = named.get("window_size") or (named.get("window_size_left", -1), named.get("window_size_right", -1))
    is_causal = named.get("is_causal") or (left, right) == (-1, 0)
    pairs = _causal_pairs(rows, columns) if is_causal else rows * columns
    of_heads = 2 * query.shape[head] * int(texts * pairs)
    with_keys, with_values = of_heads * query.shape[-1], of_heads * value.shape[-1]
    if "backward" in func._schema.name:  # scores again, then gradients of values, scores, queries and keys
        return 3 * with_keys + 2 * with_values
    return with_keys + with_values


_FLASH_ATTNS = {
    "q": "query", "k": "key", "v": "value", "causal": "is_causal", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
}  # fmt: skip
"""What flash-attn's operators call their arguments."""


def _causal_pairs(rows: int, columns: int) -> int:
    """Pairs of a query and a key that isn't after it."""
    both = min(rows, columns)
    return both * (both + 1) // 2 + (rows - both) * columns


# Rows of a query are taken in groups of so many, and elements of a head in groups of so many.
_ROWS = 128
_ELEMENTS = 32
_FP32 = 4

# Backwards of attention on accelerators, with the place of the query's sequence among its dimensions.
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_backward": 2,
    "aten::_scaled_dot_product_efficient_attention_backward": 2,
    "aten::_scaled_dot_product_cudnn_attention_backward": 2,
    "aten::_flash_attention_backward": 1,
    "aten::_efficient_attention_backward": 1,
    "aten::_cudnn_attention_backward": 2,
    "torch_attn::_varlen_attn_backward": 1,
    "flash_attn::_flash_attn_backward": 1,
    "flash_attn::_flash_attn_varlen_backward": 1,
}


PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
"""Of inputs and a weight of 4 bits: its shape is the third argument, the elements of a block are the fifth."""


def private_bytes(func: Any, args: Any) -> int:
    """Bytes that a kernel takes while it runs, beyond its results; 0 where none are known.

    The backwards of fused attention sum the query's gradient in fp32, with rows and heads rounded up, and have one
    fp32 number per row for the softmax. Where several heads share keys and values, each has a gradient of its own of
    these at first. cuDNN's RNNs copy their weights into one piece of memory. A product with 4-bit weights may make them
    in full, with the scales of their blocks in fp32, twice where these are quantized as well.

    Args:
        args: Its arguments; the query, or the list of weights, is the second, then come keys and values.
    """
    if func._schema.name == PACKED_PRODUCT:
        elements = math.prod(args[2])
        return elements * args[0].element_size() + 2 * _FP32 * (elements // args[4])
    if func._schema.name == "aten::_cudnn_rnn":
        return sum(weight.nbytes for weight in args[1])
    place = _ATTENTION.get(func._schema.name)
    if place is None:
        return 0
    query, key, value = args[1], args[2], args[3]
    if query.dim() == 3:  # sequences of several lengths, one after the other; their number is that of the bounds less 1
        (rows, heads, width), batch, kv_heads = query.shape, 1, key.shape[1]
        rows += _ROWS * max(0, _length(args[9 if func._schema.name.startswith("flash_attn::") else 6]) - 1)
    else:
        batch, rows, heads, width = query.shape[0], query.shape[place], query.shape[3 - place], query.shape[3]
        kv_heads = key.shape[3 - place]
    of_rows = batch * heads * _rounded(rows, _ROWS) * _FP32
    shared = (key.nbytes + value.nbytes) * heads // kv_heads if kv_heads < heads else 0
    return of_rows * _rounded(width, _ELEMENTS) + of_rows + shared


def _rounded(number: int, group: int) -> int:
    return -(-number // group) * group


def _length(bounds: Any) -> int:
    return bounds.shape[0] if isinstance(bounds, torch.Tensor) and bounds.dim() == 1 else 0


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of storages made on the compute device while it is active, and of kernels' own buffers.

    Attributes:
        peak_parts: The bytes of each storage that was alive then, and of a kernel's own buffers.
    """

    def __init__(self, known: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._alive: dict[int, int] = {}  # bytes of each storage
        self._known = {t.untyped_storage()._cdata for t in known}  # pyright: ignore[reportPrivateUsage]
        self.current = 0
        self.peak = 0
        self.peak_parts: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented  # its class computes with plain tensors, and comes here again with these
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.layout == torch.strided and is_on(item, self._device):
                self._add(item.untyped_storage())
        self._note(private_bytes(func, args))
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return
        weakref.finalize(storage, self._remove, key)
        self._alive[key] = size
        self.current += size
        self._note(0)

    def _note(self, private: int) -> None:
        if self.current + private > self.peak:
            self.peak = self.current + private
            self.peak_parts = (*self._alive.values(), private)

    def _remove(self, key: int) -> None:
        self.current -= self._alive.pop(key)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Tells whether a tensor takes memory of the compute device, rather than of the host."""
    return is_on_host(device) or not is_on_host(tensor)
