"""Overlap: tensors of the state that share memory without being one tied tensor."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from megatrain.errors import ExecuteError


def check_unshared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that each tensor of a model's state can get memory of its own.

    Raises:
        ExecuteError: Naming two that share memory.
    """
    ranges: list[tuple[int, int, int, str]] = []
    for key, tensor in tensors.items():
        if tensor.numel():
            span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            # Tensors on meta have no addresses, but know their storage and where they start in it.
            storage = tensor.untyped_storage()._cdata if tensor.is_meta else 0
            start = int(tensor.storage_offset()) * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
            ranges.append((storage, start, start + span * tensor.element_size(), key))
    ranges.sort()
    for (one, _, end, first), (other, start, _, second) in pairwise(ranges):
        if one == other and start < end:
            raise ExecuteError(
                f"`{first}` and `{second}` share memory, but not as one tied tensor.\n"
                "  Each tensor of the state gets its own place on the host, so a write to one would no longer\n"
                "  reach the other.\n"
                "  Tie them (assign the same Parameter to both), or clone one."
            )
