"""The user's optimizer over some parameters: what its code sees, a dry run of it, and how a step is undone."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from megatrain.base.checks.several_optimizers import parameters_of
from megatrain.base.sizes import aligned
from megatrain.base.torch_private import (
    ITEM,
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    forbid_memory,
    pytree,
    unset_fake_temporarily,
)
from megatrain.device import is_on_host
from megatrain.errors import OptimizerError
from megatrain.optim.masters.halves import Master, SplitMaster
from megatrain.optim.masters.registry import Masters
from megatrain.tracer.packing import is_wrapper, packing_key, plain_tensors, repacked
from megatrain.tracer.recording.sandbox import uncompiled
from megatrain.tracer.spec import TensorSpec

Optimizer = torch.optim.Optimizer
StepCode = Callable[[Optimizer], object]
"""Updates all parameters in an optimizer's groups, once."""

HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
ALIGNED = ("params", "param_names")
"""What a group holds per parameter; all else are options."""

_OWN = ("state", "param_groups", "step", *HOOKS)
# What a subclass may have of its own: no step of torch's calls these.
_OUTSIDE_STEPS = frozenset(
    "__init__ __module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__ __firstlineno__ "
    "__static_attributes__ __parameters__ __orig_bases__ __repr__ __getstate__ __setstate__ state_dict load_state_dict "
    "zero_grad add_param_group".split()
)


def step_code(kind: type[Optimizer]) -> StepCode:
    """Returns the class's own `step`, without the wrapper by which torch calls hooks around it."""
    step: Any = kind.step  # wrapped when the first optimizer of a class is made
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step


_TORCHS = {
    kind: step_code(kind)
    for kind in (
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    )
}
"""The classes of torch whose code updates each parameter by itself, with any options, and this code."""


def runs_torchs_code(optimizer: Optimizer) -> bool:
    """Tells whether a step runs the code of one of torch's own classes and nothing else.

    A subclass may add what no step calls; neither it nor the object may replace a part of the code.
    """
    kind = type(optimizer)
    base = next((each for each in kind.__mro__ if each in _TORCHS), None)
    if base is None or step_code(kind) is not _TORCHS[base]:
        return False
    own = {name for each in kind.__mro__[: kind.__mro__.index(base)] for name in vars(each)} - _OUTSIDE_STEPS
    replaced = {name for name in own | vars(optimizer).keys() if hasattr(base, name)} - {"step", *_OUTSIDE_STEPS}
    return not replaced and not any(name.startswith("__") or name in _OWN for name in own - {"step"})


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's attributes other than groups, state and hooks: a step may read and change them."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN}


