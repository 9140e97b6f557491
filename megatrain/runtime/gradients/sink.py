"""Brings parameter gradients to the host and adds them to `.grad`, as autograd's own accumulation does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from megatrain import torch_private
from megatrain.device import Device
from megatrain.errors import ExecuteError, HookOrderWarning
from megatrain.passes.interpret import looks_in_backward
from megatrain.passes.program import Program
from megatrain.runtime.gradients.landing import Land, Landed, Landing, PlainLanding
from megatrain.scheduler.instructions import Bytes
from megatrain.tracer.inventory import StateEntry
from megatrain.tracer.spec import TensorSpec


def keeps_graph() -> bool:
    """Tells, inside a backward, whether it was called with `retain_graph`."""
    return bool(torch_private.keeps_graph())


class Demand:
    """Sends each parameter's gradient where the backward that is running wants it.

    `loss.backward()` wants gradients in `.grad`: they are added there one by one, as they arrive. A gradient with hooks
    waiting for it, and one that `torch.autograd.grad` asked for, go back to the engine instead: it runs hooks once, on
    the sum over all calls of the model. `backward(inputs=...)` leaves the others alone.

    Args:
        keys: Of the parameters.
        parameters: The tensors themselves.
        nodes: Their nodes in the caller's graph, one each.
        program: What runs; it has the order of eager's gradients.
    """

    def __init__(
        self,
        keys: Sequence[str],
        parameters: Sequence[torch.Tensor],
        nodes: Sequence[Any],
        program: Program,
    ):
        self._keys = keys
        self._own: dict[str, torch.Tensor] = {}
        self._hooked: set[str] = set()
        self._returned: dict[str, torch.Tensor | None] = {}
        for key, parameter, node in zip(keys, parameters, nodes, strict=True):
            if not parameter.is_leaf or _is_captured(node):
                self._returned[key] = None
            elif not torch_private.will_execute_node(node) or not parameter.requires_grad:
                continue
            elif is_hooked(parameter):
                self._returned[key] = None
                self._hooked.add(key)
            else:
                self._own[key] = parameter
        in_backward = partial(any, (looks_in_backward(template.graph) for template in program.templates.values()))
        warn_of_order(program.gradient_order, self._hooked.__contains__, in_backward)

    def keeps(self, key: str) -> bool:
        """Tells whether somebody will keep the memory of a parameter's gradient."""
        return keeps_gradient(self._own[key]) if key in self._own else key in self._returned

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        """Takes the whole gradient of a parameter; runs on the stream that brings it to the host."""
        if key in self._own:
            accumulate(self._own[key], gradient)
        elif key in self._returned:
            self._returned[key] = gradient

    def returned(self) -> list[torch.Tensor | None]:
        """Returns the gradients for the engine, one per parameter.

        Raises:
            ExecuteError: If a parameter with hooks got no gradient: the engine would run its hooks all the same.
        """
        for key in self._hooked:
            if self._returned[key] is None:
                raise ExecuteError(
                    f"parameter `{key}` has a hook, but this backward has no gradient for it.\n"
                    "  In eager its hooks would not run; in a compiled model they would run, without a gradient.\n"
                    "  Remove the hook, or differentiate the outputs that depend on the parameter as well."
                )
        return [self._returned.get(key) for key in self._keys]


def _is_captured(node: Any) -> bool:
    """Tells whether `torch.autograd.grad` asked for the gradient of this leaf; the engine says so by an error."""
    try:
        torch_private.will_execute_node(node)
    except RuntimeError:
        return True
    return False


ParameterGradient = tuple[torch.Tensor | None, bool]
"""A parameter's gradient, or None, and whether others hold its memory too."""


def marked(
    gradients: Sequence[torch.Tensor | None], is_held: Callable[[torch.Tensor], bool]
) -> list[ParameterGradient]:
    """Marks each gradient whose memory is also that of a value, or of another gradient.

    Args:
        gradients: Of a block's parameters.
        is_held: Tells whether a call holds a tensor's memory.
    """
    places = [g.untyped_storage().data_ptr() for g in gradients if g is not None and g.layout == torch.strided]
    count = Counter(places)
    return [
        (
            g,
            g is not None and (is_held(g) or (g.layout == torch.strided and count[g.untyped_storage().data_ptr()] > 1)),
        )
        for g in gradients
    ]


