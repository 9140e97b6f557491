"""What each of torch's operators does with the axis of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from megatrain.base.interrupts import Interrupts
from megatrain.base.torch_private import TorchDispatchMode, pytree
from megatrain.passes.call_trial import Site, called, followed, marked
from megatrain.passes.canonicalize import frozen
from megatrain.passes.interpret import exact_fakes
from megatrain.tracer.calls import target_name


class TokenAxes(TorchDispatchMode):
    """Follows, while it is active, the axis along which tokens lie.

    Each operator that reads tokens must compute every token of its results from this token of its operands, and from
    what all tokens share. So whatever is made of such operators can be computed for some tokens at a time. The rules
    are those of torch's own operators, below functions and modules; there are no rules for a user's.

    Attributes:
        mixes: Why an operator isn't known to treat each token alone, if one isn't: it has no rule, or it mixes tokens
            (attention, convolutions, sums over tokens). An error from in here would end the process where C++ expects
            none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixes: str | None = None
        self._axes: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def put(self, tensor: torch.Tensor, axis: int, groups: int = 1) -> torch.Tensor:
        """Says that tokens lie along a dimension of a tensor, all of them in each of so many groups."""
        self._axes[id(tensor)], self._groups[id(tensor)] = axis, groups
        self._alive.append(tensor)
        return tensor

    def axis_of(self, tensor: torch.Tensor) -> int | None:
        """The axis of a tensor's tokens; None if all tokens share it."""
        return self._axes.get(id(tensor))

    def groups_of(self, tensor: torch.Tensor) -> int:
        """How often all tokens come along their axis: a product flattens [texts, tokens] into one dimension."""
        return self._groups.get(id(tensor), 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        asks_alone = func.namespace == "prim"  # for a tensor's device
        if asks_alone or all(self.axis_of(leaf) is None for leaf in plain_tensors((args, kwargs))):
            return result
        made = plain_tensors(result)
        call = OperatorCall(func, args, kwargs or {}, result, self.axis_of)
        try:
            call.groups = self._common_groups(call.operands)
            axes = axes_of_results(func, call)
        except MixesTokensError as error:
            self.mixes, axes = str(error), None
        for tensor, axis in zip(made, axes if isinstance(axes, tuple) else (axes,) * len(made), strict=True):
            if axis is not None:
                self.put(tensor, axis, call.groups)
        return result

    def _common_groups(self, operands: Sequence[torch.Tensor]) -> int:
        found = {self.groups_of(tensor) for tensor in operands if self.axis_of(tensor) is not None}
        if len(found) > 1:
            raise MixesTokensError("tokens come in different groups")
        return found.pop()


FEW = 61
"""Tokens of a trial: no usual width, so that their axis can't be taken for another dimension."""
# Calls whose arguments say the shape of the result.
_SIZED = ("view", "reshape", "expand")


class Trials:
    """Runs calls on a few tokens without values, to see whether they treat each alone; equal ones run once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._known: dict[Any, Axes] = {}

    def result(self, node: fx.Node, axes: Mapping[fx.Node, int | None], tokens: int) -> Axes:
        """The axes of a call's results, for those of its operands; None if it doesn't treat each token alone."""
        number = {operand: index for index, operand in enumerate(axes)}
        modes = node.meta["grad"], node.meta["autocast"]
        described = tuple((operand.meta["spec"], axis) for operand, axis in axes.items())
        key = node.target, frozen(node.args, number), frozen(node.kwargs, number), modes, described, tokens
        if key not in self._known:
            self._known[key] = self._run(node, axes, tokens)
        return self._known[key]

    def _run(self, node: fx.Node, axes: Mapping[fx.Node, int | None], tokens: int) -> Axes:
        """Runs a call on all tokens, which can't fail, then on a few, for which a literal may not fit."""
        found = self._made(node, node.args, dict(node.kwargs), axes, tokens)
        if found is None or isinstance(found, tuple) or not is_sized(node):
            args, kwargs = node.args, dict(node.kwargs)
        else:
            args, kwargs = sized_arguments(node, found)
        return found if found is not None and self._made(node, args, kwargs, axes, FEW) == found else None

    def _made(
        self,
        node: fx.Node,
        args: Any,
        kwargs: dict[str, Any],
        axes: Mapping[fx.Node, int | None],
        length: int,
    ) -> Axes:
        """Runs a call on so many tokens; returns the axes of its results, or None if it doesn't treat each alone."""
        watch = TokenAxes()

        def operand(given: fx.Node) -> torch.Tensor:
            axis = axes[given]
            made = given.meta["spec"].empty(self._device)
            return made if axis is None else watch.put(made.narrow(axis, 0, length), axis)

        with Interrupts(), ExitStack() as stack:
            stack.enter_context(exact_fakes())
            given: Any = fx.map_arg((args, kwargs), operand)
            Site.of(node).enter_modes(stack)
            stack.enter_context(watch)
            try:
                made = called(node.target, *given)
            except Exception:  # some kernels refuse tensors without values, and a few tokens may not fit: not tiled
                return None
        results = list(made) if isinstance(made, tuple | list) else [made]
        are_tensors = all(isinstance(each, torch.Tensor) for each in results)
        if watch.mixes is not None or not are_tensors or any(watch.groups_of(each) > 1 for each in results):
            return None
        if not isinstance(made, torch.Tensor):
            return tuple(map(watch.axis_of, results))
        axis = watch.axis_of(made)
        shape = node.meta["spec"].shape
        fits = axis is not None and (*shape[:axis], length, *shape[axis + 1 :]) == tuple(made.shape)
        return axis if fits else None


def is_sized(node: fx.Node) -> bool:
    """Tells whether a call's arguments say the shape of its result."""
    return (
        target_name(node) in _SIZED and "spec" in node.meta and not any(isinstance(a, torch.dtype) for a in node.args)
    )


def sized_arguments(node: fx.Node, axis: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that says its result's shape, for any number of tokens."""
    shape = node.meta["spec"].shape
    return (node.args[0], (*shape[:axis], -1, *shape[axis + 1 :])), {}


Axes = int | None | tuple[int | None, ...]
"""Of a result: the dimension along which tokens lie; None where each token sees the same; one each of several."""


class MixesTokensError(Exception):
    """An operator isn't known to treat each token alone."""


class OperatorCall:
    """A call of an operator: its arguments by name, its results, and the axes of its operands.

    Attributes:
        groups: How often all tokens come along the axis of each operand; then along that of each result.
    """

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        axis_of: Callable[[torch.Tensor], int | None],
    ):
        arguments = func._schema.arguments
        self.given: dict[str, Any] = {
            **{argument.name: argument.default_value for argument in arguments},
            **{argument.name: value for argument, value in zip(arguments, args, strict=False)},
            **kwargs,
        }
        self.again = lambda first: plain_tensors(func(first, *args[1:], **kwargs))
        self.operands = plain_tensors((args, kwargs))
        self.results = plain_tensors(result)
        self.axis_of = axis_of
        self.groups = 1

    @property
    def first(self) -> torch.Tensor:
        """The first operand."""
        return self.operands[0]

    def only_first(self) -> int:
        """The axis of the first operand, where all others are shared."""
        if any(self.axis_of(other) is not None for other in self.operands[1:]):
            raise MixesTokensError("several operands have tokens")
        axis = self.axis_of(self.first)
        if axis is None:
            raise MixesTokensError("the first operand has no tokens")
        return axis

    def dims(self, name: str, ndim: int) -> list[int]:
        """The dimensions that an argument names, counted from the front; all of them where it names none."""
        dims = self.given.get(name)
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        return [dim % max(1, ndim) for dim in dims] or list(range(ndim))


def axes_of_results(func: Any, call: OperatorCall) -> Axes:
    """The axes of a call's results; sets its `groups` to theirs.

    Raises:
        MixesTokensError: If the operator isn't known to treat each token alone.
    """
    name = func._schema.name.removeprefix("aten::")
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        raise MixesTokensError(f"{name} writes or draws")
    rule = _RULES.get(name) or (_of_elements if torch.Tag.pointwise in func.tags else None)
    if rule is None or not call.results:
        raise MixesTokensError(f"{name} has no rule")
    if call.groups > 1 and rule not in (_of_elements, _of_view, _of_product):
        raise MixesTokensError(f"{name} has no rule for tokens in groups")
    return rule(call)


def _of_elements(call: OperatorCall) -> int:
    """Each element of the result comes from the elements at its place; what has one element there is shared."""
    places = {t.dim() - axis for t in call.operands if (axis := call.axis_of(t)) is not None}
    if len(places) != 1:
        raise MixesTokensError("tokens lie along different dimensions")
    place = places.pop()
    for tensor in call.operands:
        if call.axis_of(tensor) is None and tensor.dim() >= place and tensor.shape[-place] != 1:
            raise MixesTokensError("an operand differs along the axis of tokens")
    return call.results[0].dim() - place


def _of_view(call: OperatorCall) -> int:
    """Elements stay in order: as many must come before a group of all tokens as did, and as many after each token.

    The dimensions before the axis may be merged with it, which makes groups, and parted again.
    """
    axis = call.only_first()
    before, size = math.prod(call.first.shape[:axis]), call.first.shape[axis]
    before, tokens = before * call.groups, size // call.groups
    shape = call.results[0].shape
    for dim, size in enumerate(shape):
        outer = math.prod(shape[:dim])
        groups = before // outer if outer else 0
        if groups and outer * groups == before and size == groups * tokens:
            call.groups = groups
            return dim
    raise MixesTokensError("the axis of tokens is merged with the one after it")


def _of_dims(call: OperatorCall) -> Axes:
    """Views that move, add, cut or drop dimensions: all tokens must still be there, along one of them."""
    axis = call.only_first()
    base = marked(call.first.shape)
    axes: list[int] = []
    for view in call.again(base):
        _, places = followed(view, base) or ({}, {})
        place, step = places.get(axis - base.dim(), (0, 0))
        if step != 1 or view.shape[place] != base.shape[axis]:
            raise MixesTokensError("some tokens are left out, or told apart")
        axes.append(place + view.dim())
    return tuple(axes)


def _of_repeated(call: OperatorCall) -> int:
    axis = call.only_first() + call.results[0].dim() - call.first.dim()
    if call.given["repeats"][axis] != 1:
        raise MixesTokensError("tokens are repeated")
    return axis


def _of_kept(call: OperatorCall) -> int:
    """The dimensions that are named mix, and all stay where they are: `softmax`, `cumsum`, `flip`, `topk`."""
    axis = call.only_first()
    if axis in call.dims("dims" if "dims" in call.given else "dim", call.first.dim()):
        raise MixesTokensError("tokens are mixed")
    return axis


def _of_reduced(call: OperatorCall) -> int:
    """The dimensions that are named are summed up: `sum`, `mean`, `amax`, `var`; all of them if none is."""
    axis, ndim = call.only_first(), call.first.dim()
    dims = call.dims("dim", ndim)
    if axis in dims:
        raise MixesTokensError("tokens are summed up")
    return axis if call.results[0].dim() == ndim else axis - sum(dim < axis for dim in dims)


def _of_joined(call: OperatorCall) -> int:
    """`cat` and `stack`: all parts have tokens, along one axis."""
    axes = {call.axis_of(part) for part in call.operands}
    axis = axes.pop()
    ndim = call.results[0].dim()
    dim = call.given["dim"] % ndim
    is_new = ndim > call.first.dim()
    if axes or axis is None or (dim == axis and not is_new):
        raise MixesTokensError("parts differ along the axis of tokens")
    return axis + (is_new and dim <= axis)


def _of_product(call: OperatorCall) -> int:
    """A product of matrices, or of batches of them: tokens are rows of the first or columns of the second."""
    one, other = call.operands[-2:]
    bias = call.operands[:-2]
    row, column = call.axis_of(one), call.axis_of(other)
    if any(call.axis_of(each) is not None for each in bias):
        raise MixesTokensError("tokens are in the sum that a product is added to")
    ndim = call.results[0].dim()
    if call.groups > 1 and (row is None or ndim > 2):
        raise MixesTokensError("tokens in groups are no rows of a matrix")
    if row is not None and column is not None:
        if row == column == 0 and ndim == 3 and not bias:
            return 0
        raise MixesTokensError("both factors have tokens")
    if column is not None and column == ndim - 1 and not bias:
        return column
    if row is not None and row == ndim - 2 and not (bias and bias[0].dim() > 1 and bias[0].shape[-2] != 1):
        return row
    raise MixesTokensError("tokens are summed up")


def _of_linear(call: OperatorCall) -> int:
    axis = call.only_first()
    if axis == call.first.dim() - 1:
        raise MixesTokensError("tokens are summed up")
    return axis


def _of_norm(call: OperatorCall) -> Axes:
    """Layer norm and RMS norm: over the last dimensions; statistics have one element for each of the others."""
    axis = call.only_first()
    if axis >= call.first.dim() - len(call.given["normalized_shape"]):
        raise MixesTokensError("tokens are normalized together")
    return axis


def _of_same_place(call: OperatorCall) -> int:
    """`gather` and the like: tokens lie along one axis of all operands, and indices are for another dimension."""
    axes = {call.axis_of(tensor) for tensor in call.operands}
    axis = axes.pop()
    if axes or axis is None or call.given["dim"] % call.first.dim() == axis:
        raise MixesTokensError("indices choose tokens")
    return axis


_RULES: dict[str, Callable[[OperatorCall], Axes]] = {
    **dict.fromkeys(("_to_copy", "alias", "detach", "lift_fresh", "hardswish"), _of_elements),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "view_as_complex", "view_as_real"), _of_view),
    **dict.fromkeys(("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice"), _of_dims),
    **dict.fromkeys(("split", "split_with_sizes", "select", "unbind"), _of_dims),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "topk", "sort", "glu"), _of_kept),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "var_mean", "std_mean"), _of_reduced
    ),
    **dict.fromkeys(("logsumexp", "linalg_vector_norm", "norm", "any", "all", "prod", "max", "min"), _of_reduced),
    **dict.fromkeys(("cat", "stack"), _of_joined),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _of_product),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _of_norm),
    "gather": _of_same_place,
    "linear": _of_linear,
    "repeat": _of_repeated,
}


def plain_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
