"""Trials: a call that a pass adds runs on tensors without values, which tells what its node stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx, nn

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import FakeTensorMode, disable_current_modes, pytree
from megatrain.device import is_on_host, is_same_kind
from megatrain.errors import LowerError
from megatrain.passes.pattern import Target
from megatrain.tracer.calls import call_name
from megatrain.tracer.recording.effect_watch import EffectWatch
from megatrain.tracer.recording.random_numbers import GeneratorWatch
from megatrain.tracer.recording.unseen_kernels import kernels_need_values
from megatrain.tracer.source_line import SourceLine
from megatrain.tracer.spec import autocast_state, storage_key


@dataclass(frozen=True, slots=True)
class Site:
    """The place of an added call in a graph, and the properties that it takes over from the node that it resembles.

    Args:
        after: The node that it follows; it also follows all earlier additions there.
        modules: The module calls that it is in, outermost first.
    """

    after: fx.Node
    modules: tuple[tuple[str, int], ...]
    source: SourceLine | None
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def of(node: fx.Node) -> Site:
        """The site of a call that resembles `node` and follows it."""
        meta = node.meta
        return Site(node, meta["modules"], meta["source"], meta["grad"], meta["autocast"])

    def enter_modes(self, stack: ExitStack) -> None:
        """Enters the modes that a step enters around the call; the caller's present modes don't count in either."""
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, _ in autocast_state():
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))


def called(target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Makes a call of a function, or of a method by its name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


class Outcome(NamedTuple):
    """What a call made when it was tried: its result, and its operands by the storage of what stood for them."""

    result: Any
    operands: Mapping[int, int]
    same: int | None
    is_random: bool


def marked(shape: Sequence[int]) -> torch.Tensor:
    """A tensor without values and with room between its elements: the strides of a view tell its dimensions."""
    strides = [math.prod(size + 1 for size in shape[dim + 1 :]) for dim in range(len(shape))]
    return torch.empty_strided(tuple(shape), strides, device="meta")


def followed(view: Any, base: torch.Tensor) -> tuple[dict[int, int], dict[int, tuple[int, int]]] | None:
    """Reads from strides which elements of a marked tensor a view has; dimensions are counted from the last.

    Returns:
        The first index along each dimension; and the dimension of the view, with its step, for those that it still has.
        None if it is no view, or merges dimensions.
    """
    if not isinstance(view, torch.Tensor) or storage_key(view) != storage_key(base):
        return None
    rest, starts, places = int(view.storage_offset()), dict[int, int](), dict[int, tuple[int, int]]()
    for dim, stride in enumerate(base.stride()):
        starts[dim - base.dim()], rest = divmod(rest, stride)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size > 1 and stride > 0:
            origin = next(index for index in range(base.dim()) if base.stride(index) <= stride)
            if stride % base.stride(origin):
                return None
            places[origin - base.dim()] = dim - view.dim(), stride // base.stride(origin)
    return starts, places


def tried(
    target: Target, given: Any, site: Site, operands: Sequence[fx.Node], device: torch.device, mode: FakeTensorMode
) -> Outcome:
    """Runs a call that a pass adds on tensors without values, in the modes of its site.

    Args:
        given: Its arguments, and its keyword arguments, with nodes for tensors.
        mode: Makes the tensors without values; one serves many trials.

    Raises:
        LowerError: If it can't run so, changes an operand in place, or makes a tensor where the model doesn't
            compute.
    """
    watch = EffectWatch(lambda _: None, lambda _: None, _draw)
    # Ctrl-C waits for the end of the call: an error in a dispatch mode that C++ doesn't expect ends the process.
    with Interrupts(), ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(kernels_need_values())
        site.enter_modes(stack)
        fakes = [n.meta["spec"].empty(device).requires_grad_(n.meta["requires_grad"]) for n in operands]
        filled: Any = fx.map_arg(given, dict(zip(operands, fakes, strict=True)).__getitem__)
        try:
            with watch:
                result = called(target, *filled)
        except Exception as error:  # a call that raises any error with these arguments can't be part of a graph
            first_line = str(error).partition("\n")[0].rstrip(".")
            refuse_call(
                target,
                f"can't be called with these arguments: {type(error).__name__}: {first_line}",
                "A call that a pass adds runs on tensors without values, to find the shape, dtype and strides of "
                "its result.",
                "Give the call operands that fit. No shape may depend on values.",
                cause=error,
            )
    numbers = {storage_key(fake): number for number, fake in enumerate(fakes)}
    changed = [operands[numbers[key]].name for key in map(storage_key, watch.written) if key in numbers]
    if changed:
        refuse_call(
            target,
            f"writes into `{changed[0]}`",
            "A call that a pass adds must make new tensors; a write would change every tensor that shares the memory.",
            "Call the variant that returns a new tensor.",
        )
    _check_device(target, result, device, operands)
    same = next((number for number, fake in enumerate(fakes) if fake is result), None)
    return Outcome(result, numbers, same, watch.is_random)


def _draw(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Makes a call that may draw random numbers, from a separate stream: the user's generators stay as they are."""
    with disable_current_modes():
        watch = GeneratorWatch()
    return watch.draw(call)


