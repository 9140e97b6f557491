"""Followed numbers: Python numbers that a forward only computes with, as values of its graph.

A capture takes a number for a constant. One that is another at each step would cost a capture each, so the forward gets
a `FollowedFloat` or `FollowedInt` in its place. Arithmetic makes more of these. A torch call that is given one is
recorded as `OnNumbers`: at each step the call gets the number of that step, as a plain Python number, and so has
eager's bits. Whatever else Python does with the number decides on it: then it stays a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from megatrain.base.torch_private import FakeTensor, pytree
from megatrain.tracer.calls import call_name, function_text, literal_text
from megatrain.tracer.guards import GuardFailedError
from megatrain.tracer.source_line import SourceLine, user_line
from megatrain.tracer.spec import is_equal, storage_key

Number = float | int


class DecidedError(Exception):
    """Python did more with a followed number than to compute with it."""

    def __init__(self, place: SourceLine | None = None):
        super().__init__()
        self.place = place


class Following:
    """One run of a forward with followed numbers.

    Attributes:
        error: Tells that Python decided on one of them; the model's code may have caught it. None if it didn't.
    """

    def __init__(self) -> None:
        self.error: DecidedError | None = None

    def decide(self, *_: Any, **__: Any) -> NoReturn:
        """Gives up."""
        self.error = self.error or DecidedError(user_line())
        raise self.error

    def number(self, tensor: torch.Tensor, kind: Callable[..., Any] | None = None) -> Followed:
        """Returns the number that a tensor of one element holds, as a float or an int if `kind` is one of these."""
        found = _made(number_in(tensor), self, None, (tensor,))
        return found if kind is None else _made(kind(found.value), self, kind, (found,))


def number_in(tensor: torch.Tensor) -> Number:
    """Returns the only element of a tensor as a Python number; a number of its type if the tensor has no values."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return 0.5 if tensor.is_floating_point() else 1
    return tensor.item()


class Followed:
    """A number that stands for another one at each step.

    Attributes:
        value: The number of the capture.
        function: Computes it; None for one that a tensor holds.
        operands: What `function` is called with, followed and plain numbers; or that tensor.
    """

    value: Number
    following: Following
    function: Callable[..., Any] | None
    operands: tuple[Any, ...]

    def _decide(self, *_: Any, **__: Any) -> NoReturn:
        self.following.decide()


def _computed(function: Callable[..., Any], *operands: Any) -> Any:
    if any(not isinstance(x, Followed) and type(x) not in (float, int, bool) for x in operands):
        return NotImplemented  # a tensor computes, and is recorded
    following = next(x.following for x in operands if isinstance(x, Followed))
    value = function(*(x.value if isinstance(x, Followed) else x for x in operands))
    if type(value) not in (float, int) or (function is operator.pow and type(value) is int):
        following.decide()  # an integer's power is one or a float, by the exponent's sign
    return _made(value, following, function, operands)


