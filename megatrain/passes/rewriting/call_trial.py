"""A trial run of a call that a pass adds: on tensors without values, to find the node's meta."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from megatrain.device import is_on_host, is_same_kind
from megatrain.errors import LowerError
from megatrain.interrupts import Interrupts
from megatrain.torch_private import FakeTensorMode, disable_current_modes, pytree
from megatrain.tracer.calls import call_name
from megatrain.tracer.recording.effect_watch import EffectWatch
from megatrain.tracer.recording.random_numbers import GeneratorWatch
from megatrain.tracer.recording.unseen_kernels import kernels_need_values
from megatrain.tracer.source_line import SourceLine
from megatrain.tracer.spec import TensorSpec, autocast_state, storage_key

Target = str | Callable[..., Any]
"""A function of tensors, or the name of a tensor's method."""

_RULE = "A call that a pass adds runs on tensors without values, to find the shape, dtype and strides of its result."
_WAY_OUT = "Give the call operands that fit. No shape may depend on values."
_NAME_IT = 'Give the function itself, such as F.linear, or the name of a method, such as "view".'


@dataclass(frozen=True, slots=True)
class Site:
    """The place of an added call in a graph, and the properties that it takes over from the node that it resembles.

    Args:
        after: The node that it follows; it also follows all earlier additions there.
        modules: See `megatrain/tracer/spec.py`, as for the others.
        source: The user's line.
        grad: Whether gradients are enabled.
        autocast: The autocast regions.
    """

    after: fx.Node
    modules: tuple[tuple[str, int], ...]
    source: SourceLine | None
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def of(node: fx.Node) -> Site:
        """The site of what resembles `node` and follows it."""
        meta = node.meta
        return Site(node, meta["modules"], meta["source"], meta["grad"], meta["autocast"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call's trial.

    Args:
        result: What it returned, around tensors without values.
        operands: Its operands' nodes, by the storage of what stood for them.
        same: The operand that it gave back, if it did.
        is_random: It drew random numbers.
    """

    result: Any
    operands: Mapping[int, fx.Node]
    same: fx.Node | None
    is_random: bool


def tried(
    target: Target,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    site: Site,
    device: torch.device,
    mode: FakeTensorMode,
) -> Outcome:
    """Runs a call on tensors without values, in the modes of its site.

    Args:
        target: The function, or the name of the method.
        args: Its arguments, with nodes for tensors.
        kwargs: Its keyword arguments, likewise.
        site: Where it will stand.
        device: Where the model computes.
        mode: Makes the tensors without values; one serves many trials.

    Raises:
        LowerError: If it can't run so, changes an operand in place, or makes a tensor where the model doesn't compute.
    """
    stand_ins: dict[fx.Node, torch.Tensor] = {}
    watch = EffectWatch(lambda _: None, lambda _: None, _draw)
    # Ctrl-C waits for the end of the call: an error in a dispatch mode that C++ doesn't expect ends the process.
    with Interrupts(), ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(kernels_need_values())
        enter_modes(stack, site)

        def stand_in(node: fx.Node) -> Any:
            if node not in stand_ins:
                stand_ins[node] = _empty(node, device)
            return stand_ins[node]

        given: Any = fx.map_arg((args, dict(kwargs)), stand_in)
        try:
            with watch:
                result = called(target, *given)
        except Exception as error:  # a call that raises any error with these arguments can't be part of a graph
            first_line = str(error).partition("\n")[0].rstrip(".")
            refuse_call(
                target,
                f"can't be called with these arguments: {type(error).__name__}: {first_line}",
                _RULE,
                _WAY_OUT,
                cause=error,
            )
    operands = {storage_key(fake): node for node, fake in stand_ins.items()}
    _check_writes(target, watch.written, operands)
    _check_device(target, result, device, stand_ins)
    same = next((node for node, fake in stand_ins.items() if fake is result), None)
    return Outcome(result, operands, same, watch.is_random)


def enter_modes(stack: ExitStack, site: Site) -> None:
    """Enters the modes that a step enters around the call; the caller's present modes don't count in either."""
    stack.enter_context(torch.set_grad_enabled(site.grad))
    for kind, _ in autocast_state():
        stack.enter_context(torch.autocast(kind, enabled=False))
    for kind, dtype in site.autocast:
        stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))


def _check_writes(target: Target, written: Sequence[torch.Tensor], operands: Mapping[int, fx.Node]) -> None:
    changed = [operands[key].name for key in map(storage_key, written) if key in operands]
    if changed:
        refuse_call(
            target,
            f"writes into `{changed[0]}`",
            "A call that a pass adds must make new tensors; a write would change every tensor that shares the memory.",
            "Call the variant that returns a new tensor.",
        )


def _draw(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Makes a call that may draw random numbers, from a separate stream: the user's generators stay as they are."""
    with disable_current_modes():
        watch = GeneratorWatch()
    return watch.draw(call)


def called(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Makes a call of a function, or of a method by its name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _empty(node: fx.Node, device: torch.device) -> torch.Tensor:
    spec: TensorSpec = node.meta["spec"]
    return spec.empty(device).requires_grad_(node.meta["requires_grad"])


def _check_device(target: Target, result: Any, device: torch.device, operands: Collection[fx.Node]) -> None:
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


def operands_of(
    target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, site: Site, end: fx.Node
) -> list[fx.Node]:
    """Returns the nodes that a call is given.

    Args:
        target: The function, or the name of the method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        site: Where it is to stand.
        end: The last node that stands there until now.

    Raises:
        LowerError: If one is no tensor of the graph, or is made after `end`.
    """
    found: list[fx.Node] = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            refuse_call(
                target,
                "is given a tensor",
                "A graph holds no values: tensors are its nodes.",
                "Make the tensor by a call, such as torch.full with device=rewriter.device.",
            )
    fx.map_arg((args, kwargs), lambda n: found.append(n) or n)
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
    return found


def check_target(target: Any) -> None:
    """Refuses a target that no node can call.

    Raises:
        LowerError: Naming it, and what to call instead.
    """
    if isinstance(target, nn.Module):
        refuse_call(
            target,
            "is a module",
            "A call in a graph holds no tensors: the graph reads state and passes it as operands.",
            "Call the underlying function, such as F.linear, with the parameters as operands.",
        )
    if not isinstance(target, str) and not callable(target):
        refuse_call(target, "can't be called", "A call calls a function or a method of a tensor.", _NAME_IT)
    if isinstance(target, str) and not hasattr(torch.Tensor, target):
        refuse_call(
            target,
            "is no method of torch.Tensor",
            "A target given as text names a method of the first operand.",
            _NAME_IT,
        )


def refuse_call(target: Any, what: str, rule: str, way_out: str, *, cause: BaseException | None = None) -> NoReturn:
    """Raises the error for a call that can't be added."""
    name = target if isinstance(target, str) else call_name(target) if callable(target) else repr(target)
    raise LowerError(f"`{name}` {what}.\n  {rule}\n  {way_out}") from cause
