"""DeadOutput: stands for a result of the model that a training step doesn't compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatrain.errors import ExecuteError
from megatrain.tracer.calls import call_name, is_property_get
from megatrain.tracer.spec import TensorSpec

# They look at a tensor without its values, or give back one with the same values.
_HARMLESS = frozenset("size dim numel element_size is_floating_point is_complex float half bfloat16 detach".split())


class DeadOutput(torch.Tensor):
    """A tensor without values, of the shape and dtype of a result that isn't computed; to read it is an error."""

    @staticmethod
    def of(spec: TensorSpec) -> DeadOutput:
        """Returns the stand-in of a result."""
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta").as_subclass(DeadOutput)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> DeadOutput:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "<a result that this training step doesn't compute>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises at all that needs values.

        Raises:
            ExecuteError: Saying who may read the result.
        """
        if is_property_get(func) or call_name(func) in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs)
        raise ExecuteError(
            f"`{call_name(func)}` reads a result of the model that this training step doesn't compute.\n"
            "  A step on the model's own loss computes no logits, hidden states or caches that only the caller would "
            "read.\n"
            '  Give TrainStep a loss= that reads it, without reads="loss".'
        )
