"""Effects of a recorded call below the level at which it was recorded, and hooks on what autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatrain.base.torch_private import TorchDispatchMode, dispatch_modes, function_modes, top_saved_tensors_hooks
from megatrain.tracer.packing import has_wrappers

# The schemas of these kernels don't say that they write running statistics, yet they do when training.
_WRITES_STATISTICS = {
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}
# Their dropout has a generator of its own in the library's memory, which torch seeds now and then. No state of torch's
# generators repeats what it draws.
_RNNS = ("aten::_cudnn_rnn", "aten::miopen_rnn")
# These are tagged, and draw nothing without dropout. Of cuDNN's nobody here has looked.
_ATTENTIONS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
)
# The last two aren't tagged.
_VALUE_DEPENDENT = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    "aten::_pack_padded_sequence",
    "aten::_pad_packed_sequence",
}


class EffectWatch(TorchDispatchMode):
    """Collects the effects of one recorded call: what it writes in place, random draws, use of values.

    Args:
        on_read: Called with each tensor that an operation reads, before it runs.
        on_write: Called with each tensor that an operation writes, before it runs.
        draw: Makes the call of each operation that may draw random numbers, and tells whether it did.
    """

    def __init__(
        self,
        on_read: Callable[[torch.Tensor], None],
        on_write: Callable[[torch.Tensor], None],
        draw: Callable[[Callable[[], Any]], tuple[Any, bool]],
    ) -> None:
        super().__init__()
        self._draw = draw
        self._on_read = on_read
        self._on_write = on_write
        self.clear()

    def clear(self) -> None:
        """Forgets what was collected, before the next call."""
        self.written: list[torch.Tensor] = []
        self.is_random = False
        self.hides_draws = False
        self.is_value_dependent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # C++ asks these questions in places where an error ends the process.
            return func(*args, **kwargs)
        if has_wrappers(types):
            return NotImplemented  # its class computes with plain tensors, and comes here again with these
        is_tagged = _may_draw(func, args, kwargs)
        self.hides_draws |= is_tagged and func._schema.name in _RNNS
        self.is_random |= is_tagged
        is_value_dependent = not _VALUE_DEPENDENT.isdisjoint((*func.tags, func._schema.name))
        self.is_value_dependent |= is_value_dependent and not _picks_by_number(func, args)
        for item in (*args, *kwargs.values()):
            for tensor in item if isinstance(item, list | tuple) else (item,):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    self._on_read(tensor)
        schema = func._schema
        # An empty tensor that takes over a storage writes nothing into it: cuDNN's RNNs look at their weights so.
        takes_over = schema.name == "aten::set_" and args[0].numel() == 0
        if schema.is_mutable and not takes_over and not gives_own_memory(func, args):
            self._collect(schema.arguments, args, kwargs)
        statistics = _WRITES_STATISTICS.get(schema.name.removeprefix("aten::"))
        if statistics is not None and args[statistics[2]]:
            self._write([args[i] for i in statistics[:2]])
        if not is_tagged and func.namespace == "aten":
            return func(*args, **kwargs)
        # An operation of the user's may draw without a word.
        result, has_drawn = self._draw(lambda: func(*args, **kwargs))
        self.is_random |= has_drawn
        return result

    def _collect(self, arguments: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            self._write(value if isinstance(value, list | tuple) else [value])

    def _write(self, values: Any) -> None:
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                self._on_write(tensor)
                self.written.append(tensor)


def _may_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Tells whether an operation says that it draws; of some the tag says so in any case."""
    if func._schema.name in _RNNS:
        return _has_dropout(func, args)
    if func._schema.name in _ATTENTIONS:
        return _given(func, args, kwargs, "dropout_p") != 0
    return torch.Tag.nondeterministic_seeded in func.tags


def _has_dropout(func: Any, args: Any) -> bool:
    place = [argument.name for argument in func._schema.arguments].index("dropout")
    dropout, is_training = args[place : place + 2]
    return bool(dropout and is_training)


def _given(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of an argument of a call."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    raise AssertionError(f"{func} has no {name}")


def gives_own_memory(func: Any, args: Any) -> bool:
    """Tells whether a tensor is given the memory that it has: `torch.nn.utils.parametrize` does so to parameters."""
    return func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]


class ByteCount(TorchDispatchMode):
    """Adds up the bytes of all results while it is active: no code can hold more for its backward.

    Args:
        is_calling: Tells whether a torch function is running; what runs outside any is TorchScript or C++.
    """

    def __init__(self, is_calling: Callable[[], bool]) -> None:
        super().__init__()
        self._is_calling = is_calling
        self.nbytes = 0
        self.has_stray = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_stray |= not self._is_calling() and func.namespace != "prim"
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.nbytes += _bytes_of(item)
        return result


def _bytes_of(tensor: torch.Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes if tensor.layout == torch.strided else tensor.numel() * tensor.itemsize


def _picks_by_number(func: Any, args: Any) -> bool:
    """Tells whether a call indexes with numbers only: its result has the shape of its indices, whatever they hold."""
    if func._schema.name != "aten::index":
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def has_hooks() -> bool:
    """Tells whether any hooks on saved tensors are active."""
    return _active() is not None


_OWN = ("torch", __name__.partition(".")[0])


def is_watched() -> bool:
    """Tells whether Python sees each call: hooks on saved tensors, modes, or the search for anomalies.

    Function modes of torch itself only choose the device of new tensors (`torch.set_default_device`), and those of
    ours look at what comes out.
    """
    if has_hooks() or dispatch_modes() or torch.is_anomaly_enabled():
        return True
    return any(type(mode).__module__.partition(".")[0] not in _OWN for mode in function_modes())


def has_users_hooks() -> bool:
    """Tells whether the active hooks are the user's, which may change what a backward computes with.

    Those of torch (checkpoints, `save_on_cpu`) only move tensors or compute them again.
    """
    hooks = _active()
    if hooks is None:
        return False
    package = str(getattr(hooks[0], "__module__", "")).partition(".")[0]
    return package not in _OWN


def _active() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    return top_saved_tensors_hooks(False)
