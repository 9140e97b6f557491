"""What a capture can't follow, said with the user's line, the rule and the way out."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from megatrain.errors import TraceError
from megatrain.tracer.source import SourceLine, user_line
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.targets import call_name, is_property_get, is_property_set


def refuse(what: str, rule: str, way_out: str) -> NoReturn:
    """Raises the error for something that the model does at the current line."""
    raise TraceError(f"the model {what} at {user_line()}.\n  {rule}\n  {way_out}")


def refuse_read(source: SourceLine | None, name: str) -> NoReturn:
    """Raises the error for a value that isn't known before the step."""
    raise TraceError(
        f"the model reads the value of a tensor at {source} (`{name}`).\n"
        "  The tensor depends on weights or random numbers, so the plan can't be fixed before the step.\n"
        "  Use torch.where or masking instead of a Python branch."
    )


def refuse_unknown(tensor: torch.Tensor) -> NoReturn:
    """Raises the error for a tensor that no recorded call made."""
    refuse(
        f"uses a tensor {TensorSpec.of(tensor)} that appears from nowhere",
        "A capture knows the inputs, the registered parameters and buffers, and what is computed from them.",
        "Register it as a parameter or buffer, or detach it.",
    )


def refuse_kept() -> NoReturn:
    """Raises the error for a tensor that an earlier call of the model left behind."""
    refuse(
        "uses a tensor of an earlier call, kept in an attribute,",
        "A capture would use the first one for ever.",
        "Keep it in a registered buffer, or pass it as an input.",
    )


def check_call(func: Any, kwargs: dict[str, Any]) -> None:
    """Refuses calls whose effect no node of a graph can repeat.

    Raises:
        TraceError: If `func` is one of them.
    """
    name = call_name(func)
    if is_property_get(func) and name == "grad":
        refuse(
            "reads `.grad` of a tensor",
            "Gradients live outside the forward that is captured.",
            "Read gradients after the backward, outside the model.",
        )
    if is_property_set(func):
        refuse(
            f"assigns to `.{name}` of a tensor",
            "A capture sees calls, not assignments behind autograd's back.",
            "Use an in-place operation under torch.no_grad().",
        )
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        refuse(
            "uses a transform of torch.func",
            "Calls inside a transform run on wrapped tensors that no graph can name.",
            "Write the batched computation out, or put it into a torch.library.custom_op.",
        )
    if kwargs.get("generator") is not None:
        refuse(
            "draws from a generator of its own",
            "A recompute restores the default generators only.",
            "Draw from the default generator.",
        )


def call_on_fakes(func: Any, args: Any, kwargs: Any, line: SourceLine | None, name: str) -> Any:
    """Calls `func` on fake tensors; an error of torch's says so, and keeps its type and message.

    Usually the error is the model's own mistake. But some shape rules refuse what their kernels accept, and only who
    knows that the call ran without data can tell.
    """
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        error.add_note(f"`{name}` was captured on fake tensors, at {line}")
        raise
