"""model_and_inputs(): a model with the arguments of a call, as a function of the user's returns them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain.errors import OptionError


def model_and_inputs(made: Any, who: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Takes `(model, inputs)` apart: a tensor, a tuple of arguments, a dict of keyword arguments, or the last two.

    Args:
        made: What a function of the user's returned.
        who: The function, for the error.

    Returns:
        The model, and the arguments of its forward.

    Raises:
        OptionError: If it isn't that.
    """
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        kinds = ", ".join(type(x).__qualname__ for x in (made if isinstance(made, tuple) else (made,)))
        what = f"({kinds})" if isinstance(made, tuple) else f"a {kinds}"
        raise OptionError(
            f"{who} returned {what}.\n  The function must return (model, inputs), where model is an nn.Module.\n"
            "  Write `return model, (x,)`."
        )
    model, inputs = made
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and _is_keywords(inputs[1]):
        return model, inputs[0], dict(inputs[1])
    if isinstance(inputs, tuple):
        return model, inputs, {}
    if _is_keywords(inputs):
        return model, (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return model, (inputs,), {}
    raise OptionError(
        f"{who} returned inputs of type {type(inputs).__qualname__}.\n"
        "  Inputs are a tensor, a tuple of arguments, a dict of keyword arguments by name, or a pair (tuple, dict).\n"
        "  Write `return model, (x,)` or `return model, {'input_ids': ids}`."
    )


def _is_keywords(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)
