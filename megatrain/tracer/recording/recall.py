"""Recall: a call on tensors without values that equals an earlier one isn't run again; its results are made anew.

The layers of a model repeat, so nearly all calls of a forward equal earlier ones. The model's own code runs for each
layer; what is left out is torch's work on fake tensors, which is most of the time of a capture. Two calls are equal if
they call one of torch's own functions with the same literals, on tensors of the same form that share memory alike,
while torch is in the same state. A tensor with values equals itself only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from megatrain.base.torch_private import (
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    attention_priority,
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    forbid_memory,
    function_class,
    function_modes,
    make_subclass,
    pytree,
)
from megatrain.tracer.calls import call_name, is_of_torch
from megatrain.tracer.guards import is_metadata_read
from megatrain.tracer.recording.effect_watch import EffectWatch, has_hooks
from megatrain.tracer.recording.gradient_order import Ready
from megatrain.tracer.recording.tape import TensorTable
from megatrain.tracer.spec import autocast_state, storage_key

_LITERALS = frozenset(
    (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType))
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True, eq=False)
class ResultRecipe:
    """How a result of a call is made.

    Args:
        given: The place of the operand that it is, or whose memory it views; None if it has memory of its own.
        offset: Of its first element in its memory, in elements.
        form: Of the result.
    """

    given: int | None
    is_view: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    has_history: bool
    form: int
    node: fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """What an earlier call did.

    Args:
        kind: Of its result: a tuple or list of tensors, or None for a tensor.
        ready: What each node of its history makes ready, by places of operands; None if it completes no parameter.
    """

    node: fx.Node
    kind: Callable[[Any], Any] | None
    made: tuple[ResultRecipe, ...]
    is_random: bool
    ready: tuple[tuple[int | None, ...], ...] | None


@dataclass(slots=True, eq=False)
class ComparedCall:
    """A call that is about to be made, as far as it can be compared.

    Args:
        key: Equal for equal calls.
        args: The arguments, with nodes in place of tensors.
        recipe: What an equal call did, if its results can be made.
    """

    key: Hashable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[torch.Tensor]
    nodes: list[fx.Node]
    autocast: tuple[tuple[str, torch.dtype], ...]
    recipe: Recipe | None


class _OddError(Exception):
    """An argument or result that can't be compared, or made."""


