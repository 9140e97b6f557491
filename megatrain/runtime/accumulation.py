"""Accumulation of gradients over micro-batches, and of whole ones into `.grad` with hooks, as autograd does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from megatrain.base.torch_private import foreach_norm
from megatrain.errors import ExecuteError, HookOrderWarning
from megatrain.runtime.stores.device_memory import Meter, Storages
from megatrain.tracer.block_image import has_strides_of
from megatrain.tracer.spec import NORMED, TensorSpec

ParameterGradient = tuple[torch.Tensor | None, bool]
"""A parameter's gradient, or None, and whether others hold its memory too."""


def marked(gradients: Sequence[torch.Tensor | None], meter: Meter) -> tuple[list[ParameterGradient], Storages]:
    """Marks each gradient whose memory is also that of a value, or of another gradient.

    Args:
        gradients: Of a block's state.
        meter: Knows what others hold.

    Returns:
        The gradients, and their storages as `Meter.hold_storages` takes them.
    """
    found = [gradient for gradient in gradients if gradient is not None]
    storages = meter.storages_of(found)
    are_apart = len(storages) == len(found) and not meter.holds_any(storages)
    if are_apart and all([gradient.layout == torch.strided for gradient in found]):
        return [(gradient, False) for gradient in gradients], storages
    places = [None if g is None or g.layout != torch.strided else g.untyped_storage().data_ptr() for g in gradients]
    count = Counter(places)
    return [
        (g, g is not None and (meter.has(g) or (place is not None and count[place] > 1)))
        for g, place in zip(gradients, places, strict=True)
    ], storages


def added(
    known: Sequence[ParameterGradient] | None, found: Sequence[ParameterGradient]
) -> tuple[list[ParameterGradient], Callable[[], None]]:
    """Adds one micro-batch's gradients to the sums of those before, in their order.

    Returns:
        The new sums, and the rest of the work, which takes no memory: until it runs, the old sums are as they were.
    """
    if not known:
        return [*found], _nothing
    in_place = [_adds_in_place(*pair) for pair in zip(known, found, strict=True)]
    sums = [
        old if is_in_place else _sum(old, new) for old, new, is_in_place in zip(known, found, in_place, strict=True)
    ]

    def add() -> None:
        for (total, _), (gradient, _), is_in_place in zip(sums, found, in_place, strict=True):
            if is_in_place and total is not None and gradient is not None:
                total.add_(gradient)

    return sums, add


def _nothing() -> None:
    pass


def _adds_in_place(before: ParameterGradient, now: ParameterGradient) -> bool:
    """Tells whether nothing else uses the memory of the sum so far."""
    (total, is_shared), (gradient, _) = before, now
    if total is None or gradient is None or is_shared or total.layout != torch.strided:
        return False
    return total.untyped_storage().nbytes() == total.nbytes


def _sum(before: ParameterGradient, now: ParameterGradient) -> ParameterGradient:
    """Adds a gradient to the sum of earlier ones, in memory of its own."""
    total, gradient = before[0], now[0]
    if total is None or gradient is None:
        return now if total is None else before
    return summed(total, gradient), False


Take = Callable[[str, torch.Tensor], None]
"""Takes a parameter's key and its whole gradient, and may keep it. A taker that doesn't keep all has a method
`keeps(key) -> bool`: whether it, or somebody that it gives them to, will keep the memory of the next gradient."""


Hear = Callable[[str, torch.Tensor], None]
"""Takes a parameter's key and the norm of the whole gradient that a `Take` gets next."""


def whole_norms(
    keys: Sequence[str], gradients: Sequence[ParameterGradient], completes: Collection[str]
) -> tuple[Sequence[str], torch.Tensor] | None:
    """Takes the L2 norms of those of a block's gradients that are whole where they are made; None if none is.

    `clip_grad_norm_` calls the same function there, which sums the squares of each tensor by itself, in fp32 and in an
    order that depends on its size alone. So each norm has the bits of eager's.

    Args:
        keys: Of the parameters, in the order of `gradients`.
        completes: Keys of those to which no other block has added, or will.

    Returns:
        Keys, and the norm of each in fp32, as one tensor where the gradients are.
    """
    uses = Counter(keys)
    found = {
        key: gradient
        for key, (gradient, _) in zip(keys, gradients, strict=True)
        if key in completes and uses[key] == 1 and gradient is not None
        if gradient.layout == torch.strided and gradient.dtype in NORMED
    }
    return ([*found], torch.stack(foreach_norm([*found.values()], 2.0, dtype=torch.float32))) if found else None


