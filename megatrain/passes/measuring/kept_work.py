"""What a block may keep of a forward that is repeated: which calls' results, and what that costs and spares."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from megatrain.hardware.work import Works, total_flops
from megatrain.passes.interpret import Code
from megatrain.passes.kept_results import HandedResults, NotedResults, is_kept
from megatrain.passes.measuring.kernels import KernelWork, LiveBytes, is_of_flash_attn, is_on, kernel_flops
from megatrain.passes.measuring.runs import measure_backward, storage_sizes
from megatrain.passes.program import ResultCost
from megatrain.tracer.packing import has_wrappers
from megatrain.tracer.spec import TensorSpec

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
