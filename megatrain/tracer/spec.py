"""TensorSpec: what is known of a tensor without having it."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx, nn

from megatrain.base.checks import Rule, instance_of, mapping_of, named, optional, sequence_of
from megatrain.device import HOST, autocast_kinds, is_on_host
from megatrain.device.kinds import fault, fault_of_name
from megatrain.errors import TraceError
from megatrain.tracer.source_line import SourceLine

EXAMPLE_ARGS = sequence_of(kinds=(tuple, list), what="a tuple of arguments")
EXAMPLE_KWARGS = optional(mapping_of())
MODEL = instance_of(nn.Module, "an nn.Module", "the model itself")


_WAY = '{name}="cpu", or the name of an accelerator that is here'
DEVICE_NAME = Rule("a torch.device or the name of one", _WAY, fault_of_name)
DEVICE = Rule("a torch.device or the name of one, on this machine", _WAY, fault)
"""Of models and inputs on meta too: nothing is allocated there before something runs."""


NORMED = (torch.float32, torch.bfloat16)
"""Dtypes of gradients whose norm a device takes, in fp32."""


def is_equal(left: Any, right: Any) -> bool:
    """Compares numbers, texts, arrays, and containers of such.

    NaN is the same as NaN, although `nan != nan`: nothing has changed. 0.0 isn't the same as -0.0, nor 1 as 1.0 or
    True, although they are equal: a forward can tell them apart.
    """
    if left is right:
        return True
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, np.ndarray | np.generic) and isinstance(right, np.ndarray | np.generic):
        return _is_same_array(np.asarray(left), np.asarray(right))
    if type(left) is not type(right) or isinstance(left, torch.Tensor):
        return False
    if isinstance(left, float | complex | slice | array):
        return repr(left) == repr(right)  # slices and arrays may hold NaN too
    return bool(left == right)


def _is_same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(left, right) if left.dtype.hasobject else left.tobytes() == right.tobytes()


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the storage of a strided tensor while that storage is alive."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


_SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, `f32` for `torch.float32`."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype, layout and place of a strided tensor; prints as `f32[2, 16, 64]`, or `i64[3] cpu` on the host.

    Args:
        shape: Sizes, one per dimension.
        dtype: Element type.
        stride: Strides in elements, or None for a contiguous tensor.
        on_host: A tensor of the CPU in a model that computes on another device. If the model computes on the CPU,
            there is one kind of tensors only, and this is False.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    on_host: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, device: torch.device | None = None) -> TensorSpec:
        """Reads the spec of `tensor`, real or fake.

        Args:
            tensor: The tensor.
            device: Where the model computes; None where it doesn't matter, as for state, which is kept on the host and
                read on the device.
        """
        stride = None
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            stride = tuple(tensor.stride())
        on_host = device is not None and is_on_host(tensor) and not is_on_host(device)
        return TensorSpec(tuple(tensor.shape), tensor.dtype, stride, on_host)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Makes a tensor of this spec without values: on `device`, where the model computes, or on the host."""
        place = HOST.torch_device if self.on_host else device
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=place)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, stored densely."""
        return self.numel * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """The part of `nbytes` that takes memory of the device: none on the host."""
        return 0 if self.on_host else self.nbytes

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"
        stride = "" if self.stride is None else f" stride {self.stride}"
        return f"{text}{stride}{' cpu' if self.on_host else ''}"


# What is known of each node of a captured graph: the keys of `node.meta`, and their checker.
#
# Every tensor (an input, state, the result of a call) has
#
# * `spec`, a `TensorSpec`: its shape, dtype and strides, and whether it is on the host next to the compute device;
# * `requires_grad`, a bool: whether a gradient flows back through it;
# * `has_history`, a bool: whether it did when the call was over. A later write may make a tensor require a gradient
#   that the call itself gave none. `measure` refuses a program in which a result has lost its history. May be missing;
# * `storage`, an int: the number of its memory. Two tensors with one number may alias;
# * `storage_bytes`, an int: the size of that memory, of which the tensor may be a view.
#
# State has, besides these,
#
# * `key`, a str: its fully qualified name, which is the node's target too.
#
# Every call has
#
# * `modules`, a tuple of `(name, number)`: the module calls in which it ran, outermost first. The number tells calls of
#   one module apart. `partition` cuts where these change;
# * `source`, a `SourceLine` or None: the user's line;
# * `grad`, a bool: whether gradients were enabled;
# * `autocast`, a tuple of `(device type, dtype)`: the autocast regions that it ran in;
# * `is_random`, a bool: whether it draws random numbers;
# * `hides_draws`, true where it draws them from a state that torch doesn't show, so that no second run draws the same.
#   May be missing: then it doesn't;
# * `drew_nothing`, true of an opaque module, which may draw random numbers, if it drew none in the capture. May be
#   missing: then it did;
# * `is_read`, true of a copy of a tensor from which Python reads a number that the graph follows. May be missing;
# * `writes`, a tuple of nodes: those whose memory it changes. May be missing: then it changes none;
# * `mask`, a note of a pass on what became of a mask of attention: of the call of attention, and of the calls that make
#   a mask where it is read. May be missing;
# * `results`, the specs in the form of what the call returned: only where shapes depend on values, so that no tensor
#   without values can stand for the call's operands. May be missing.
#
# Two kinds of calls are no tensors, and lack the first five keys: one with several results, which `getitem` calls take
# apart, and one whose result nothing reads (`x.to(x.dtype)` gives back `x`, and readers read `x`).
#
# `Rewriter.call` adds a call with all of these; `TracedModule.check` proves that all nodes have them.

CALLS = ("call_function", "call_method")
_Kinds = Mapping[str, tuple[type, ...]]
_TENSOR: _Kinds = {"spec": (TensorSpec,), "requires_grad": (bool,), "storage": (int,), "storage_bytes": (int,)}
_STATE: _Kinds = {**_TENSOR, "key": (str,)}
_CALL: _Kinds = {
    "modules": (tuple,),
    "source": (SourceLine, type(None)),
    "grad": (bool,),
    "autocast": (tuple,),
    "is_random": (bool,),
}


def check_meta(node: fx.Node) -> None:
    """Checks that a node of a captured graph is described."""
    if node.op == "output":
        return
    if node.op not in ("placeholder", "get_attr", *CALLS):
        raise TraceError(
            f"node `{node.name}` is a `{node.op}`.\n"
            "  A captured graph consists of inputs, state, calls of functions and methods, and one output.\n"
            "  Call the function itself, with the parameters that it needs as operands."
        )
    if node.op == "placeholder":
        _check_keys(node, _TENSOR)
    elif node.op == "get_attr":
        _check_keys(node, _STATE)
    else:
        _check_keys(node, _CALL)
        if "spec" in node.meta or _is_read_as_tensor(node):
            _check_keys(node, _TENSOR)
        _check_modules(node)
        _check_writes(node)


def _is_read_as_tensor(node: fx.Node) -> bool:
    """Tells whether anything but `getitem` reads the result: then it is one tensor, not several."""
    return any(user.target is not operator.getitem for user in node.users)


def _check_keys(node: fx.Node, kinds: _Kinds) -> None:
    for key, types in kinds.items():
        if key not in node.meta:
            refuse_meta(node, f"has no `{key}` in its meta")
        if not isinstance(node.meta[key], types):
            expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
            refuse_meta(node, f"has {named(node.meta[key])} as `{key}` in its meta, not {expected}")


def _check_modules(node: fx.Node) -> None:
    for call in node.meta["modules"]:
        if not (isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], str) and isinstance(call[1], int)):
            refuse_meta(node, "has in `modules` of its meta something other than `(name, number)`")


def _check_writes(node: fx.Node) -> None:
    writes: Any = node.meta.get("writes", ())
    if not isinstance(writes, tuple):
        refuse_meta(node, f"has {named(writes)} as `writes` in its meta, not a tuple of nodes")
    for written in writes:
        if not isinstance(written, fx.Node) or written.graph is not node.graph:
            refuse_meta(node, "has something other than nodes of this graph in `writes` of its meta")


def refuse_meta(node: fx.Node, what: str) -> NoReturn:
    """Raises the error for a node that isn't described as it must be."""
    raise TraceError(
        f"node `{node.name}` {what}.\n"
        "  Passes and checks read the properties of a node from its meta; see megatrain/tracer/spec.py for "
        "the keys.\n"
        "  Add nodes with `Rewriter.call`, which fills in the whole meta."
    )


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Returns `(device type, dtype)` for the CPU and the accelerator, where autocast is on."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_kinds() if torch.is_autocast_enabled(d))