def _arithmetic(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (
        lambda *operands: _computed(function, *operands),
        lambda self, other: _computed(function, other, self),
    )


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
_DECIDING = """
    bool float int index complex eq ne lt le gt ge hash round trunc floor ceil repr str format copy deepcopy reduce
    reduce_ex and or xor lshift rshift rand ror rxor rlshift rrshift divmod rdivmod contains array
""".split()


def _members(kind: type) -> dict[str, Any]:
    """What a class of followed numbers has in place of torch's symbolic numbers, so that nothing of these is left."""
    members: dict[str, Any] = {f"__{name}__": Followed._decide for name in _DECIDING}  # pyright: ignore[reportPrivateUsage]
    for name in _BINARY:
        members[f"__{name}__"], members[f"__r{name}__"] = _arithmetic(getattr(operator, name))
    members |= {f"__{name}__": _arithmetic(getattr(operator, name))[0] for name in _UNARY}
    # The model's code may ask `isinstance(x, float)`. C++ asks for the node where it takes a symbolic number apart.
    return members | {"__class__": property(lambda _: kind), "node": property(lambda self: self.following.decide())}


# Torch's calls accept its own symbolic numbers where they accept plain ones.
FollowedFloat = type("FollowedFloat", (Followed, torch.SymFloat), _members(float))
FollowedInt = type("FollowedInt", (Followed, torch.SymInt), _members(int))


def _made(
    value: Number, following: Following, function: Callable[..., Any] | None, operands: tuple[Any, ...]
) -> Followed:
    made: Any = object.__new__(FollowedFloat if type(value) is float else FollowedInt)
    made.value, made.following, made.function, made.operands = value, following, function, operands
    return made


def is_followed(value: Any) -> bool:
    """Tells whether a value, or a bound of a slice, is a followed number."""
    if type(value) is slice:
        return any(isinstance(x, Followed) for x in (value.start, value.stop, value.step))
    return isinstance(value, Followed)


def refuse_followed(values: Any) -> None:
    """Gives up followed numbers that code which runs anew at each step is given."""
    for value in pytree.tree_leaves(values):
        if is_followed(value):
            (value.following if isinstance(value, Followed) else Following()).decide()


def held_tensors(number: Followed) -> list[torch.Tensor]:
    """Lists the tensors that hold what a number is computed from."""
    if number.function is None:
        return [number.operands[0]]
    return [tensor for x in number.operands if isinstance(x, Followed) for tensor in held_tensors(x)]


class _Computed:
    """How a number is computed at a step: from which operands of the call, by which function."""

    __slots__ = ("function", "now", "operands", "place")

    def __init__(self, number: Followed, places: dict[int, int]):
        self.now = number.value
        self.place = -1 if number.function is not None else places[id(number.operands[0])]
        self.function = number.function
        operands = () if number.function is None else number.operands
        self.operands = tuple(_Computed(x, places) if isinstance(x, Followed) else x for x in operands)

    def value(self, tensors: Sequence[torch.Tensor]) -> Number:
        if self.function is None:
            return number_in(tensors[self.place])
        return self.function(*(x.value(tensors) if isinstance(x, _Computed) else x for x in self.operands))

    def text(self, names: Sequence[str]) -> str:
        """Prints it on operands that are printed already."""
        if self.function is None:
            return f"{names[self.place]}.item()"
        parts = [x.text(names) if isinstance(x, _Computed) else repr(x) for x in self.operands]
        return f"{self.function.__name__}({', '.join(parts)})"

    @property
    def key(self) -> tuple[Any, ...]:
        """Tells computations apart."""
        operands = tuple(x.key if isinstance(x, _Computed) else (type(x), repr(x)) for x in self.operands)
        return self.function, self.place, operands


class OnNumbers:
    """Makes a torch call with the numbers of a step; the target of a graph node.

    Args:
        op: `"call_method"` or `"call_function"`.
        operands: The tensors among them, then those that hold numbers.
    """

    __slots__ = ("_alike", "_calls", "_leaves", "_tree", "function", "op", "target")

    def __init__(self, op: str, target: Any, args: Any, operands: Sequence[torch.Tensor], calls: tuple[str, ...]):
        self.op, self.target = op, target
        self.function = getattr(target, "__self__", None)  # see `applied_function`
        places = {id(tensor): place for place, tensor in reversed(list(enumerate(operands)))}
        leaves, self._tree = pytree.tree_flatten(args)
        self._leaves = [
            _Computed(x, places) if isinstance(x, Followed) else places[id(x)] if isinstance(x, torch.Tensor) else [x]
            for x in leaves
        ]
        self._alike: list[Any] | None = None
        self._calls = calls

    def arguments(self, tensors: Sequence[Any], value: Callable[[_Computed], Any] | None = None) -> Any:
        """Returns the positional and keyword arguments of the call.

        Args:
            value: Gives what stands for a number; None computes it.
        """
        compute = value or (lambda number: number.value(tensors))
        leaves = [
            compute(x) if isinstance(x, _Computed) else tensors[x] if isinstance(x, int) else x[0] for x in self._leaves
        ]
        return pytree.tree_unflatten(leaves, self._tree)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Makes the call; a GuardFailedError if the result has another shape, dtype or memory than in the capture."""
        result = self._called(*self.arguments(tensors))
        found = alike(result, tensors)
        if found != self._alike:
            raise GuardFailedError(f"{self.call_text('...')} returns {self._alike}", str(found), self._calls)
        return result

    def first_run(self, *tensors: torch.Tensor) -> Any:
        """Makes the call of the capture, and notes what it returns."""
        result = self._called(*self.arguments(tensors, lambda number: number.now))
        self._alike = alike(result, tensors)
        return result

    def is_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tells whether the call returns the same shapes and memory for other numbers; tensors without values do."""
        try:
            found = [
                alike(
                    self._called(
                        *self.arguments(tensors, lambda number, by=by: number.now * by + type(number.now)(by > 1))
                    ),
                    tensors,
                )
                for by in (1, 2)
            ]
        except Exception:  # a number that the call refuses
            return False
        return found[0] == found[1]

    def _called(self, args: Any, kwargs: Any) -> Any:
        if self.op == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def call_text(self, arguments: str) -> str:
        """Prints the call on operands that are printed already."""
        names = arguments.split(", ") if arguments != "..." else ["..."] * 99
        args, kwargs = self.arguments([_Name(name) for name in names], lambda number: _Name(number.text(names)))
        parts = [_text(x) for x in args] + [f"{key}={_text(x)}" for key, x in kwargs.items()]
        if self.op == "call_method":
            return f"{parts[0]}.{self.target}({', '.join(parts[1:])})"
        return f"{function_text(self.target)}({', '.join(parts)})"

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bare name of what is called."""
        return self.target if self.op == "call_method" else call_name(self.target)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OnNumbers) or (self.op, self._tree, self._alike) != (
            other.op,
            other._tree,
            other._alike,
        ):
            return False
        pairs = zip(self._leaves, other._leaves, strict=True)
        return (self.target is other.target or self.target == other.target) and all(_is_same(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.op, self.__name__))


class _Name(str):
    """Stands for an operand in a printed call."""


def _text(value: Any) -> str:
    return str(value) if isinstance(value, _Name) else literal_text(value)


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, _Computed) and isinstance(right, _Computed):
        return left.key == right.key
    return is_equal(left, right)


def alike(result: Any, operands: Sequence[torch.Tensor]) -> list[Any]:
    """What every later result of a call must have in common with one: shapes, dtypes, and the operands' memory."""
    memory = list(map(storage_key, operands))
    return [
        (tuple(t.shape), t.dtype, memory.index(own) if (own := storage_key(t)) in memory else -1)
        if isinstance(t, torch.Tensor)
        else None
        for t in pytree.tree_leaves(result)
    ]
