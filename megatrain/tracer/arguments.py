"""The arguments of a call, and any nested objects: takes tensors out of them and puts others in their place."""

from __future__ import annotations

import copy
import inspect
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from megatrain.base.garbage import paused_collection
from megatrain.base.torch_private import pytree
from megatrain.device import Device, is_on_host
from megatrain.errors import ExecuteError, TraceError
from megatrain.tracer.inventory import check_plain
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.user_dicts import IMMUTABLE, Opened, opened

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Positions:
    """What a signature calls its positional arguments.

    Args:
        rest: Of the parameter that takes all further ones (`*args`), if there is one.
    """

    names: tuple[str, ...] = ()
    rest: str | None = None

    def name(self, index: int) -> str:
        """Names a positional argument: `ids`, `args_0` in `*args`, `arg0` where the signature has no name for it."""
        if index < len(self.names):
            return self.names[index]
        return f"arg{index}" if self.rest is None else f"{self.rest}_{index - len(self.names)}"


# Every call of a model asks; `inspect.signature` takes longer than all else that a call does with its arguments.
# By the function, as it is and as a method, whose first argument is bound.
_functions: WeakKeyDictionary[Any, Positions] = WeakKeyDictionary()
_methods: WeakKeyDictionary[Any, Positions] = WeakKeyDictionary()


def positions_of(model: nn.Module) -> Positions:
    """Returns the words for positional arguments of a call of `model`."""
    called = _called(model)
    function = getattr(called, "__func__", called)
    known = _functions if function is called else _methods
    try:
        found = known.get(function)
        if found is None:
            found = known[function] = _positions(called)
        return found
    except TypeError:  # an object that can't be hashed or has no weak references
        return _positions(called)


def _called(model: nn.Module) -> Callable[..., Any]:
    """The code that gets the arguments: `forward`, unless a class of the model's has a `__call__` of its own."""
    for kind in type(model).__mro__:
        if kind is nn.Module:
            break
        if "__call__" in vars(kind):
            return model.__call__
    return model.forward


def _positions(called: Callable[..., Any]) -> Positions:
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return Positions()  # code in C, or a `__signature__` that is none
    names = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    return Positions(names, rest)


# By the layout of the arguments and the words for them: the calls of a training loop have one layout, or a few.
_made: dict[tuple[str, Positions], tuple[str, ...]] = {}
_MOST = 1024


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layout: str) -> tuple[str, ...]:
    """Names the leaves of `(args, kwargs)`: `ids`, `labels`, `batch_mask`, `args_0`.

    The names are distinct, and names that a graph accepts unchanged: what is printed of a call, of its graph, and in
    errors has the same words. A name that Python takes for itself gets an underscore: `input_`.
    """
    positions = positions_of(model)
    key = layout, positions
    names = _made.get(key)
    if names is None:
        paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
        if len(_made) >= _MOST:
            _made.clear()
        names = _made[key] = _distinct([_legal(_path_name(path, positions)) for path in paths])
    return names


def _path_name(path: tuple[Any, ...], positions: Positions) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:]]
    if path[0].idx == 0 and parts:
        parts[0] = positions.name(path[1].idx)
    return "_".join(parts) or "arg"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Makes each name another one: the first keeps it, the next is `name_1`."""
    taken: set[str] = set()
    found: list[str] = []
    for name in names:
        chosen, count = name, 0
        while chosen in taken or (count and chosen in names):
            count += 1
            chosen = f"{name}_{count}"
        taken.add(chosen)
        found.append(chosen)
    return tuple(found)


def _legal(name: str) -> str:
    """Returns a name that an fx graph takes as it is."""
    if not name.isidentifier() or not name.isascii():
        name = "".join(c if c.isalnum() and c.isascii() else "_" for c in f"arg_{name}")
    node = fx.Graph().create_node("placeholder", name, name=name)
    return name if node.name == name else f"{name}_"


class _TensorMetError(Exception):
    """A deep copy reached a tensor whose class copies itself."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.tensor = tensor