def _check_device(target: Target, result: Any, device: torch.device, operands: Sequence[fx.Node]) -> None:
    reads_host = any(node.meta["spec"].on_host for node in operands)
    for tensor in pytree.tree_leaves(result):
        if not isinstance(tensor, torch.Tensor) or (reads_host and is_on_host(tensor)):
            continue
        if not is_same_kind(tensor.device, device):
            refuse_call(
                target,
                f"makes a tensor on {tensor.device}, and the model computes on {device}",
                "Blocks compute on one device; only what is made of tensors of the host may stay there.",
                "Give the call device=rewriter.device.",
            )


def operands_of(target: Target, given: Any, site: Site, end: fx.Node) -> list[fx.Node]:
    """Returns the distinct nodes that a call is given; `end` is the last node that stands at its site until now."""
    found: list[fx.Node] = []
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            refuse_call(
                target,
                "is given a tensor",
                "A graph holds no values: tensors are its nodes.",
                "Make the tensor by a call, such as torch.full with device=rewriter.device.",
            )
    fx.map_arg(given, lambda n: found.append(n) or n)
    for node in found:
        if "spec" not in node.meta:
            refuse_call(
                target,
                f"is given `{node.name}`, which isn't one tensor",
                "The results of a call with several results are read by `getitem` calls.",
                "Give one of these `getitem` calls.",
            )
        if node > end:
            refuse_call(
                target,
                f"is given `{node.name}`, which is made after `{site.after.name}`",
                "A new call comes right after `like`, so its operands must exist by then.",
                "Give a later call as `like`.",
            )
    return list(dict.fromkeys(found))


def check_target(target: Any) -> None:
    """Refuses a target that no node can call."""
    if isinstance(target, nn.Module):
        refuse_call(
            target,
            "is a module",
            "A call in a graph holds no tensors: the graph reads state and passes it as operands.",
            "Call the underlying function, such as F.linear, with the parameters as operands.",
        )
    if not isinstance(target, str) and not callable(target):
        refuse_call(
            target,
            "can't be called",
            "A call calls a function or a method of a tensor.",
            'Give the function itself, such as F.linear, or the name of a method, such as "view".',
        )
    if isinstance(target, str) and not hasattr(torch.Tensor, target):
        refuse_call(
            target,
            "is no method of torch.Tensor",
            "A target given as text names a method of the first operand.",
            'Give the function itself, such as F.linear, or the name of a method, such as "view".',
        )


def refuse_call(target: Any, what: str, rule: str, way_out: str, *, cause: BaseException | None = None) -> NoReturn:
    """Raises the error for a call that can't be added."""
    name = target if isinstance(target, str) else call_name(target) if callable(target) else repr(target)
    raise LowerError(f"`{name}` {what}.\n  {rule}\n  {way_out}") from cause
