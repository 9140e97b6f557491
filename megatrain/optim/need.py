"""What an optimizer will keep and use, found out before it has anything: its own code steps on fake tensors."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.errors import OptimizerError, OptionError
from megatrain.optim.master_step import is_one_pass
from megatrain.optim.per_parameter import check_per_parameter
from megatrain.optim.whole_step import ALIGNED, Optimizer, attributes, impostor, own_copy, step_code
from megatrain.passes.measure import LiveBytes
from megatrain.tracer.spec import TensorSpec

_STEPS = 2
_EDGE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Updated:
    """A parameter as its update sees it.

    Args:
        parameter: The object in the optimizer's groups.
        spec: Of the values that are updated, and of the gradient: fp32 where the parameter has a split master.
        is_split: It has one, or another kind of bf16 master.
    """

    parameter: torch.Tensor
    spec: TensorSpec
    is_split: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerNeed:
    """What the host holds for an optimizer, beside parameters and gradients.

    Args:
        state: Bytes by their name in a parameter's state (`exp_avg`), in order of first appearance.
        scratch_bytes: Most bytes that the update of one block makes and drops.
        is_estimate: The optimizer's code ran on corners of parameters only, for it needs memory behind its tensors.
    """

    state: Mapping[str, int]
    scratch_bytes: int
    is_estimate: bool = False


def optimizer_need(optimizer: Optimizer, blocks: Sequence[Sequence[Updated]]) -> OptimizerNeed:
    """Finds out what the steps of an optimizer take, without allocating it.

    The class's own code takes two steps on fake tensors of the real shapes, once for each kind of block. A number that
    it reads is one half where no fake tensor can know it. State that exists already counts as it is. Code that needs
    memory behind its tensors steps on small corners of the parameters instead; its state is then taken to grow with
    the parameter.

    Args:
        optimizer: The user's; left as it is.
        blocks: The parameters that each block updates. Those that the optimizer doesn't have are passed over.

    Raises:
        OptimizerError: If it needs all parameters at once, or can't step on stand-ins either.
    """
    check_per_parameter(optimizer, probe=False)
    groups = {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    known: dict[Hashable, _Found] = {}
    state: dict[str, int] = {}
    scratch = 0
    is_estimate = False
    for block in blocks:
        mine = [member for member in block if member.parameter in groups]
        in_one_pass = [
            m for m in mine if m.is_split and is_one_pass(optimizer, optimizer.param_groups[groups[m.parameter]])
        ]
        by_code = [m for m in mine if m not in in_one_pass]
        for members in (in_one_pass, by_code):
            if not members:
                continue
            kind = tuple(_kind(optimizer, member, groups) for member in members)
            if kind not in known:
                known[kind] = _found(optimizer, members)
            found = known[kind]
            is_estimate = is_estimate or found.is_estimate
            _add(state, found.state)
            if members is by_code:
                # Halves of a block are joined, and their gradients widened, for the time of the optimizer's own code.
                joined = sum(2 * member.spec.nbytes for member in members if member.is_split)
                scratch = max(scratch, found.scratch_bytes + joined)
    seen = {member.parameter for block in blocks for member in block}
    for parameter, held in dict(optimizer.state).items():
        if parameter not in seen:
            _add(state, _by_name(held))
    return OptimizerNeed(state, scratch, is_estimate)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the update of some parameters leaves in their state, and what it takes beyond that."""

    state: dict[str, int]
    scratch_bytes: int = 0
    is_estimate: bool = False


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, nbytes in more.items():
        total[name] = total.get(name, 0) + nbytes


def _kind(optimizer: Optimizer, member: Updated, groups: Mapping[torch.Tensor, int]) -> Hashable:
    held = pytree.tree_map_only(torch.Tensor, TensorSpec.of, optimizer.state.get(member.parameter, {}))
    return groups[member.parameter], member.spec, member.is_split, str(held)


def _found(optimizer: Optimizer, members: Sequence[Updated]) -> _Found:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            return _stepped(optimizer, members)
        except Exception as error:  # whatever the optimizer's code raises on tensors without memory
            return _estimated(optimizer, members, error)


def _stepped(optimizer: Optimizer, members: Sequence[Updated]) -> _Found:
    beside = copy.deepcopy(attributes(optimizer))
    with FakeTensorMode(allow_non_fake_inputs=True):
        state: Any = defaultdict(dict)
        stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        for member in members:
            stand_in = stand_ins[member.parameter] = _stand_in(_empty(member.spec), member)
            stand_in.grad = _empty(member.spec)
            if member.parameter in optimizer.state:
                state[stand_in] = pytree.tree_map_only(torch.Tensor, _faked, optimizer.state[member.parameter])
        groups = _groups_over(optimizer, stand_ins, lambda v: _faked(v) if isinstance(v, torch.Tensor) else own_copy(v))
        runner = impostor(optimizer, beside, groups, state)
        given = [*stand_ins.values(), *(p.grad for p in stand_ins.values() if p.grad is not None), *_tensors(state)]
        for tensor in given:
            _forbid_memory(tensor)
        with _WithoutValues(), LiveBytes(given) as live:
            for _ in range(_STEPS):
                step_code(optimizer)(runner)
        total: dict[str, int] = {}
        for stand_in in stand_ins.values():
            _add(total, _by_name(state.get(stand_in, {})))
        return _Found(total, max(0, live.peak - live.current))