def added(
    known: Sequence[ParameterGradient] | None, found: Sequence[ParameterGradient]
) -> tuple[list[ParameterGradient], Callable[[], None]]:
    """Adds one micro-batch's gradients to the sums of those before, in their order.

    Returns:
        The new sums, and the rest of the work, which takes no memory: until it runs, the old sums are as they were.
    """
    before = known or [(None, False)] * len(found)
    in_place = [_adds_in_place(*pair) for pair in zip(before, found, strict=True)]
    sums = [
        old if is_in_place else _sum(old, new) for old, new, is_in_place in zip(before, found, in_place, strict=True)
    ]

    def add() -> None:
        for (total, _), (gradient, _), is_in_place in zip(sums, found, in_place, strict=True):
            if is_in_place and total is not None and gradient is not None:
                total.add_(gradient)

    return sums, add


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
    return _added(total, gradient), False


Take = Callable[[str, torch.Tensor], None]
"""Takes a parameter's key and its whole gradient, and may keep it. A taker that doesn't keep all has a method
`keeps(key) -> bool`: whether it, or somebody that it gives them to, will keep the memory of the next gradient."""


class Accumulation:
    """Takes gradients into `.grad`.

    Args:
        parameter_of: Returns the parameter of a key, which the user may replace between calls.
    """

    def __init__(self, parameter_of: Callable[[str], torch.Tensor]):
        self._parameter_of = parameter_of

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        """See `Take`."""
        accumulate(self._parameter_of(key), gradient)

    def keeps(self, key: str) -> bool:
        """See `Take`."""
        return keeps_gradient(self._parameter_of(key))


def keeps_of(take: Take) -> Callable[[str], bool]:
    """Returns what tells whether a taker keeps a gradient; it keeps all if it doesn't say."""
    return getattr(take, "keeps", lambda _: True)