class Recall:
    """The calls of one run of a forward.

    Args:
        originals: The fake tensor of each real one of the model's state, by identity.
        refuse: Asks for a capture that runs every call: the forward needs a history that a recalled call left out.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        table: TensorTable,
        originals: dict[int, torch.Tensor],
        refuse: Callable[..., NoReturn],
        *,
        is_on: bool,
    ) -> None:
        self.refuse = refuse
        self._fake_mode = fake_mode
        self._table = table
        self._originals = originals
        self._is_on = is_on
        self._num_modes = -1
        self._comparable: dict[Any, bool] = {}
        self._recipes: dict[Hashable, Recipe | None] = {}
        self._forms: dict[Hashable, int] = {}
        self._form_of: dict[fx.Node, int] = {}
        self._views: set[int] = set()  # memory that recalled calls view
        self._runs_views = False
        self._written: set[int] = set()  # memory that calls have written
        self._writes = 0
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a fake tensor that no call has made
        self._start = torch.zeros((), requires_grad=True)
        self.is_used = False

    def begin(self) -> None:
        """Notes which modes are active before the forward; those of others see every call, so every call runs."""
        kinds = [type(mode).__module__.partition(".")[0] for mode in dispatch_modes()]
        others = [type(mode).__module__.partition(".")[0] for mode in function_modes()]
        is_watched = any(kind != _OURS for kind in kinds) or any(kind not in ("torch", _OURS) for kind in others)
        self._is_on &= not (is_watched or has_hooks() or torch.is_anomaly_enabled())
        self._num_modes = count_dispatch_modes()

    # -- calls that are about to be made --------------------------------------------------------------------

    def asked(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ComparedCall | None:
        """Reads a call; None if it can't be compared, or did before what can't be made again."""
        if not self._compares(func):
            return None
        operands: list[torch.Tensor] = []
        nodes: list[fx.Node] = []
        try:
            told, given = self._told(args, operands, nodes)
            if kwargs:
                values, named = self._told(kwargs.values(), operands, nodes)
                told, kwargs = (told, tuple(kwargs), values), dict(zip(kwargs, named, strict=True))
        except _OddError:
            return None
        if not any(type(x) is FakeTensor for x in operands):
            return None
        shared: list[int] = []
        if len(nodes) > 1:
            numbers = [node.meta["storage"] for node in nodes]
            shared = [*map(nodes.index, nodes), *map(numbers.index, numbers)]
        autocast = autocast_state()
        key = func, told, tuple(shared), autocast, _state()
        if key not in self._recipes:
            return ComparedCall(key, tuple(given), kwargs, operands, nodes, autocast, None)
        recipe = self._recipes[key]
        if recipe is None or (self._runs_views and any(made.is_view for made in recipe.made)):
            return None
        return ComparedCall(key, tuple(given), kwargs, operands, nodes, autocast, recipe)

    def _compares(self, func: Any) -> bool:
        """Tells whether calls of a function are compared now."""
        if not self._is_on or type(func) not in _FUNCTIONS or count_dispatch_modes() != self._num_modes:
            return False
        is_comparable = self._comparable.get(func)
        if is_comparable is None:
            is_comparable = self._comparable[func] = _is_comparable(func)
        return is_comparable

    def _told(
        self, values: Iterable[Any], operands: list[torch.Tensor], nodes: list[fx.Node]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Returns what is compared of values, and these with nodes in place of tensors."""
        told: list[Any] = []
        given: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in _LITERALS:
                told.append((kind, value))
                given.append(value)
            elif kind is float:
                told.append(value.hex())
                given.append(value)
            elif isinstance(value, torch.Tensor):
                value = self._originals.get(id(value), value)
                node = self._table.node(value)
                if node is None or node.meta["requires_grad"] != value.requires_grad:
                    raise _OddError
                told.append(self._told_tensor(value, node))
                operands.append(value)
                nodes.append(node)
                given.append(node)
            elif kind is tuple or kind is list:
                inner, inner_given = self._told(value, operands, nodes)
                told.append((kind, inner))
                given.append(kind(inner_given))
            elif kind is slice:
                bounds = value.start, value.stop, value.step
                if any(type(bound) not in (int, type(None)) for bound in bounds):
                    raise _OddError
                told.append((slice, bounds))
                given.append(value)
            elif kind is torch.Size:
                told.append((kind, tuple(value)))
                given.append(value)
            else:
                raise _OddError
        return tuple(told), given

    def _told_tensor(self, tensor: torch.Tensor, node: fx.Node) -> Hashable:
        if type(tensor) is not FakeTensor:
            return node, self._writes  # what a call reads of its values is in no form
        form = self._form_of.get(node)
        if form is None:
            form = self._form_of[node] = self._form(tensor, node)
        # A cast that autocast has kept of a parameter is part of no later call's history.
        return form, tensor.requires_grad, node.op == "get_attr" and bool(node.users)

    def _form(self, tensor: FakeTensor, node: fx.Node) -> int:
        """A number for all that a call can tell of a fake tensor."""
        if tensor.layout != torch.strided or tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
            raise _OddError
        if tensor.requires_grad and storage_key(tensor) in self._written:
            raise _OddError  # to ask for the history of a view of such memory makes that anew, by calls of its own
        is_parameter, nbytes = isinstance(tensor, nn.Parameter), tensor.untyped_storage().nbytes()
        form = *_geometry(tensor), tensor.is_leaf, is_parameter, nbytes, node.op == "get_attr"
        return self._forms.setdefault(form, len(self._forms))

    # -- calls that were made ---------------------------------------------------------------------------------

    def note(
        self,
        asked: ComparedCall | None,
        node: fx.Node,
        result: Any,
        effects: EffectWatch,
        ready: Sequence[Ready] | None,
    ) -> None:
        """Keeps what a call did that has run, if an equal call can do without; None for one that isn't compared."""
        if asked is None:
            return
        self._recipes[asked.key] = None
        if "writes" in node.meta or effects.is_value_dependent or effects.hides_draws:
            return
        for device in {x.fake_device for x in pytree.tree_leaves(result) if type(x) is FakeTensor}:
            if device not in self._attributes:
                self._attributes[device] = vars(FakeTensor(self._fake_mode, torch.empty(0, device="meta"), device))
        kind: Any = None if isinstance(result, torch.Tensor) else type(result)
        results: Any = [result] if kind is None else result
        if kind not in (None, tuple, list) or any(type(x) is not FakeTensor for x in results):
            return
        places = None
        if ready is not None:
            places = tuple(tuple(None if n is None else asked.nodes.index(n) for n in each) for each in ready)
        try:
            made = tuple(self._how(asked, tensor, results) for tensor in results)
        except _OddError:
            return
        recipe = Recipe(node, kind, made, effects.is_random, places)
        if all(map(_is_alike, self.made(recipe, asked), results)):
            self._recipes[asked.key] = recipe

    def _how(self, asked: ComparedCall, tensor: FakeTensor, results: Sequence[FakeTensor]) -> ResultRecipe:
        """How a result is made, unless it shares memory in a way that isn't a view of one fake operand."""
        node = self._table.latest(tensor)
        form = self._form(tensor, node)
        geometry = _geometry(tensor)
        same = next((i for i, x in enumerate(asked.operands) if x is tensor), None)
        if same is not None:
            return ResultRecipe(same, False, *geometry, tensor.requires_grad, form, node)
        number = node.meta["storage"]
        known = [i for i, x in enumerate(asked.nodes) if x.meta["storage"] == number]
        if known:
            if type(asked.operands[known[0]]) is not FakeTensor:
                raise _OddError
            return ResultRecipe(known[0], True, *geometry, tensor.requires_grad, form, node)
        if sum(storage_key(x) == storage_key(tensor) for x in results) > 1 or self._table.count(number) > 1:
            raise _OddError
        return ResultRecipe(None, False, *geometry, tensor.requires_grad, form, node)

    def note_writes(self, written: Sequence[torch.Tensor]) -> None:
        """Notes what a call that has run has written.

        Raises:
            StartAgainError: If a recalled call views this memory: autograd doesn't know, and would leave its history
                as it was.
        """
        for tensor in written:
            if storage_key(tensor) in self._views:
                self.refuse()
            nodes = [node for node, _ in self._table.names(storage_key(tensor))]
            self._written.add(storage_key(tensor))
            self._writes += bool(nodes)
            self._runs_views |= any(node.op != "get_attr" for node in nodes)
            for node in nodes:
                self._form_of.pop(node, None)

    # -- results that are made --------------------------------------------------------------------------------

    def made(self, recipe: Recipe, asked: ComparedCall) -> list[Any]:
        """Returns the results of a call that equals an earlier one."""
        found: list[Any] = []
        lacking: list[int] = []
        with DisableTorchDispatch():
            for made in recipe.made:
                if made.given is not None and not made.is_view:
                    found.append(asked.operands[made.given])
                    continue
                if made.given is None:
                    inner = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
                else:
                    memory = asked.operands[made.given].untyped_storage()
                    inner = torch.empty(0, dtype=made.dtype, device="meta")
                    inner.set_(memory, made.offset, made.shape, made.stride)  # pyright: ignore
                if made.has_history:
                    lacking.append(len(found))
                tensor = make_subclass(
                    FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=made.device
                )
                forbid_memory(tensor)
                vars(tensor).update(self._attributes[made.device])
                found.append(tensor)
            if lacking:
                with_history = _apply(self._start, [found[i] for i in lacking], self.refuse)
                for i, tensor in zip(lacking, with_history, strict=True):
                    found[i] = tensor
        return found

    def bind(
        self,
        recipe: Recipe,
        asked: ComparedCall,
        node: fx.Node,
        results: Sequence[Any],
        part: Callable[[fx.Node, int], fx.Node],
    ) -> None:
        """Describes the results of a recalled call in the graph, where `part` appends a node for one of several."""
        self.is_used = True
        for index, (made, tensor) in enumerate(zip(recipe.made, results, strict=True)):
            own = node if recipe.kind is None else part(node, index)
            if made.given is not None and not made.is_view:
                continue
            given = None if made.given is None else asked.nodes[made.given]
            self._table.bind_equal(tensor, own, made.node, given)
            self._form_of[own] = made.form
            if made.is_view:
                self._views.add(storage_key(tensor))


