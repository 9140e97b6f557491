"""What must hold before state moves into the host store; nothing is allocated or changed until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatrain.errors import ExecuteError
from megatrain.memory.available import available_bytes
from megatrain.memory.unshared import check_unshared
from megatrain.runtime.stores.weights import Weights, check_replaceable
from megatrain.sizes import aligned, format_bytes
from megatrain.tracer.spec import TensorSpec


def check_movable(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], weights: Weights | None
) -> None:
    """Refuses tensors that can't be moved faithfully: no values, another spec, or memory shared by two keys."""
    for key, tensor in tensors.items():
        spec = specs[key]
        if tensor.is_meta and (weights is None or key not in weights):
            raise ExecuteError(f"`{key}` is on the meta device and has no values; load it before the first call.")
        check_replaceable(key, tensor)
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ExecuteError(f"`{key}` is {TensorSpec.of(tensor)}, but the model was compiled for {spec}.")
    check_unshared(tensors)


def check_room(moves: Sequence[tuple[torch.Tensor, TensorSpec]], alignment: int) -> None:
    """Compares the memory that moving takes, beyond the tensors' present memory, with the host's.

    Each tensor is copied and then frees its own memory, so that the most that is needed at once is padding
    plus the largest tensor, unless several tensors share one storage: that is freed with the last of them.

    Raises:
        ExecuteError: With both numbers.
    """
    left: dict[int, list[int]] = {}
    for tensor, _ in moves:
        storage = tensor.untyped_storage()
        nbytes, count = left.setdefault(storage.data_ptr(), [0 if tensor.is_meta else storage.nbytes(), 0])
        left[storage.data_ptr()] = [nbytes, count + 1]
    surplus = needed = total = 0
    for tensor, spec in moves:
        total += aligned(spec.nbytes, alignment)
        surplus += aligned(spec.nbytes, alignment)
        needed = max(needed, surplus)
        entry = left[tensor.untyped_storage().data_ptr()]
        entry[1] -= 1
        surplus -= entry[0] if entry[1] == 0 else 0
    available = available_bytes()
    if needed > available:
        raise ExecuteError(
            f"moving the model's state into the host store needs {format_bytes(needed)} more host memory, "
            f"{format_bytes(available)} are available.\n"
            f"  The store takes {format_bytes(total)}; the present memory of the state is freed tensor by tensor.\n"
            "  Free host memory, or use a machine with more."
        )
