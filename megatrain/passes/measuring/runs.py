"""Runs on fake tensors, which measure the bytes and the kernels of a forward and of its backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from megatrain.hardware.work import Works
from megatrain.memory.block_image import has_strides_of
from megatrain.passes.measuring.kernel_work import KernelWork
from megatrain.passes.measuring.live_bytes import LiveBytes, is_on
from megatrain.passes.rewrites.alike_parts import AlikeParts
from megatrain.tracer.packed.packing import plain_tensors

Run = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""What is run: a `Code`, or one with all else that its call needs."""


class Workspace(NamedTuple):
    """What is alive within a run beyond what stays.

    Args:
        nbytes: Most bytes at once.
        parts: The bytes of each tensor of them, and of a kernel's own buffers.
    """

    nbytes: int
    parts: tuple[int, ...]


def measure_forward(
    code: Run, arguments: list[torch.Tensor], device: torch.device, alike: AlikeParts
) -> tuple[Workspace, Works]:
    """Returns what is alive within a forward beyond its arguments and outputs, and its kernels."""
    with LiveBytes(arguments, device) as live, KernelWork(device, alike) as kernels:
        outputs = code(arguments)
    own = storage_sizes([t for t in outputs if is_on(t, device)], beyond=[])
    return Workspace(max(0, live.peak - sum(own)), _without(live.peak_parts, own)), kernels.take()


def measure_backward(
    code: Run,
    arguments: list[torch.Tensor],
    num_inputs: int,
    device: torch.device,
    *,
    runs_backward: bool,
    alike: AlikeParts,
    held: Sequence[torch.Tensor] = (),
) -> tuple[list[int], Workspace | None, Works]:
    """Measures a forward under autograd, and its backward.

    Args:
        code: The forward.
        arguments: Leaves.
        num_inputs: How many of them are inputs; the rest is state.
        device: The compute device.
        runs_backward: Whether there is a backward.
        alike: Which parts of what runs are computed.
        held: Tensors that don't count.

    Returns:
        The bytes of each tensor that is saved, what is alive beyond arguments and gradients (None without a backward),
        and the kernels of the backward.
    """
    saved: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        saved.extend(weakref.ref(inner) for inner in plain_tensors(kept))
        return kept

    with LiveBytes([*arguments, *held], device) as live:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = code(arguments)
        # Tensors that only a dead branch had saved are gone by now.
        alive = [t for t in (ref() for ref in saved) if t is not None and is_on(t, device)]
        saved_parts = storage_sizes(alive, beyond=[*arguments, *outputs])
        del alive
        # A view of a weight made under no_grad says that it requires grad, but has no history.
        # A step's backward runs without the outputs. Here they stay and count: an allocator's rounding needs room.
        with_history = [o for o in outputs if o.grad_fn is not None]
        seeds = [torch.ones_like(o) for o in with_history]
        roots = [get_gradient_edge(o) for o in with_history]
        leaves = [a for a in arguments if a.requires_grad]
        gradients: Any = ()
        if not runs_backward:
            return saved_parts, None, ()
        with KernelWork(device, alike) as kernels:
            if roots and leaves:
                gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    there = [g for g in gradients if g is not None and is_on(g, device)]
    made = [part.untyped_storage().nbytes() for g in there for part in _parts(g)]
    pairs = zip(gradients, leaves, strict=False)
    state = {id(a) for a in arguments[num_inputs:]}
    # The runtime gives them the strides of their parameters, one after the other.
    copied = [g.nbytes for g, leaf in pairs if g is not None and id(leaf) in state and not has_strides_of(g, leaf)]
    workspace = Workspace(max(0, live.peak - sum(made), *copied), _without(live.peak_parts, made))
    return saved_parts, workspace, kernels.take()


def _without(parts: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted((Counter(parts) - Counter(others)).elements(), reverse=True))


def _parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a gradient consists of: itself, or those of a sparse one."""
    return (gradient._indices(), gradient._values()) if gradient.layout == torch.sparse_coo else (gradient,)


def storage_sizes(tensors: Sequence[torch.Tensor], beyond: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each of the distinct storages of `tensors` that none of `beyond` shares."""
    known = {t.untyped_storage()._cdata for t in beyond}  # pyright: ignore[reportPrivateUsage]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}  # pyright: ignore[reportPrivateUsage]
    return [size for key, size in sizes.items() if key not in known]
