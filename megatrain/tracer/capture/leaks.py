"""Makes sure that no tensor of a capture, which has no values, stays with the user."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from types import FrameType

import torch

from megatrain.errors import TraceError


class Made:
    """The tensors of one capture, followed weakly, with the place in the model that made each.

    Args:
        tensors: Tensors and places.
    """

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, str]]) -> None:
        self._made = [(weakref.ref(tensor), place) for tensor, place in tensors]

    def check(self) -> None:
        """Looks for tensors that Python code holds although the capture is over and has let go of them.

        Raises:
            TraceError: If there are any: the user would find tensors without values, at every later call too.
        """
        held = self._held()
        if held:
            gc.collect()  # what only refers to itself is nobody's
            held = self._held()
        if not held:
            return
        place = next(place for ref, place in self._made if id(ref()) in held)
        raise TraceError(
            f"the forward leaves a tensor, made {place}, where a capture can't follow it.\n"
            "  A capture follows attributes of modules, and variables and objects that the model's code or its "
            "hooks name.\n"
            "  Keep the tensor in one of these places, or return it from the model."
        )

    def _held(self) -> set[int]:
        """Identities of what is held by those who hold one of the tensors."""
        alive = [tensor for tensor in (ref() for ref, _ in self._made) if tensor is not None]
        # One look over all objects; autograd, which also keeps tensors, isn't among them.
        holders = gc.get_referrers(*alive) if alive else []
        others = [holder for holder in holders if holder is not alive and not isinstance(holder, FrameType)]
        return {id(item) for holder in others for item in gc.get_referents(holder)}
