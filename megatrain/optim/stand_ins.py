"""An optimizer's own code steps on stand-ins for parameters, to show what it keeps and what it drops."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.errors import OptimizerError
from megatrain.optim.impostor import ALIGNED, Optimizer, attributes, impostor, own_copy, step_code
from megatrain.passes.measure import LiveBytes
from megatrain.torch_features import check_torch
from megatrain.torch_private import DataDependentOutputException, forbid_memory, unset_fake_temporarily
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
class Found:
    """What the update of some parameters leaves in their state, and what it takes beyond that.

    Args:
        state: Bytes by name, in order of first appearance.
        scratch_bytes: Most bytes made and dropped.
        is_estimate: The code ran on corners of the parameters only.
    """

    state: dict[str, int]
    scratch_bytes: int = 0
    is_estimate: bool = False


def add(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds bytes to those of the same name."""
    for name, nbytes in more.items():
        total[name] = total.get(name, 0) + nbytes


def kind_of(optimizer: Optimizer, member: Updated, group: int) -> Hashable:
    """Returns what parameters have in common whose updates keep and drop the same."""
    held = pytree.tree_map_only(torch.Tensor, TensorSpec.of, optimizer.state.get(member.parameter, {}))
    return group, member.spec, member.is_split, str(held)


def step_on_stand_ins(optimizer: Optimizer, members: Sequence[Updated]) -> Found:
    """Takes two steps on tensors without memory; or, where the code needs some, on corners of the parameters.

    Args:
        optimizer: The user's; left as it is.
        members: The parameters of one update.

    Raises:
        OptimizerError: If the code runs on neither.
    """
    check_torch()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            return _stepped(optimizer, members)
        except Exception as error:  # whatever the optimizer's code raises on tensors without memory
            return _estimated(optimizer, members, error)


def _stepped(optimizer: Optimizer, members: Sequence[Updated]) -> Found:
    beside = copy.deepcopy(attributes(optimizer))
    with FakeTensorMode(allow_non_fake_inputs=True):
        state: Any = defaultdict(dict)
        stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        for member in members:
            stand_in = stand_ins[member.parameter] = _stand_in(empty(member.spec), member)
            stand_in.grad = empty(member.spec)
            if member.parameter in optimizer.state:
                state[stand_in] = pytree.tree_map_only(torch.Tensor, faked, optimizer.state[member.parameter])
        groups = _groups_over(optimizer, stand_ins, lambda v: faked(v) if isinstance(v, torch.Tensor) else own_copy(v))
        runner = impostor(optimizer, beside, groups, state)
        given = [*stand_ins.values(), *(p.grad for p in stand_ins.values() if p.grad is not None), *_tensors(state)]
        for tensor in given:
            forbid_memory(tensor)
        with _WithoutValues(), LiveBytes(given) as live:
            for _ in range(_STEPS):
                step_code(optimizer)(runner)
        total: dict[str, int] = {}
        for stand_in in stand_ins.values():
            add(total, bytes_by_name(state.get(stand_in, {})))
        return Found(total, max(0, live.peak - live.current))


def faked(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like this one without its memory; a number, such as the count of steps, keeps its value."""
    if tensor.numel() != 1 or tensor.is_meta or isinstance(tensor, FakeTensor):
        return empty(TensorSpec.of(tensor))
    with unset_fake_temporarily():
        number = tensor.item()
    return torch.tensor(number, dtype=tensor.dtype).reshape(tensor.shape)


def _estimated(optimizer: Optimizer, members: Sequence[Updated], cause: Exception) -> Found:
    """Steps on corners of the parameters, one by one, for code that fake tensors can't bear."""
    total: dict[str, int] = {}
    for member in members:
        if optimizer.state.get(member.parameter):
            add(total, bytes_by_name(optimizer.state[member.parameter]))
            continue
        try:
            corner, state = _corner_state(optimizer, member, sparse=False)
        except Exception:  # again of the optimizer's code; if it takes neither, that is refused
            try:
                corner, state = _corner_state(optimizer, member, sparse=True)  # some take no other gradients
            except Exception:  # the first cause is the one to tell
                raise _unknown(optimizer, cause) from cause
        add(total, bytes_by_name(state, member.spec.numel / max(1, corner.numel())))
    return Found(total, is_estimate=True)


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


def empty(spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor of this spec on the host."""
    if spec.stride is None:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(dict(value)) if isinstance(leaf, torch.Tensor)]


def bytes_by_name(state: Any, ratio: float = 1.0) -> dict[str, int]:
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
        pytree.tree_map_only(FakeTensor, forbid_memory, result)
        return result


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    # Neither end of the range of a decay: `1 - x` and `1 / x` exist.
    return 0.5 if dtype.is_floating_point else 1