class _Unwatched(function_class):
    """Of a Function whose attributes a capture doesn't watch."""

    __getattribute__ = type.__getattribute__


class _LeftOut(torch.autograd.Function, metaclass=_Unwatched):
    """Returns tensors that aren't arguments of the call, with a history that says that it was left out."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, held: list[torch.Tensor], refuse: Callable[[], NoReturn]) -> Any:
        ctx.refuse = refuse
        return tuple(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.refuse()


# Without what torch does for transforms of torch.func, none of which is active where calls are recorded.
_apply: Any = super(torch.autograd.Function, _LeftOut).apply  # pyright: ignore[reportAttributeAccessIssue]


def _is_comparable(func: Any) -> bool:
    """Whether calls of a function are compared: one of torch's own that makes tensors."""
    is_differentiating = str(getattr(func, "__module__", "")).startswith("torch.autograd")
    return is_of_torch(func) and not (is_differentiating or is_metadata_read(call_name(func)))


def _state() -> Hashable:
    """What of torch's own state changes what a call returns, or its history."""
    attention = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        count_function_modes(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        *attention_priority(),
    )


def _geometry(tensor: FakeTensor) -> tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device


def _is_alike(made: FakeTensor, tensor: FakeTensor) -> bool:
    """Whether a result that was made is described as the one that the call has returned."""
    return (
        type(made) is type(tensor)
        and _geometry(made) == _geometry(tensor)
        and (made.requires_grad, made.is_leaf) == (tensor.requires_grad, tensor.is_leaf)
        and made.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        and made.is_inference() == tensor.is_inference()
    )
