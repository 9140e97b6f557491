"""KeptResults: what fused kernels returned in a forward, handed out again where it is repeated; and what is worth it.

A call of attention runs one fused kernel, whose results (the output, and the statistics of its rows) are what its
backward needs. Autograd is above the dispatcher: a repeated call whose kernel isn't run, because its results are there,
gets the same node with the same saved tensors, and so the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from megatrain.base.torch_private import TorchDispatchMode
from megatrain.device import is_on_host
from megatrain.errors import ExecuteError
from megatrain.hardware.work import Works, total_flops
from megatrain.passes.interpret import Code
from megatrain.passes.kernels import KernelWork, LiveBytes, is_attention, is_of_flash_attn, is_on, kernel_flops
from megatrain.passes.measured_runs import measure_backward, storage_sizes
from megatrain.passes.program import Block, Program, ResultCost, has_backward
from megatrain.tracer.packing import has_wrappers
from megatrain.tracer.spec import TensorSpec

# The state of a random generator, as a kernel returns it with its other results.
_MOST_OF_A_STATE = 2


class _Place(NamedTuple):
    """Stands for a tensor that is kept: its number."""

    number: int


class _Unused(NamedTuple):
    """Stands for the generator's state of a kernel that drew nothing, which its backward doesn't read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Kernel(NamedTuple):
    """A kernel that ran, in which of the calls, and what it returned: tensors that are kept are places."""

    call: int
    func: Any
    returned: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KeptResults:
    """The results of the fused kernels below some calls, in the order in which they ran."""

    kernels: tuple[_Kernel, ...]
    tensors: tuple[torch.Tensor, ...]

    def without_tensors(self) -> KeptResults:
        """The same, to be completed by `with_tensors`."""
        return replace(self, tensors=())

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> KeptResults:
        """The same, with the tensors again."""
        return replace(self, tensors=tuple(tensors))


class NotedResults(TorchDispatchMode):
    """Notes what fused kernels return. Entered around the calls whose results are kept, one after the other.

    Args:
        device: The compute device: tensors elsewhere aren't kept, but handed out as they are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._call = -1
        self._kernels: list[_Kernel] = []
        self._tensors: list[tuple[torch.Tensor, int]] = []

    def __enter__(self) -> Self:
        self._call += 1
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if is_kept(func, args, kwargs or {}):
            self._kernels.append(_Kernel(self._call, func, tuple(map(self._noted, result))))
        return result

    def _noted(self, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or result.numel() == 0 or not self._is_there(result):
            return result
        if not result.is_floating_point() and result.numel() <= _MOST_OF_A_STATE:
            return _Unused(result.shape, result.dtype, result.device)
        self._tensors.append((result, result._version))
        return _Place(len(self._tensors) - 1)

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return is_on_host(self._device) or not is_on_host(tensor)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has written into a result since its kernel returned it."""
        return all(tensor._version == version for tensor, version in self._tensors)

    def taken(self) -> KeptResults:
        """What was noted, without the history that autograd gave it since."""
        if not self.is_unchanged:
            raise ExecuteError(_WRITTEN)
        tensors, self._tensors = [tensor.detach() for tensor, _ in self._tensors], []
        return KeptResults(tuple(self._kernels), tuple(tensors))


class HandedResults(TorchDispatchMode):
    """Hands kept results out in place of running their kernels. Entered around the same calls, in the same order.

    Args:
        kept: With its tensors. A call that runs another kernel than in the forward runs it.
    """

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._call = -1
        self._kernels = kept.kernels
        self._left: list[_Kernel] = []
        self._tensors = [(tensor, tensor._version) for tensor in kept.tensors]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented
        if is_kept(func, args, kwargs or {}) and self._left:
            kernel = self._left.pop(0)
            if kernel.func is func:
                return tuple(map(self._handed, kernel.returned))
            self._left = []  # the call takes another way than in the forward
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        # Each call finds its own: one that takes another way leaves those of the next one alone.
        self._call += 1
        self._left = [kernel for kernel in self._kernels if kernel.call == self._call]
        super().__enter__()
        return self

    def _handed(self, result: Any) -> Any:
        if isinstance(result, _Unused):
            return torch.zeros(result.shape, dtype=result.dtype, device=result.device)
        if not isinstance(result, _Place):
            return result
        tensor, version = self._tensors[result.number]
        if tensor._version != version:
            raise ExecuteError(_WRITTEN)
        # A tensor of its own: autograd gives it a history.
        return tensor.detach()


def kept_results(program: Program) -> Iterator[tuple[Block, Sequence[tuple[str, TensorSpec]]]]:
    """Yields the blocks that may keep results, with the names and specs of these: values after the program's own."""
    for block in program.blocks:
        cost = program.templates[block.template].cost
        if cost is not None and cost.results is not None and has_backward(program, block):
            names = (f"result {number} of block {block.index}" for number in range(len(cost.results.specs)))
            yield block, tuple(zip(names, cost.results.specs, strict=True))