class Accumulation:
    """Takes gradients into `.grad`."""

    def __init__(self, parameter_of: Callable[[str], torch.Tensor]):
        self._parameter_of = parameter_of

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        """See `Take`."""
        accumulate(self._parameter_of(key), gradient)

    def keeps(self, key: str) -> bool:
        """See `Take`."""
        return keeps_gradient(self._parameter_of(key))


def keeps_gradient(parameter: torch.Tensor) -> bool:
    """Tells whether `accumulate` will keep a gradient's memory, in `.grad` or in a hook; otherwise it only adds."""
    grad = parameter.grad
    return grad is None or grad.is_sparse or bool(parameter._backward_hooks)  # pyright: ignore


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds `gradient` to `parameter.grad`, running the hooks that the user put on the parameter.

    Hooks on a parameter act on its whole gradient; the streamed copies never carry them.
    """
    gradient = hooked(parameter, gradient)
    if parameter.grad is None:
        parameter.grad = laid_out(gradient, parameter)
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = summed(parameter.grad, gradient)
    else:
        parameter.grad.add_(gradient)
    post = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    for hook in (post or {}).values():
        hook(parameter)


def hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's whole gradient after its `register_hook` hooks."""
    for hook in (parameter._backward_hooks or {}).values():  # pyright: ignore[reportPrivateUsage]
        replaced = hook(gradient)
        if replaced is not None:
            check_kind(replaced, gradient_form(gradient))
            gradient = replaced
    return gradient


def is_hooked(parameter: torch.Tensor) -> bool:
    """Tells whether the user's code gets the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # pyright: ignore


def warn_of_order(
    groups: Sequence[Sequence[str]], tells: Callable[[str], bool], runs_in_backward: Callable[[], bool]
) -> None:
    """Warns of hooks whose order in eager isn't known, or isn't theirs here.

    Args:
        groups: The parameters in the order of their gradients; see `GradientOrder.groups`.
        tells: Whether one of them has hooks.
        runs_in_backward: Whether code of the user's runs in the backward of modules; asked if there are hooks.
    """
    hooked = next((key for group in groups for key in group if tells(key)), None)
    if hooked is not None and runs_in_backward():
        warnings.warn(
            f"hooks on gradients, such as that of `{hooked}`, run after the hooks in the backward of later modules.\n"
            "  Gradients leave the device while the backward goes on; eager runs these hooks in turns.\n"
            "  Let hooks of the two kinds neither draw random numbers nor depend on each other.",
            HookOrderWarning,
            stacklevel=2,
        )
        return
    for group in groups:
        if len(group) > 1 and len(names := [f"`{key}`" for key in group if tells(key)]) > 1:
            warnings.warn(
                f"hooks on the gradients of {', '.join(names)} may run in another order than in eager.\n"
                "  One operation makes these gradients at once, and autograd has no fixed order among them.\n"
                "  Let these hooks neither draw random numbers nor depend on each other.",
                HookOrderWarning,
                stacklevel=2,
            )
            return


def check_kind(gradient: Any, kind: str) -> None:
    """Refuses a hook's result if an update couldn't use it instead of the gradient."""
    found = gradient_form(gradient) if isinstance(gradient, torch.Tensor) else type(gradient).__name__
    if found != kind:
        raise ExecuteError(
            f"a hook on a gradient made {found} of {kind}.\n"
            "  As in autograd, a gradient keeps its shape and dtype.\n"
            "  Return a tensor like the hook's argument, or None to keep the gradient."
        )


def gradient_form(gradient: torch.Tensor) -> str:
    """Describes the properties that a hook must not change."""
    layout = "" if gradient.layout == torch.strided else f" {str(gradient.layout).removeprefix('torch.')}"
    return f"{TensorSpec(tuple(gradient.shape), gradient.dtype)}{layout} on {gradient.device}"


def summed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Adds two gradients; torch adds a sparse one to a dense one, but not the other way round."""
    return right + left if left.is_sparse and not right.is_sparse else left + right


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Gives a gradient the strides of its parameter, as autograd does: sums over it round accordingly."""
    if has_strides_of(gradient, parameter):
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