def _faked(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like this one without its memory; a number, such as the count of steps, keeps its value."""
    if tensor.numel() != 1 or tensor.is_meta or isinstance(tensor, FakeTensor):
        return _empty(TensorSpec.of(tensor))
    with unset_fake_temporarily():
        number = tensor.item()
    return torch.tensor(number, dtype=tensor.dtype).reshape(tensor.shape)


def _estimated(optimizer: Optimizer, members: Sequence[Updated], cause: Exception) -> _Found:
    """Steps on corners of the parameters, one by one, for code that fake tensors can't bear."""
    total: dict[str, int] = {}
    for member in members:
        if optimizer.state.get(member.parameter):
            _add(total, _by_name(optimizer.state[member.parameter]))
            continue
        try:
            corner, state = _corner_state(optimizer, member, sparse=False)
        except Exception:
            try:
                corner, state = _corner_state(optimizer, member, sparse=True)  # some take no other gradients
            except Exception:
                raise _unknown(optimizer, cause) from cause
        _add(total, _by_name(state, member.spec.numel / max(1, corner.numel())))
    return _Found(total, is_estimate=True)


def _corner_state(optimizer: Optimizer, member: Updated, *, sparse: bool) -> tuple[torch.Tensor, Any]:
    corner = _stand_in(torch.zeros([min(n, _EDGE) for n in member.spec.shape], dtype=member.spec.dtype), member)
    gradient = torch.zeros_like(corner, requires_grad=False)
    corner.grad = gradient.to_sparse(1) if sparse else gradient
    state: Any = defaultdict(dict)
    beside = copy.deepcopy(attributes(optimizer))
    groups = _groups_over(optimizer, {member.parameter: corner}, own_copy)
    runner = impostor(optimizer, beside, groups, state)
    for _ in range(_STEPS):
        step_code(optimizer)(runner)
    return corner, state.get(corner, {})


def _unknown(optimizer: Optimizer, cause: Exception) -> OptimizerError:
    return OptimizerError(
        f"what {type(optimizer).__name__} will keep can't be found out: {cause}\n"
        "  Its step runs on stand-ins of the parameters, on the host, first without memory and then on small ones.\n"
        "  Mend what it says, or take a step first: state that exists is counted as it is."
    )


def _stand_in(values: torch.Tensor, member: Updated) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=member.parameter.requires_grad)


def _groups_over(
    optimizer: Optimizer, stand_ins: Mapping[torch.Tensor, torch.Tensor], copied: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """Copies the groups, with stand-ins in the places of parameters that have one, and without all others."""
    made: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kept = [index for index, parameter in enumerate(group["params"]) if parameter in stand_ins]
        options = {key: copied(value) for key, value in group.items() if key not in ALIGNED}
        options.update({key: [group[key][i] for i in kept] for key in ALIGNED if key in group})
        options["params"] = [stand_ins[parameter] for parameter in options["params"]]
        made.append(options)
    return made


def _empty(spec: TensorSpec) -> torch.Tensor:
    if spec.stride is None:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(dict(value)) if isinstance(leaf, torch.Tensor)]


def _by_name(state: Any, ratio: float = 1.0) -> dict[str, int]:
    """Returns the bytes of a parameter's state, each memory once, under the first of its names; of scalars unscaled."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
        for tensor in _tensors({name: value}):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[str(name)] = found.get(str(name), 0) + int(
                    storage.nbytes() * (ratio if tensor.numel() > 1 else 1)
                )
    return found


class _WithoutValues(TorchDispatchMode):
    """Lets code run on fake tensors: unknown numbers are one half, and memory behind a tensor can't be asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _one(args[0].dtype)
        # Else `data_ptr()` is 0, and code of C that trusts it ends the process.
        pytree.tree_map_only(FakeTensor, _forbid_memory, result)
        return result


_forbid_memory: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    # Neither end of the range of a decay: `1 - x` and `1 / x` exist.
    return 0.5 if dtype.is_floating_point else 1


def made_over(
    kind: type[Optimizer] | str, specs: Mapping[str, TensorSpec]
) -> tuple[Optimizer, Mapping[str, torch.Tensor]]:
    """Makes an optimizer with its default options over parameters that have no memory.

    Args:
        kind: A class, or the name of one in `torch.optim`.
        specs: The parameters by key.

    Returns:
        The optimizer, and its parameters by key.

    Raises:
        OptionError: If there is no such class, or it can't be made so.
    """
    make: Any = getattr(torch.optim, kind, None) if isinstance(kind, str) else kind
    if not (isinstance(make, type) and issubclass(make, Optimizer)):
        raise OptionError(
            f"optimizer={kind!r} is not known.\n"
            "  It is an optimizer over the model's parameters, its class, or the name of a class in torch.optim.\n"
            '  Write for example optimizer="AdamW".'
        )
    name, make = make.__name__, cast(Any, make)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = {key: torch.nn.Parameter(_empty(spec)) for key, spec in specs.items()}
        try:
            return make(list(parameters.values())), parameters
        except Exception as error:
            raise OptionError(
                f"optimizer={name} can't be made over all trained parameters of the model: {error}\n"
                "  A class gets all of them, in one group with its default options.\n"
                "  Give an optimizer over those that it shall have; on meta neither takes memory."
            ) from error