class _OnDeepCopy(TorchFunctionMode):
    """Collects the tensors that a deep copy meets, and leaves each of them uncopied."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__deepcopy__":
            return self.met.setdefault(id(args[0]), args[0])
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors:
            raise _TensorMetError(tensors[0])
        return func(*args, **(kwargs or {}))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a deep copy whose ordered dictionaries have the originals' order of items, and their attributes.

    Such a class may copy itself by making a new object: a model output is made of its fields, in their order, and an
    item that is set again becomes an attribute again.
    """
    copied = copy.deepcopy(value, memo)
    for original in tuple(memo.get(id(memo), ())):  # where `copy.deepcopy` keeps alive what it has copied
        made: Any = memo.get(id(original))
        if not isinstance(original, OrderedDict) or type(made) is not type(original):
            continue
        if made.keys() == original.keys():
            for key in original:
                OrderedDict.move_to_end(made, key)
        vars(made).update(copy.deepcopy(dict(vars(original)), memo))
    return copied


@paused_collection()  # a step that is collected in the mode would run its due updates there
def _copied_around_tensors(value: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Deep-copies `value` except for its tensors, and lists those in the order met.

    `Parameter` and some other subclasses copy themselves out of sight of the mode. Once met, stand-ins
    replace them by way of the memo, which `copy.deepcopy` asks first.
    """
    owners: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    while True:
        try:
            with _OnDeepCopy() as mode:
                copied = _copied(value, dict(memo))
            break
        except _TensorMetError as error:
            if id(error.tensor) in memo:
                raise TypeError("it copies a tensor on its own") from None
            stand_in = memo[id(error.tensor)] = torch.empty(0)
            owners[id(stand_in)] = error.tensor
    if not owners:
        return copied, tuple(mode.met.values())
    with _OnDeepCopy() as mode:
        copy.deepcopy(copied)
        return _copied(copied, dict(owners)), tuple(owners.get(i, t) for i, t in mode.met.items())


# What `copy.deepcopy` raises at objects that can't be copied: locks, generators, tensors with a history, some of C++.
_NO_COPY = (TypeError, RuntimeError, NotImplementedError)


def holds_tensors(value: Any) -> bool:
    """Tells whether an object of any type has tensors in it; False if it can't be looked into."""
    try:
        return bool(_copied_around_tensors(value)[1])
    except _NO_COPY:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """An object of any type (tuple, dict, dataclass, model output, cache) with its tensors numbered.

    Args:
        placeholders: The distinct tensors in it, in the order a deep copy meets them.
    """

    skeleton: Any
    placeholders: tuple[torch.Tensor, ...]

    @staticmethod
    def of(value: Any) -> Structure:
        """Finds the tensors in `value`.

        Raises:
            TraceError: If an object in it can't be copied, so that no call could return a fresh one.
        """
        try:
            return Structure(*_copied_around_tensors(value))
        except _NO_COPY as error:
            raise TraceError(
                f"the model returns an object that can't be copied ({type(value).__qualname__}: {error}).\n"
                "  Every call must return fresh objects around its own tensors.\n"
                "  Return tensors, containers, dataclasses or objects that copy.deepcopy accepts."
            ) from error

    def emptied(self) -> Structure:
        """Returns the same around tensors of no elements: those of a capture hold its history, and closures in it."""
        stand_ins = tuple(torch.empty(0) for _ in self.placeholders)
        return Structure(self.fill(stand_ins), stand_ins)

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns a fresh copy of the object with `tensors` in place of the placeholders, in order."""
        return _copied(self.skeleton, {id(p): t for p, t in zip(self.placeholders, tensors, strict=True)})


@dataclass(frozen=True, slots=True)
class HeldNumber:
    """Stands among the leaves for a number of this type that a tensor holds."""

    kind: type


@dataclass(frozen=True, slots=True)
class NumberAttribute:
    """A number that a module's own `__dict__` holds under a name."""

    module: nn.Module
    name: str
    path: str
    kind: type

    def now(self) -> Any:
        """Reads it; None if there is no number of this type."""
        value = vars(self.module).get(self.name)
        return value if _is_number(value) and type(value) is self.kind else None


def _is_number(value: Any) -> bool:
    """Tells whether a tensor of one element can hold a value as it is."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


_HOLDS = {float: torch.float64, int: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of a call: tensors in order, and a key for all else.

    Args:
        tensors: The tensors among the leaves, then those that hold numbers; see `with_numbers`.
        leaves: All that is no container.
        layout: The tree as text, which a signature compares.
        attributes: Numbers of the model that the last tensors hold.
        follows_reads: Whether a capture follows the numbers that Python reads from tensors of one element.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    leaf_names: tuple[str, ...]
    layout: str
    attributes: tuple[NumberAttribute, ...] = ()
    follows_reads: bool = False

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Flattens the arguments of one call; a TraceError if one is a sparse, nested, quantized or special tensor."""
        args, kwargs = opened((args, kwargs))
        found, tree = pytree.tree_flatten((args, kwargs))
        leaves, layout = tuple(found), str(tree)
        names = input_names(model, args, kwargs, layout)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for i in at:
            check_plain(f"input `{names[i]}`", leaves[i])
        return Arguments(tuple(leaves[i] for i in at), tuple(names[i] for i in at), leaves, tree, names, layout)

    @property
    def literals(self) -> tuple[Any, ...]:
        """The leaves with every tensor replaced by None."""
        return tuple(None if isinstance(x, torch.Tensor) else x for x in self.leaves)

    def converted(self, source: torch.dtype, target: torch.dtype) -> Arguments:
        """Returns the arguments with tensors of one dtype as another; one that stands twice is converted once."""
        made = {id(t): t.to(target) for t in self.tensors if t.dtype == source}
        tensors = tuple(made.get(id(t), t) for t in self.tensors)
        return replace(self, tensors=tensors, leaves=tuple(made.get(id(x), x) for x in self.leaves))

    @property
    def numbers(self) -> list[int]:
        """The places of numbers among the leaves, except those that no tensor can hold."""
        return [i for i, x in enumerate(self.leaves) if _is_number(x)]

    @property
    def num_held(self) -> int:
        """How many tensors hold numbers."""
        return sum(isinstance(x, HeldNumber) for x in self.leaves) + len(self.attributes)

    def with_numbers(
        self, places: Sequence[int], attributes: Sequence[NumberAttribute] = (), *, follows_reads: bool = False
    ) -> Arguments:
        """Returns the arguments with numbers in tensors of one element on the host, after the other tensors.

        Args:
            places: Of numbers among the leaves, ascending.
        """
        leaves, names = list(self.leaves), [self.leaf_names[i] for i in places]
        values = [*(leaves[i] for i in places), *(attribute.now() for attribute in attributes)]
        made = [torch.tensor(value, dtype=_HOLDS[type(value)], device="cpu") for value in values]
        for i in places:
            leaves[i] = HeldNumber(type(leaves[i]))
        return replace(
            self,
            tensors=(*self.tensors, *made),
            names=(*self.names, *names, *(attribute.path for attribute in attributes)),
            leaves=tuple(leaves),
            attributes=tuple(attributes),
            follows_reads=follows_reads,
        )

    def rebuild(
        self, tensors: Sequence[torch.Tensor], number: Callable[[torch.Tensor], Any] = torch.Tensor.item
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns `(args, kwargs)` with other tensors in the places of these.

        Args:
            tensors: As many as there are, in the same order.
            number: Gives what stands for the number that a tensor holds.
        """
        count = len(tensors) - self.num_held
        rest, numbers = iter(tensors[:count]), map(number, tensors[count:])  # the last are attributes
        leaves = [
            next(rest) if isinstance(x, torch.Tensor) else next(numbers) if isinstance(x, HeldNumber) else x
            for x in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.tree)


def tensors_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Returns the tensors among the arguments of a call, in the order of `Arguments.tensors`."""
    return tuple(x for x in pytree.tree_leaves(opened((args, kwargs))) if isinstance(x, torch.Tensor))


def call_signature(arguments: Arguments, device: Device) -> tuple[Hashable, Hashable]:
    """What a capture assumes of a call: structure, specs, literals, modes and types of numbers; and the numbers."""
    has_grad = torch.is_grad_enabled()
    place = device.torch_device
    given = arguments.tensors[: len(arguments.tensors) - arguments.num_held]
    specs = tuple((TensorSpec.of(t, place), t.requires_grad and has_grad) for t in given)
    literals, numbers = list[Hashable](), list[Hashable]()
    for leaf in arguments.literals:
        is_held = isinstance(leaf, HeldNumber)
        if is_held or _is_number(leaf):
            numbers.append(leaf if is_held else _literal_key(leaf))
        literals.append(leaf.kind if is_held else type(leaf) if _is_number(leaf) else _literal_key(leaf))
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in device.autocast_kinds if torch.is_autocast_enabled(d))
    defaults = torch.get_default_dtype(), torch.get_default_device()
    kind = arguments.layout, specs, tuple(literals), has_grad, autocast, defaults
    return kind, (tuple(numbers), arguments.attributes, arguments.follows_reads)


def _literal_key(value: Any) -> Hashable:
    """A key for a non-tensor argument: equal keys mean that a forward can't tell the values apart."""
    kind = type(value).__qualname__
    if isinstance(value, float | complex | slice):
        return kind, repr(value)  # 0.0 == -0.0, NaN != NaN, and slices have no hash before Python 3.12
    try:
        hash(value)
    except TypeError:
        return kind, id(value)
    return kind, value


def is_plain(leaf: object) -> bool:
    """Tells whether a capture can stand for calls with this argument: a tensor, or a value that never changes."""
    return isinstance(leaf, (torch.Tensor, Enum, HeldNumber, *IMMUTABLE))


def are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tells whether a capture can stand for a call with these arguments, as far as they tell: a cache changes."""
    return all(map(is_plain, pytree.tree_leaves(opened((args, kwargs)), is_leaf=_is_object)))


def _is_object(value: object) -> bool:
    """An object with methods may change in a call, though torch may know how to take it apart (caches, for export)."""
    return not isinstance(value, _CONTAINERS) and not is_dataclass(value)


def check_device(arguments: Arguments, device: Device) -> None:
    """Refuses a call whose tensors are neither where it computes nor on the host.

    Whether the model takes a tensor of the host as it is, a capture finds out: the model's own calls do or don't.
    """
    for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
        if tensor.device != device.torch_device and not is_on_host(tensor):
            raise ExecuteError(
                f"input `{name}` is on {tensor.device}, the compute device is {device}.\n"
                "  Inputs must be on the compute device, as for any module on that device, or on the CPU.\n"
                f'  Move it with .to("{device.torch_device}").'
            )


@contextmanager
def naming_inputs(model: nn.Module, values: Iterable[Any]) -> Generator[None]:
    """Adds to what eager PyTorch raises for a wrong input what the model was given: its errors name neither of both.

    Args:
        model: Runs in the body.
        values: What it is given; tensors count.
    """
    try:
        yield
    except RuntimeError as error:
        note = _given(model, [value for value in values if isinstance(value, torch.Tensor)], str(error))
        if note is not None:
            error.add_note(note)
        raise


def _given(model: nn.Module, tensors: Sequence[torch.Tensor], said: str) -> str | None:
    """What a forward was given, the rule that it may have broken, and the way out; None if no input explains it."""
    specs = ", ".join(str(TensorSpec.of(tensor)) for tensor in tensors)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    others = {tensor.dtype for tensor in tensors} - dtypes
    lines = [f"megatrain: the model's own code raised this, as it does in eager PyTorch, for {specs or 'no tensor'}."]
    if len(dtypes) == 1 and others and (_OF_DTYPES.search(said) or _OF_SIZES.search(said)):
        (dtype,) = dtypes
        lines.append(f"Its parameters are {dtype}. An input that meets them in a product has their dtype.")
        lines.append(f"Convert such inputs by .to({dtype}), or the model before compile().")
    elif _OF_SIZES.search(said):
        lines.append("A batch has the width that the model's layers take; only sizes that these leave open may change.")
        lines.append("Call the plain model with such an input first.")
    else:
        return None
    return "\n  ".join(lines)


_CONTAINERS = (tuple, list, dict, Mapping, deque, Opened)
_OF_DTYPES = re.compile(r"dtype|scalar type", re.IGNORECASE)
_OF_SIZES = re.compile(r"shape|size of|sizes of|size mismatch", re.IGNORECASE)