class GradientSink:
    """Collects the gradients of one backward.

    A parameter that several blocks use (tied, or a block called twice) gets one sum, in the order in which the
    blocks' gradients arrive, and is written to `.grad` once, with the last of them.

    Args:
        parameter_of: Returns the parameter of a key, which the user may replace between calls.
        device: Compute device.
        parts: Parts of parameters; the gradient of each becomes rows of the parameter's, whose other rows are zero.
        landing: Where gradients are copied to; None if they are made in host memory, and stay there.

    Attributes:
        accumulation: Takes gradients into `.grad`.
    """

    def __init__(
        self,
        parameter_of: Callable[[str], torch.Tensor],
        device: Device,
        parts: Sequence[StateEntry] = (),
        *,
        landing: Landing | PlainLanding | None = None,
    ):
        self._parameter_of = parameter_of
        self._device = device
        self._parts = {part.key: part for part in parts}
        self._landing = landing
        self._reuses_places = True
        self._sums: dict[str, torch.Tensor] = {}
        # Of these sums the memory takes the next block's gradients.
        self._lent: set[str] = set()
        self._received: set[int] = set()
        # Of these nothing may follow: it would be lost.
        self._taken: set[str] = set()
        self.accumulation = Accumulation(parameter_of)
        self._take: Take = self.accumulation
        self._keeps = keeps_of(self._take)
        self._land_first: Land | None = None

    def begin(self, take: Take | None = None, land: Land | None = None) -> None:
        """Starts a backward, whose gradients `take` gets; None adds them to `.grad`.

        Args:
            take: See `Take`.
            land: Gets what lands of each block first; None where nobody else has gradients of it.

        Raises:
            ExecuteError: If the host lacks the memory where they land.
        """
        self.end()
        self._reuses_places = True
        self._take = take or self.accumulation
        self._land_first = land
        self._keeps = keeps_of(self._take)
        if isinstance(self._landing, PlainLanding):
            self._landing.begin(self._keeps)
        elif self._landing is not None:
            self._landing.begin()

    def end(self) -> None:
        """Lets go of who takes gradients, and of the sums of a backward that failed."""
        self._sums.clear()
        self._received.clear()
        self._taken.clear()
        self._take = self.accumulation
        self._keeps = keeps_of(self._take)

    def stop_reuse(self) -> None:
        """Lets all further gradients of this backward have new memory: updates don't keep up with them any more."""
        self._reuses_places = False

    def receive(
        self,
        block: int,
        keys: Sequence[str],
        gradients: Sequence[tuple[torch.Tensor | None, bool]],
        completes: Collection[str],
        landing: Bytes | None,
    ) -> None:
        """Takes one block's gradients. If a hook on a parameter fails, the same block may come again.

        Args:
            block: Which it is.
            keys: Parameters, in the order of `gradients`.
            gradients: On the compute device, None where nothing flowed, each with whether others hold its memory
                too, so that it may not be adopted.
            completes: Keys whose sum is complete with this block.
            landing: Where the gradients land on the host; None if they stay where they are made, to be adopted there.
        """
        landed: Sequence[Landed] | None = None
        if block not in self._received:
            landed = self._land(block, keys, landing, gradients)
            if self._land_first is not None and (landed := self._land_first(block, landing, landed)) is None:
                return
        self.collect(block, keys, landed, completes)

    def collect(
        self, block: int, keys: Sequence[str], landed: Sequence[Landed] | None, completes: Collection[str]
    ) -> None:
        """Takes one block's gradients, where they are: the second half of `receive`, or what follows a `Land`.

        Args:
            block: Which it is.
            keys: Parameters, in the order of `landed`.
            landed: The gradients; None if the block came before.
            completes: See `receive`.
        """
        if block not in self._received:
            assert landed is not None
            self._add(keys, landed, completes)
            self._received.add(block)
        for key in completes:
            total = self._sums.get(key)
            if total is None:
                continue
            if key in self._lent and self._keeps(key):
                total = self._sums[key] = total.clone()
                self._lent.remove(key)
            if key in self._parts:
                self._fill_rows(self._parts[key], total)
            else:
                self._take(key, total)
            del self._sums[key]
            self._taken.add(key)

    def _add(self, keys: Sequence[str], landed: Sequence[Landed], completes: Collection[str]) -> None:
        """Adds gradients to the sums, in place where that gives the same; if it fails, none is added."""
        made: dict[str, torch.Tensor] = {}
        assert self._taken.isdisjoint(k for k, (found, _) in zip(keys, landed, strict=True) if found is not None)
        in_place: list[tuple[torch.Tensor, torch.Tensor]] = []
        lent: set[str] = set()
        for key, (gradient, is_lent) in zip(keys, landed, strict=True):
            if gradient is None:
                continue
            total = made.get(key, self._sums.get(key))
            if total is None:
                # What is lent lasts until this block's sums are taken.
                is_last = key in completes
                made[key] = gradient.clone() if is_lent and not is_last else gradient
                lent.update([key] if is_lent and is_last else [])
            elif total.layout == gradient.layout == torch.strided and total.dtype == gradient.dtype:
                in_place.append((total, gradient))
            else:
                made[key] = _added(total, gradient)
        self._lent = lent
        for total, gradient in in_place:
            total.add_(gradient)
        self._sums.update(made)

    def _fill_rows(self, part: StateEntry, gradient: torch.Tensor) -> None:
        """Puts a part's gradient into the whole, which counts as one once all its parts are complete."""
        whole = self._sums.get(part.owner)
        if whole is None:
            parameter = self._parameter_of(part.owner)
            whole = self._sums[part.owner] = torch.zeros(parameter.shape, dtype=parameter.dtype)
        start, end = part.rows
        whole[start:end] = gradient.to_dense() if gradient.layout != torch.strided else gradient

    def _land(
        self,
        block: int,
        keys: Sequence[str],
        where: Bytes | None,
        gradients: Sequence[tuple[torch.Tensor | None, bool]],
    ) -> list[Landed]:
        tensors = [gradient for gradient, _ in gradients]
        if isinstance(self._landing, PlainLanding):
            return self._landing.land(keys, tensors, self._stays)
        if self._landing is not None and self._reuses_places and where is not None:
            return self._landing.land(block, where, tensors)
        if not self._device.can_bind:
            return [Landed(gradient if gradient is None else self._device.to_host(gradient)) for gradient in tensors]
        seen: set[int] = set()
        landed: list[Landed] = []
        for gradient, is_shared in gradients:
            if gradient is None or gradient.layout != torch.strided:
                landed.append(Landed(gradient))
                continue
            storage = gradient.untyped_storage()
            is_own = not is_shared and storage.data_ptr() not in seen and storage.nbytes() == gradient.nbytes
            seen.add(storage.data_ptr())
            landed.append(Landed(gradient if where is None and is_own else gradient.clone()))
        return landed

    def _stays(self, key: str) -> bool:
        """Whether a gradient may stay where it lands: it is kept, and neither a part nor added to others."""
        return key not in self._parts and key not in self._sums and self._keeps(key)


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
        parameter.grad = _added(parameter.grad, gradient)
    else:
        parameter.grad.add_(gradient)
    post = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    for hook in (post or {}).values():
        hook(parameter)


def hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's whole gradient after its `register_hook` hooks.

    Raises:
        ExecuteError: If one returns a gradient of another kind, as autograd would.
    """
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
    """Refuses a hook's result if an update couldn't use it instead of the gradient.

    Raises:
        ExecuteError: If shape, dtype, layout or device are others.
    """
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


def _added(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Adds two gradients; torch adds a sparse one to a dense one, but not the other way round."""
    return right + left if left.is_sparse and not right.is_sparse else left + right


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Gives a gradient the strides of its parameter, as autograd does: sums over it round accordingly."""
    if gradient.is_sparse or all(
        size == 1 or mine == other
        for size, mine, other in zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    ):
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
