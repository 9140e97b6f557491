"""Memory of the state that isn't one tensor's alone: two tensors share it, or somebody else holds it as well."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch

from megatrain.base.torch_private import storage_use_count
from megatrain.errors import ExecuteError, HeldMemoryWarning


def check_unshared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that each tensor of a model's state can get memory of its own.

    Raises:
        ExecuteError: Naming two that share memory.
    """
    ranges: list[tuple[int, int, int, str]] = []
    for key, tensor in {id(tensor): (key, tensor) for key, tensor in tensors.items()}.values():
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


def held_elsewhere(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Finds the tensors whose memory somebody else may hold: another tensor, its NumPy array, another process.

    An array from which a tensor was made (`torch.from_numpy`) isn't seen: torch holds it, and tells nobody. Several
    tensors may be parts of one memory, which they hold together.
    """
    groups: dict[int, list[str]] = {}
    for key, tensor in {id(tensor): (key, tensor) for key, tensor in tensors.items()}.values():
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(key)
    return [key for keys in groups.values() if _is_held([tensors[key] for key in keys]) for key in keys]


def warn_of_holders(keys: Sequence[str], what: str, way_out: str) -> None:
    """Warns that somebody else holds the memory of some of the state.

    Args:
        keys: Of the state; none for no warning.
        what: Happens to it, after "somebody else holds the memory of ... as well, ".
        way_out: A sentence.
    """
    if keys:
        more = f" and {len(keys) - 3} others" if len(keys) > 3 else ""
        names = ", ".join(f"`{key}`" for key in keys[:3]) + more
        warnings.warn(
            f"somebody else holds the memory of {names} as well, {what}.\n"
            "  That is another tensor over it (a view, an old `p.data`, a state_dict), its array, or another process.\n"
            f"  {way_out}",
            HeldMemoryWarning,
            stacklevel=2,
        )


PARTED = "and from now on the two have memory of their own: neither sees what the other writes"
IN_PLACE = (
    "so it stays where it is, and the host copies it once more on its way to the device",
    "Drop the other before the first call, if nobody needs it.",
)


def _is_held(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether somebody else holds a memory that these tensors have together."""
    of_tensors, of_python = _holders(tensors[0])
    alone = _alone()
    # A view keeps the tensor that it was made of, which nobody else may have.
    bases = dict(_base(tensor) for tensor in tensors if tensor._base is not None)
    known = {id(tensor) for tensor in tensors} | {base for base, names in bases.items() if names <= alone[2]}
    is_held = of_tensors - alone[0] >= len(known) or of_python > alone[1]
    return is_held or tensors[0].untyped_storage().is_shared()


@cache
def _alone() -> tuple[int, int, int]:
    return *_holders(torch.empty(1)), _base(torch.empty(2)[:1])[1]


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors use a memory, and how many names in Python its storage has; both count a few more."""
    storage = tensor.untyped_storage()
    return storage_use_count(storage._cdata), sys.getrefcount(storage)


def _base(view: torch.Tensor) -> tuple[int, int]:
    """What a view was made of, and how many names in Python that has."""
    return id(view._base), sys.getrefcount(view._base)