def is_kept(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Tells whether the results of a kernel may be handed out in place of another run.

    That is the forward of a fused attention: it returns statistics besides its output, writes into nothing, and
    draws no random numbers in this call. A run that drew some would have to move the generator on.
    """
    return _is_fused_attention(func) and not _draws(func, args, kwargs)


@functools.cache
def _is_fused_attention(func: Any) -> bool:
    schema = func._schema
    is_forward = is_attention(schema.name) and "backward" not in schema.name
    has_statistics = len(schema.returns) > 1 and all(part.alias_info is None for part in schema.returns)
    return is_forward and has_statistics and not schema.is_mutable


def _draws(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Tells whether a call of a kernel draws random numbers: one with dropout does."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return torch.Tag.nondeterministic_seeded in func.tags
    place = names.index("dropout_p")
    default = func._schema.arguments[place].default_value
    return (args[place] if place < len(args) else kwargs.get("dropout_p", default)) != 0


_WRITTEN = (
    "a result of attention that is kept for the backward was modified in place.\n"
    "  Its repeated call would hand out other numbers than its kernel.\n"
    '  Compile with activations="recompute", which keeps no results.'
)


# Which calls are worth it: what is kept costs memory and transfers, and spares the kernels of a repeated forward.

# For each byte that it keeps, a call computes at least so many FLOPs. The device with the fastest link to its host
# computes some 2200 while a byte crosses, and of a shorter text attention is a few percent of the work.
LEAST_FLOPS_PER_BYTE = 2048
# Of all bytes that a kernel of attention reads and writes, its results are at least this part, unless a mask is large;
# then there are many FLOPs per byte of the mask.
_PART = 16


def may_be_worth(forward: Works) -> bool:
    """Tells from the kernels of a forward whether there may be something to keep; most forwards need no further run."""
    return any(
        work.rate.endswith("attention") and _PART * work.flops >= LEAST_FLOPS_PER_BYTE * work.nbytes for work in forward
    )


def kept_cost(
    graphs: tuple[fx.Graph, fx.Graph, fx.Graph],
    leaves: list[torch.Tensor],
    num_inputs: int,
    device: torch.device,
    forward: Works,
) -> ResultCost | None:
    """The calls whose results are worth keeping, with what that costs; None if there are none.

    Args:
        graphs: The template's own, in which calls are counted; without calls whose shapes depend on values; and of a
            forward that is repeated.
        leaves: The arguments, without values.
    """
    original, graph, hollow = graphs
    worth = _WorthKeeping(device)
    outputs = _forward(Code(graph, see=worth.see, around=range(len(graph.nodes))), leaves, worth)
    names = worth.names(outputs)
    if not names:
        return None
    code = Code(graph, around=_places(graph, names))
    notes = NotedResults(device)
    with LiveBytes(leaves, device) as live:
        outputs = _forward(code, leaves, notes)
    kept = notes.taken()
    own = storage_sizes([t for t in (*outputs, *kept.tensors) if is_on(t, device)], beyond=[])
    del outputs
    with torch.no_grad(), KernelWork(device) as kernels:
        code(leaves, mode=HandedResults(kept))
    repeated = kernels.take()
    if total_flops(repeated) >= total_flops(forward):
        return None
    found = partial(Code(hollow, around=_places(hollow, names)), mode=HandedResults(kept))
    _, backward, _ = measure_backward(found, leaves, num_inputs, device, runs_backward=True, held=kept.tensors)
    assert backward is not None
    return ResultCost(
        calls=_places(original, names),
        specs=tuple(TensorSpec.of(tensor, device) for tensor in kept.tensors),
        forward_workspace_bytes=max(0, live.peak - sum(own)),
        backward_workspace_bytes=backward.nbytes,
        repeated=repeated,
    )


def _forward(code: Code, leaves: list[torch.Tensor], mode: AbstractContextManager[Any]) -> tuple[torch.Tensor, ...]:
    """Runs a forward as a block that is repeated does: under autograd, which saves nothing."""
    with torch.enable_grad(), saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
        return code(leaves, mode=mode)


class _WorthKeeping(NotedResults):
    """Finds the calls whose kernels compute much for each byte of their results."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._flops = 0
        self._seen = 0
        self._names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_kept(func, args, kwargs or {}):
            self._flops += kernel_flops(func, args, kwargs or {}, result)
        return result

    def see(self, node: fx.Node, _: Any) -> None:
        """Looks at what ran in a call."""
        nbytes = sum(tensor.nbytes for tensor, _ in self._tensors[self._seen :])
        if nbytes and _is_plain(node) and self._flops >= LEAST_FLOPS_PER_BYTE * nbytes:
            self._names.append(node.name)
            self._seen = len(self._tensors)
        del self._tensors[self._seen :]
        self._flops = 0

    def names(self, outputs: Sequence[torch.Tensor]) -> Sequence[str]:
        """The calls, if what they return is memory of its own, which nothing else writes into or hands on."""
        is_whole = all(tensor.nbytes == tensor.untyped_storage().nbytes() for tensor, _ in self._tensors)
        both = [*outputs, *(tensor for tensor, _ in self._tensors)]
        is_own = len(storage_sizes(both, beyond=outputs)) == len(self._tensors)
        return self._names if is_whole and is_own and self.is_unchanged else ()


def _places(graph: fx.Graph, names: Collection[str]) -> tuple[int, ...]:
    """Places of calls among the nodes of a graph."""
    return tuple(place for place, node in enumerate(graph.nodes) if node.name in names)


def _is_plain(node: fx.Node) -> bool:
    """Tells whether a call is one of torch's own functions: the code of others may look at what it is given."""
    if node.op == "call_method" or is_of_flash_attn(node.target):
        return True
    home = getattr(node.target, "__module__", None) or ""
    is_of_class = isinstance(node.target, type) or isinstance(getattr(node.target, "__self__", None), type)
    return home.partition(".")[0] == "torch" and not is_of_class