def proxy_of(optimizer: Optimizer, held: Mapping[str, Any], groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """Makes an optimizer of the same class with other attributes, groups and state, and no hooks."""
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(held)
    vars(made).update({name: OrderedDict() for name in HOOKS}, state=state, param_groups=groups)
    return made


def own_copy(value: Any) -> Any:
    """Copies an option that a step could write into; returns any other option as it is."""
    if is_wrapper(value):
        return repacked(value, own_copy)  # its class need not know how to clone
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def is_same(one: Any, other: Any, depth: int = 4) -> bool:
    """Compares values by their bits where they are tensors, and through lists, tuples, dicts and plain objects."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        pairs = zip(plain_tensors(one), plain_tensors(other), strict=True)
        return packing_key(one) == packing_key(other) and all(_has_same_bits(*pair) for pair in pairs)
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__") and depth:
        one, other, depth = vars(one), vars(other), depth - 1  # an object that is equal to itself only, in two copies
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key], depth) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(is_same(a, b, depth) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


class Members:
    """The parameters in an optimizer's groups, and what is looked up of them; the same object until they change.

    Attributes:
        held: All of them.
        places: Of each group: the places of each parameter; torch warns of one that is there twice.
        group_of: The group of each, by its identity; None for one that is there twice, which torch updates twice.
    """

    def __init__(self, optimizer: Optimizer):
        self._lists: list[list[torch.Tensor]] = [[*group["params"]] for group in optimizer.param_groups]
        self.held = {parameter for each in self._lists for parameter in each}
        self.places = [_places(each) for each in self._lists]
        self.group_of: dict[int, int | None] = {}
        for index, each in enumerate(self._lists):
            for parameter in each:
                self.group_of[id(parameter)] = None if id(parameter) in self.group_of else index

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Whether the groups have the same parameters, in the same order."""
        lists = [group["params"] for group in optimizer.param_groups]
        return [*map(len, lists)] == [*map(len, self._lists)] and all(
            all(map(is_, one, other)) for one, other in zip(lists, self._lists, strict=True)
        )


class OptimizerStep:
    """A step that has begun: its options stay the same, even if the user changes options in the meantime.

    Each call of `update` runs the optimizer's own code on a proxy that shares the state, but has only some
    parameters in its groups. Each call computes new options and attributes (a count of steps) from the same initial
    values; `commit` writes them to the optimizer, once.
    """

    def __init__(self, optimizer: Optimizer, code: StepCode, members: Members):
        self._optimizer = optimizer
        self._code = code
        self._held = attributes(optimizer)
        self._groups = [
            {key: list(value) if key in ALIGNED else own_copy(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        self._places = members.places
        self._of_groups: list[dict[str, Any]] = [{} for _ in self._groups]
        self._of_attributes: dict[str, Any] = {}

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups as they were when the step began."""
        return self._groups

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the step, in the order of the groups."""
        return [parameter for group in self._groups for parameter in group["params"]]

    def update(self, chosen: Set[torch.Tensor]) -> None:
        """Updates some parameters.

        Raises:
            OptimizerError: If the code leaves other options or attributes than it did for other parameters.
        """
        groups = [_narrowed(*of_group, chosen) for of_group in zip(self._groups, self._places, strict=True)]
        runner = proxy_of(self._optimizer, self._held, groups, self._optimizer.state)
        self._code(runner)
        for before, after, noted in zip(self._groups, groups, self._of_groups, strict=True):
            _note(before, after, noted)
        _note(self._held, attributes(runner), self._of_attributes)

    def update_at_once(self) -> None:
        """Updates all parameters by the code, on the optimizer itself; a failure leaves options and attributes."""
        try:
            self._code(self._optimizer)
        except BaseException:
            for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
                for key in group.keys() - before.keys():
                    del group[key]
                group.update({key: own_copy(value) for key, value in before.items() if key not in ALIGNED})
            for name in attributes(self._optimizer).keys() - self._held.keys():
                delattr(self._optimizer, name)
            vars(self._optimizer).update(self._held)
            raise

    def commit(self) -> None:
        """Writes the step's new options and attributes to the optimizer."""
        for group, noted in zip(self._optimizer.param_groups, self._of_groups, strict=False):
            for key, value in noted.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        vars(self._optimizer).update(self._of_attributes)


def _places(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, list[int]]:
    """The places of each parameter; torch warns of one that is there twice."""
    found: dict[torch.Tensor, list[int]] = {}
    for place, parameter in enumerate(parameters):
        found.setdefault(parameter, []).append(place)
    return found


def _narrowed(
    group: Mapping[str, Any], places: Mapping[torch.Tensor, Sequence[int]], chosen: Iterable[torch.Tensor]
) -> dict[str, Any]:
    """Returns a group with only the chosen parameters, and options that may be written into."""
    # Each block asks, so not by looking at all parameters of the group.
    kept = sorted(place for parameter in set(chosen) for place in places.get(parameter, ()))
    return {key: [v[i] for i in kept] if key in ALIGNED else own_copy(v) for key, v in group.items()}


def _short(value: Any) -> str:
    """What a value is; numbers and other short texts as they are."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def _note(before: Mapping[str, Any], after: Mapping[str, Any], noted: dict[str, Any]) -> None:
    for key, value in after.items():
        if key in ALIGNED or (key in before and is_same(before[key], value)):
            continue
        if key in noted and not is_same(noted[key], value):
            raise OptimizerError(
                f"the optimizer's step left two values of `{key}`: {_short(noted[key])} and {_short(value)}.\n"
                "  Values outside the state of parameters must not depend on which parameters a step gets.\n"
                "  Update all parameters at once with optimizer.step()."
            )
        noted[key] = value


# A dry run: an optimizer's own code steps on stand-ins for its parameters, to show what it does. The optimizer stays as
# it is: the code runs on a proxy over the stand-ins, with state, options and attributes of its own.


@contextmanager
def unnoticed() -> Generator[None]:
    """Hides the body: no warning is shown, generators stay as they were, and new tensors are on the CPU.

    What `torch.compile` made runs its own Python code: nothing can be compiled for tensors without memory.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"), uncompiled():
        warnings.simplefilter("ignore")
        yield


def over_stand_ins(
    optimizer: Optimizer,
    stand_ins: Mapping[torch.Tensor, torch.Tensor],
    *,
    of_state: Callable[[torch.Tensor], torch.Tensor],
    of_option: Callable[[Any], Any] = own_copy,
) -> Optimizer:
    """Makes an optimizer of the same class over stand-ins, which shares nothing with the one it is made of.

    Args:
        optimizer: The user's.
        stand_ins: By parameter. Parameters without one are left out.
        of_state: Makes the stand-in for a tensor in a parameter's state.
        of_option: Makes the stand-in for an option of a group.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if parameter in stand_ins]
        made = {key: of_option(value) for key, value in group.items() if key not in ALIGNED}
        made.update({key: [group[key][i] for i in kept] for key in ALIGNED if key in group})
        made["params"] = [stand_ins[parameter] for parameter in made["params"]]
        groups.append(made)
    state: Any = defaultdict(dict)
    for parameter, stand_in in stand_ins.items():
        if parameter in optimizer.state:
            held: Any = optimizer.state[parameter]
            held = dict(held) if isinstance(held, Mapping) else held
            state[stand_in] = pytree.tree_map(
                lambda leaf: of_state(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), held
            )
    state.update(copy.deepcopy(shared_state(optimizer)))
    return proxy_of(optimizer, copy.deepcopy(attributes(optimizer)), groups, state)


def give_new_state(optimizers: Sequence[Optimizer], parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Gives a parameter the state that its optimizer makes in a first step, unless it has some; for a load to fill.

    Args:
        optimizers: Of which one holds the parameter.
        parameter: Of a model.
        dtype: Of the values that an update sees.
    """
    optimizer = next(o for o in optimizers if any(parameter is p for group in o.param_groups for p in group["params"]))
    if optimizer.state.get(parameter):
        return
    with unnoticed(), torch.no_grad():
        stand_in = torch.nn.Parameter(torch.zeros_like(parameter, dtype=dtype))
        stand_in.grad = torch.zeros_like(stand_in)
        runner = over_stand_ins(optimizer, {parameter: stand_in}, of_state=torch.clone)
        step_code(type(optimizer))(runner)
    optimizer.state[parameter] = runner.state[stand_in]


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the entries of an optimizer's state that belong to no parameter; some optimizers keep such."""
    state: Any = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def empty(spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor of this spec on the host."""
    if spec.stride is None:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)


def faked(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like this one without its memory, in the body of a `FakeTensorMode`.

    A number, such as the count of steps, keeps its value.
    """
    if is_wrapper(tensor):
        return repacked(tensor, faked)
    if tensor.numel() != 1 or tensor.is_meta or isinstance(tensor, FakeTensor):
        return empty(TensorSpec.of(tensor))
    with unset_fake_temporarily():
        number = tensor.item()
    return torch.tensor(number, dtype=tensor.dtype).reshape(tensor.shape)


class WithoutValues(TorchDispatchMode):
    """Lets code run on fake tensors: unknown numbers are one half, and a tensor's memory can't be asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not ITEM:
                raise
            return _one(args[0].dtype)
        # Else `data_ptr()` is 0, and code of C that trusts it ends the process.
        pytree.tree_map_only(FakeTensor, forbid_memory, result)
        return result


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    # Neither end of the range of a decay: `1 - x` and `1 / x` exist.
    return 0.5 if dtype.is_floating_point else 1


def own_state(state: dict[Any, Any], gradient: torch.Tensor) -> None:
    """Copies what an optimizer kept of a gradient by reference: its memory will be that of the next step's."""
    if gradient.layout != torch.strided:
        return
    place = gradient.untyped_storage().data_ptr()

    def own(value: Any) -> Any:
        if is_wrapper(value):
            return value  # of tensors of its own: no optimizer packs a gradient as it is
        is_kept = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return value.clone() if is_kept and value.untyped_storage().data_ptr() == place else value

    for name, value in state.items():
        state[name] = own(value) if type(value) is torch.Tensor else pytree.tree_map(own, value)


class Undo:
    """Copies of some parameters, their masters and their state; those of one update at a time.

    The memory stays for the next update: copies that are made and dropped with each block leave holes in the C
    library's heap.

    Args:
        masters: Parameters that have halves have more to copy.
        is_sure: Whether an update of some parameters, once it writes, is sure to reach its end.
    """

    def __init__(
        self,
        masters: Mapping[torch.Tensor, Master],
        is_sure: Callable[[Optimizer, Collection[torch.Tensor]], bool] = lambda *_: False,
    ):
        self._masters = masters
        self._is_sure = is_sure
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state: dict[Any, Any] = {}

    @contextmanager
    def undoing(self, optimizer: Optimizer, parameters: Collection[torch.Tensor]) -> Generator[None]:
        """Puts parameters and their state back if the body, an update of theirs, fails."""
        if not parameters or self._is_sure(optimizer, parameters):
            yield
            return
        self._note(optimizer, parameters)
        try:
            yield
        except BaseException:
            self._restore(optimizer)
            raise

    @contextmanager
    def undoing_all(self, optimizer: Optimizer) -> Generator[None]:
        """As `undoing`, of all parameters and all state of an optimizer."""
        self._note(optimizer, parameters_of(optimizer), shared_state(optimizer))
        try:
            yield
        except BaseException:
            self._restore(optimizer)
            raise

    def _note(self, optimizer: Optimizer, parameters: Collection[torch.Tensor], keys: Iterable[Any] = ()) -> None:
        """Copies what an update of these parameters may write, and other keys of state; replaces earlier copies."""
        masters = (self._masters.get(parameter) for parameter in parameters)
        lows = [master.low for master in masters if isinstance(master, SplitMaster)]
        written = [*(parameter.detach() for parameter in parameters), *lows]
        states = {key: optimizer.state.get(key) for key in (*parameters, *keys)}
        leaves: list[Any] = pytree.tree_leaves(list(states.values()))
        plain = [t for leaf in leaves if isinstance(leaf, torch.Tensor) for t in plain_tensors(leaf)]
        needed = sum(aligned(t.nbytes) for t in (*written, *plain) if _is_dense(t))
        if needed > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # not both at a time
            self._memory = torch.empty(needed, dtype=torch.uint8)
        self._used = 0
        self._values = [(tensor, self._copy(tensor)) for tensor in written]
        self._state = {key: pytree.tree_map(self._copy, state) for key, state in states.items()}

    def _copy(self, value: Any) -> Any:
        if is_wrapper(value):
            return repacked(value, self._copy)
        if not _is_dense(value):
            return own_copy(value)
        place = self._memory[self._used : self._used + value.nbytes].view(value.dtype).view(value.shape)
        self._used += aligned(value.nbytes)
        return place.copy_(value.detach())

    @torch.no_grad()
    def _restore(self, optimizer: Optimizer) -> None:
        for tensor, before in self._values:
            tensor.copy_(before)
        for key, state in self._state.items():
            if state is None:
                optimizer.state.pop(key, None)
            else:
                optimizer.state[key] = pytree.tree_map(own_copy, state)
            if isinstance(self._masters, Masters) and isinstance(key, torch.Tensor):
                self._masters.wrote(key)  # both halves


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_on_host(value) and value.layout == torch.strided
